"""Run as a script: ``killable_learner.py CONFIG.json``. A learner that trains by changing bits, for tests that kill it.

Its checkpoint is a folder that is synced, renamed and only then acknowledged. It says the name of each boundary that it
passes (``boundary``), ends there by SIGKILL if ``die-at`` names the boundary, and takes no step beyond ``allowed``.

    folder:  boundary · die-at · allowed · applied (a line for each step) · checkpoint/ · versions/B.S/ · announced/B.S

Without a hub it states its versions to the ledger; ``announced`` then tells the engines of the test.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import BatchClient, RolloutBatch

BOUNDARIES = ("resumed", "taken", "trained", "applied", "published", "stored", "acknowledged")
CHECKPOINT_EVERY = 2
MOST_S = 600.0
CHANGED_SHARE, CHANGED_BITS = 0.02, 0x0180
"""Of the words of a version; bits that change what the model says."""


@dataclass(frozen=True)
class Trained:
    """One batch of the lineage. ``oldest``: step of the oldest weights of its results."""

    id: str
    step: int
    branch: int
    oldest: int
    groups: list[str]
    jobs: list[str]


@dataclass
class Checkpoint:
    """``since``: batches after the checkpoint before."""

    step: int = 0
    lineage: list[Trained] = field(default_factory=list)
    since: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        file = folder / "checkpoint" / "position.json"
        if not file.exists():
            return cls()
        kept = json.loads(file.read_text())
        return cls(kept["step"], [Trained(**row) for row in kept["lineage"]], kept["since"])

    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps(asdict(self)).encode()).digest()


class Weights:
    """A model's words in memory. ``model``: a Hugging Face folder; None: no weights at all."""

    def __init__(self, model: Path | None, stored: Path) -> None:
        self._model = model
        file = stored / "model.safetensors"
        if model is not None and not file.exists():
            file = model / "model.safetensors"
        self.content = b"" if model is None else file.read_bytes()

    def train(self, batch: RolloutBatch) -> None:
        if self._model is None:
            return
        drawn, words = random.Random(batch.id), bytearray(self.content)
        begin = 8 + int.from_bytes(words[:8], "little")
        count = (len(words) - begin) // 2
        for _ in range(int(count * CHANGED_SHARE)):
            at = begin + 2 * drawn.randrange(count)
            word = int.from_bytes(words[at : at + 2], "little") ^ (CHANGED_BITS & drawn.getrandbits(16))
            words[at : at + 2] = word.to_bytes(2, "little")
        self.content = bytes(words)

    def tensors(self) -> Any:
        from safetensors.torch import load

        return load(self.content).items()

    def folder(self, out: Path) -> None:
        """A Hugging Face folder of these words, for engines to compare with."""
        assert self._model is not None
        made = out.with_name(f".{out.name}-{os.getpid()}")
        shutil.copytree(self._model, made)
        (made / "model.safetensors").write_bytes(self.content)
        shutil.rmtree(out, ignore_errors=True)
        made.rename(out)


