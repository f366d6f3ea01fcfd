"""A trainer's side of the ledger: batches taken, applied, and acknowledged with the checkpoint that contains them.

    client = BatchClient("http://127.0.0.1:7079", bearer_file="ledger/http.token")
    client.resume(branch=0, step=0)
    while (batch := client.take(step)) is not None:
        ...                                     # train on batch.groups
        step += 1
        client.applied(batch, step)
        ...                                     # write a checkpoint of all batches since the last, then
        client.ack(step, batches, checkpoint_digest)

A ledger on another machine is reached over https, by a certificate that the hub issues:

    client = BatchClient("https://ledger.example:7080", hub="hub.example:7077", token_file="trainer.join")

Promises: every request may be repeated, and is repeated until the ledger answers or ``give_up_s`` has passed. A learner
that another has replaced gets RefusedError, and must end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from p2pcast.errors import RemoteError
from p2pcast.rollouts.job import Group
from p2pcast.rollouts.result import Result
from p2pcast.version import Version
from trainer_node.sdk.ledger_connection import LedgerConnection


@dataclass(frozen=True, slots=True)
class Rollout:
    """``reward``: computed by the ledger. ``worker``: name."""

    result: Result
    reward: float
    worker: str


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """Samples of one prompt, whose rewards are compared."""

    group: Group
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Of one learner step. ``groups_played``: those without a gradient included; ``mean_reward``: over all of them."""

    id: bytes
    step: int
    groups: tuple[RolloutGroup, ...]
    groups_played: int
    mean_reward: float | None


class BatchClient:
    """Arguments as of LedgerConnection. Raises UsageError, LocalError."""

    def __init__(
        self,
        url: str,
        *,
        bearer_file: str | os.PathLike[str] | None = None,
        hub: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        name: str | None = None,
        give_up_s: float | None = None,
    ) -> None:
        self._ledger = LedgerConnection(
            url, bearer_file=bearer_file, hub=hub, token_file=token_file, name=name, give_up_s=give_up_s
        )
        self._epoch, self._branch = -1, 0

    def resume(self, branch: int, step: int, checkpoint: bytes | None = None, batches: Sequence[bytes] = ()) -> int:
        """Begin an epoch: this learner trains on from ``checkpoint``, which has ``step`` steps and contains
        ``batches``. Returns the epoch. Raises RefusedError.
        """
        body = {"branch": branch, "step": step, "batches": [batch.hex() for batch in batches]}
        answer = self._ledger.post(
            "learner/resume", body | ({} if checkpoint is None else {"checkpoint": checkpoint.hex()})
        )
        self._epoch, self._branch = int(answer["epoch"]), branch
        return self._epoch

    def take(self, step: int) -> RolloutBatch | None:
        """The batch of the learner's ``step``, as soon as there is one; the same batch when repeated. None at the end
        of the run. Raises RefusedError.
        """
        while True:
            answer = self._ledger.post("batches/take", {"epoch": self._epoch, "branch": self._branch, "step": step})
            if "batch" in answer:
                return _batch_of(answer)
            if answer.get("finished"):
                return None
            time.sleep(min(5.0, max(0.02, float(answer["wait"]))))

    def applied(self, batch: RolloutBatch, step: int) -> None:
        """The learner has applied the batch, and is at ``step`` now. Raises RefusedError."""
        self._ledger.post("batches/applied", {"epoch": self._epoch, "batch": batch.id.hex(), "step": step})

    def ack(self, step: int, batches: Sequence[bytes], checkpoint: bytes) -> None:
        """A checkpoint of ``step`` steps contains the batches. ``checkpoint``: its hash. Raises RefusedError."""
        ids = [batch.hex() for batch in batches]
        self._ledger.post(
            "batches/ack", {"epoch": self._epoch, "step": step, "batches": ids, "checkpoint": checkpoint.hex()}
        )

    def add_groups(self, groups: Sequence[Group]) -> int:
        """Put groups into the pool; returns how many are new. Raises RefusedError."""
        packed = msgpack.packb({"groups": [group.to_bytes() for group in groups]})
        return int(self._ledger.post("groups", packed)["added"])

    def publish(self, version: Version, manifest: bytes) -> None:
        """State a version and the hash of its signed manifest, where the ledger follows no hub."""
        self._ledger.post("versions", {"version": str(version), "manifest": manifest.hex()})


def _batch_of(answer: Any) -> RolloutBatch:
    try:
        groups = tuple(
            RolloutGroup(
                Group.from_bytes(row["group"]),
                tuple(
                    Rollout(Result.from_bytes(one["result"]), float(one["reward"]), str(one["worker"]))
                    for one in row["results"]
                ),
            )
            for row in answer["groups"]
        )
        report = answer["report"]
        return RolloutBatch(
            bytes(answer["batch"]), int(answer["step"]), groups, int(report["groups_played"]), report["mean_reward"]
        )
    except (KeyError, TypeError, ValueError):
        raise RemoteError("the ledger's batch is malformed") from None