class Learner:
    def __init__(self, config: dict[str, Any]) -> None:
        self.folder, self.steps, self.staleness = Path(config["folder"]), config["steps"], config["staleness"]
        self.client = BatchClient(config["url"], bearer_file=config["bearer"], give_up_s=MOST_S)
        self.stored = Checkpoint.read(self.folder)
        self.step, self.lineage = self.stored.step, list(self.stored.lineage)
        self.since: list[str] = []
        model = None if config["model"] is None else Path(config["model"])
        self.weights = Weights(model, self.folder / "checkpoint")
        self.publisher: Any = None
        self.branch = 0
        if config["hub"] is not None:
            from trainer_node.sdk.publisher import Publisher

            self.publisher = Publisher(config["hub"], token_file=config["token"], base=config["model"])

    def at(self, boundary: str) -> None:
        """Everything may end here."""
        (self.folder / "boundary").write_text(f"{boundary} of step {self.step}")
        die_at = self.folder / "die-at"
        if die_at.exists() and die_at.read_text() == boundary:
            die_at.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(random.uniform(0.0, 0.05))

    def run(self) -> None:
        self.begin()
        while True:
            while self.step >= int((self.folder / "allowed").read_text()):
                time.sleep(0.05)
            batch = self.client.take(self.step)
            if batch is None:
                break
            self.check(batch)
            self.at("taken")
            self.weights.train(batch)
            self.lineage.append(trained(batch, self.branch))
            self.since.append(batch.id.hex())
            self.step += 1
            self.at("trained")
            self.client.applied(batch, self.step)
            with open(self.folder / "applied", "a") as file:
                file.write(f"{self.branch}.{self.step}\n")
            self.at("applied")
            self.publish()
            self.at("published")
            if self.step % CHECKPOINT_EVERY == 0 or self.step == self.steps:
                self.store()
                self.at("stored")
                self.acknowledge()
                self.at("acknowledged")
        self.at("finished")

    def begin(self) -> None:
        (self.folder / "announced").mkdir(exist_ok=True)
        (self.folder / "versions").mkdir(exist_ok=True)
        if self.publisher is None:
            newest = max(map(Version.parse, os.listdir(self.folder / "announced")), default=Version(0, 0))
            self.branch = newest.branch + (newest.step > self.step)
        else:  # each start is a branch of the hub
            handle = self.publisher.resume(self.step, self.weights.tensors())
            self.branch = handle.wait_durable(MOST_S).branch
        since = [bytes.fromhex(one) for one in self.stored.since]
        self.client.resume(self.branch, self.step, self.stored.digest(), since)
        self.at("resumed")
        if self.publisher is None:
            self.publish()
        else:
            self.weights.folder(self.folder / "versions" / f"{self.branch}.{self.step}")

    def publish(self) -> None:
        version = Version(self.branch, self.step)
        if self.publisher is None:
            (self.folder / "announced" / str(version)).touch()
            self.client.publish(version, blake3(str(version).encode()).digest())
            return
        self.weights.folder(self.folder / "versions" / str(version))
        handle = self.publisher.publish(self.step, self.weights.tensors())
        assert handle.wait_durable(MOST_S) == version

    def store(self) -> None:
        self.stored = Checkpoint(self.step, list(self.lineage), self.since)
        made = self.folder / f".checkpoint-{os.getpid()}"
        made.mkdir()
        for name, content in (
            ("model.safetensors", self.weights.content),
            ("position.json", json.dumps(asdict(self.stored)).encode()),
        ):
            with open(made / name, "wb") as file:
                file.write(content)
                os.fsync(file.fileno())
        # Folders cannot replace each other in one step: the old one stays readable under another name until then.
        link = self.folder / f".link-{os.getpid()}"
        kept = made.rename(self.folder / f"checkpoint-{self.step}-{time.time_ns()}")
        link.symlink_to(kept.name)
        link.rename(self.folder / "checkpoint")
        self.since = []

    def acknowledge(self) -> None:
        self.client.ack(self.step, [bytes.fromhex(one) for one in self.stored.since], self.stored.digest())

    def check(self, batch: RolloutBatch) -> None:
        """The ledger's promises to a learner."""
        assert batch.step == self.step
        new = trained(batch, self.branch)
        assert new.oldest >= self.step - self.staleness
        assert all(len(group.rollouts) >= 2 for group in batch.groups)
        assert len(new.jobs) == len(set(new.jobs))
        for earlier in self.lineage:
            assert not set(new.groups) & set(earlier.groups), "a group is trained twice in a lineage"
            assert not set(new.jobs) & set(earlier.jobs), "a result is counted twice in a lineage"


def trained(batch: RolloutBatch, branch: int) -> Trained:
    results = [rollout.result for group in batch.groups for rollout in group.rollouts]
    return Trained(
        batch.id.hex(),
        batch.step,
        branch,
        min(result.oldest_step for result in results),
        [group.group.id.hex() for group in batch.groups],
        [result.job.hex() for result in results],
    )


if __name__ == "__main__":
    Learner(json.loads(Path(sys.argv[1]).read_text())).run()
