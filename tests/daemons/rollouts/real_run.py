"""A whole run of real processes: hub, peers with real vLLM engines, ledger, workers. The learner changes bits."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from real_server import ENVIRONMENT, Server

from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import BatchClient, Rollout, RolloutBatch
from rollout_node.worker import generate_form, recomputation
from tests.support.until import wait_until

FLAGS = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
END_S = 900.0
STALENESS, BATCH_GROUPS = 2, 2
GROUP_SIZE = 8
"""Equal rewards of a whole group are then rare enough: a batch fails after six such groups."""


class Change(NamedTuple):
    """Of a learner's step. ``share``: of the bfloat16 words. ``bits``: of a word that may flip. ``cumulative``: the
    newest weights change; otherwise the first ones.
    """

    share: float
    bits: int
    cumulative: bool


STRONG = Change(0.02, 0x0180, True)
"""Changes what the model says. Within a few steps most of what a model has learnt is lost."""


def weak(share: float) -> Change:
    """Changes log-probabilities, and leaves the model most of what it has learnt."""
    return Change(share, 0x00E0, False)


def trained(folder: Path, out: Path, drawn: random.Random, change: Change) -> None:
    """The checkpoint with some words changed, written as a training framework does: elsewhere, then renamed."""
    made = out.with_name(f".{out.name}")
    shutil.copytree(folder, made)
    file = made / "model.safetensors"
    content = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    words = (len(content) - begin) // 2
    for _ in range(int(words * change.share)):
        at = begin + 2 * drawn.randrange(words)
        word = int.from_bytes(content[at : at + 2], "little") ^ (change.bits & drawn.getrandbits(16))
        content[at : at + 2] = word.to_bytes(2, "little")
    file.write_bytes(content)
    made.rename(out)


def segments_of(group: int) -> set[str]:
    """Shared memory of a process group. No process of the group is left to remove it after SIGKILL."""
    found: set[str] = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, OSError):
            if os.getpgid(int(entry.name)) == group:
                found |= set(re.findall(r"/dev/shm/psm_\w+", (entry / "maps").read_text()))
    return found


class RealRun:
    """``engines``: a peer with a vLLM server each; workers are dealt out among them. ``database``: URL; None: SQLite.
    ``lease_guess_s``: of first leases. ``live_trainer``: versions come from a trainer's process, not from folders.
    ``engine_flags``, ``engine_options``: of the vLLM servers. ``ledger_options``,
    ``worker_options``: more words for the ledger and for each worker.
    """

    def __init__(
        self,
        folder: Path,
        task: str,
        steps: int,
        model: Path,
        *,
        engines: int,
        workers: int,
        database: str | None = None,
        lease_guess_s: float = 120.0,
        live_trainer: bool = False,
        engine_flags: Sequence[str] = (),
        engine_options: Mapping[str, Any] | None = None,
        ledger_options: Sequence[str] = (),
        worker_options: Sequence[str] = (),
    ) -> None:
        self._source = ["--base", str(model)] if live_trainer else [str(folder / "checkpoints")]
        self._engine_flags, self._engine_options = engine_flags, engine_options or {}
        self._ledger_options, self._worker_options = ledger_options, worker_options
        self.folder, self.task, self.steps, self.model = folder, task, steps, model
        self.database = database
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.servers: list[Server] = []
        self._commands: dict[str, list[str]] = {}
        self._workers = workers
        self._engines = engines
        self._lease_guess_s = lease_guess_s
        self.checkpoints = folder / "checkpoints"
        self.checkpoints.mkdir()
        shutil.copytree(self.model, self.checkpoints / "step_0")

    def __enter__(self) -> RealRun:
        try:
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _start(self) -> None:
        for number in range(self._engines):
            folder = self.folder / f"p{number}"
            folder.mkdir(0o700)
            self.servers.append(Server(self.model, folder, *FLAGS, *self._engine_flags, **self._engine_options))
        hub = [
            *self._source,
            "--listen",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
            "--token-file",
            self._at("token"),
        ]
        self.command("hub", "seed", *hub, "--state", self._at("hub"), "--shadow", self._at("hub-shadow"))
        status = self._answer(self.http("hub"), "/status")
        assert status["role"] == "hub"
        address = self.hub = self.until(lambda: self._listening("hub"), "the hub says where it listens")
        for number, server in enumerate(self.servers):
            state = self.folder / f"p{number}"
            words = [address, "--token-file", self._at("token"), "--http", "127.0.0.1:0", "--state", str(state)]
            self.command(
                f"p{number}",
                "join",
                *words,
                "--shadow",
                self._at(f"p{number}-shadow"),
                "--install",
                f"vllm:{server.url}",
            )
        words = [
            "--task",
            self.task,
            "--http",
            "127.0.0.1:0",
            "--state",
            self._at("ledger"),
            "--last-step",
            str(self.steps),
        ]
        words += ["--hub-http", self.http("hub"), "--batch-groups", str(BATCH_GROUPS), "--group-size", str(GROUP_SIZE)]
        words += ["--staleness", str(STALENESS), "--lease-guess", str(self._lease_guess_s)]
        words += [] if self.database is None else ["--database", self.database]
        words += self._ledger_options
        self.command("ledger", "ledger", *words)
        for number in range(self._engines):
            self.until_engine(number)
        for number in range(self._workers):
            self.start_worker(number)

    def start_worker(self, number: int) -> None:
        engine = number % self._engines
        words = [self.http("ledger"), "--task", self.task, "--bearer-file", self._at("ledger/worker.token")]
        words += ["--engine", self.servers[engine].url, "--peer", self.http(f"p{engine}"), "--slots", "4"]
        self.command(f"w{number}", "work", *words, "--name", f"w{number}", *self._worker_options)

    def _at(self, name: str) -> str:
        return str(self.folder / name)

    def command(self, name: str, *words: str) -> None:
        self.script(name, "-m", "p2pcast.cli", *words)

    def script(self, name: str, *words: str) -> None:
        self._commands[name] = list(words)
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log)

    def http(self, name: str) -> str:
        """HOST:PORT of a daemon's HTTP server, once it answers."""
        file = self.folder / name / "daemon.json"

        def found() -> str | None:
            return json.loads(file.read_text())["http"].removeprefix("http://") if file.exists() else None

        return str(self.until(found, f"{name} answers"))

    def _listening(self, name: str) -> str | None:
        text = (self.folder / f"{name}.log").read_text()
        _, found, rest = text.partition("listening on ")
        return rest.partition(",")[0] if found and "," in rest else None

    def until(self, condition: Any, what: str) -> Any:
        def check() -> None:
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended: {self.said(name)}"

        return wait_until(condition, what, check=check)

    def _answer(self, address: str, path: str) -> Any:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=600) as answer:
            return json.load(answer)

    def status(self, name: str) -> Any:
        return self._answer(self.http(name), "/status")

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-4000:]

    def kill(self, name: str) -> None:
        """By SIGKILL, and start the part again as it was. ``e0``: the first engine, with all its processes."""
        if name.startswith("e"):
            server = self.servers[int(name[1:])]
            segments = segments_of(server.process.pid)
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
            for segment in segments:
                Path(segment).unlink(missing_ok=True)
            server.restart()
            return
        words = self._commands[name]
        if "--http" in words:  # the others know the first address
            words[words.index("--http") + 1] = self.http(name)
        assert self.processes[name].poll() is None, f"{name} ended: {self.said(name)}"
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes.pop(name).wait()
        self.script(name, *words)

    def learn(
        self, seed: int = 1, *, change: Change = STRONG, published: Callable[[int], None] = lambda step: None
    ) -> list[RolloutBatch]:
        """Take every batch of the run, and publish a changed checkpoint after each. ``published``: called after each
        step.
        """
        drawn = random.Random(seed)
        url = f"http://{self.http('ledger')}"
        client = BatchClient(url, bearer_file=self.folder / "ledger" / "http.token", give_up_s=END_S)
        client.resume(0, 0)
        batches: list[RolloutBatch] = []
        while (batch := client.take(len(batches))) is not None:
            batches.append(batch)
            step = len(batches)
            before = self.checkpoints / f"step_{step - 1 if change.cumulative else 0}"
            trained(before, self.checkpoints / f"step_{step}", drawn, change)
            client.applied(batch, step)
            client.ack(step, [batch.id], os.urandom(32))
            published(step)
        return batches

    # -- engines

    def until_engine(self, number: int) -> None:
        """The server answers. A busy machine takes minutes to start one."""
        server = self.servers[number]

        def healthy() -> bool:
            assert server.process.poll() is None, server.log.read_text()[-4000:]
            with contextlib.suppress(OSError), urllib.request.urlopen(server.url + "/health", timeout=5):
                return True
            return False

        self.until(healthy, f"engine {number} answers")

    def until_live(self, version: Version) -> None:
        """All engines serve the version."""

        def live() -> bool:
            served = [self._answer(self.http(f"p{n}"), "/versions")["engines"] for n in range(self._engines)]
            return all(set(engines.values()) == {str(version)} for engines in served)

        self.until(live, f"version {version} is live")

    def scores(self, engine: int, probes: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probabilities of the probes' tokens by a live engine, while its workers play."""
        found = []
        for probe in probes:
            body = json.dumps(recomputation.request(probe, os.urandom(8).hex())).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self.servers[engine].url + generate_form.ROUTE.path, body, headers)
            with urllib.request.urlopen(request, timeout=600) as answer:
                found.append(recomputation.prompt_logprobs(json.load(answer), probe))
        return found

    def wait(self, name: str) -> int:
        """Exit code of a part that ends by itself."""
        return self.processes.pop(name).wait(END_S)

    def terminate(self, name: str) -> int:
        self.processes[name].terminate()
        return self.wait(name)

    def workers_end(self) -> dict[str, int]:
        """Exit codes of the workers, once the ledger has told them that the run has ended."""
        return {name: self.wait(name) for name in list(self.processes) if name.startswith("w")}

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for server in self.servers:
            server.stop()
        for file in sorted(self.folder.glob("*.log")):
            print(f"--- {file.name}\n{file.read_text()[-3000:]}")


def folder_of(run: RealRun, version: Version) -> Path:
    return run.checkpoints / f"step_{version.step}"


def rollouts_of(batches: list[RolloutBatch]) -> list[Rollout]:
    return [rollout for batch in batches for group in batch.groups for rollout in group.rollouts]


def failures_of(run: RealRun) -> list[str]:
    """Lines of workers and engines that report a failed play or request."""
    lines = []
    for number, server in enumerate(run.servers):
        answers = re.findall(r'"POST (/inference/\S+) HTTP/1.1" ([1-9]\d\d)', server.log.read_text(errors="replace"))
        assert answers, "the engine logs its requests"
        # A worker asks for a temperature that no engine takes, to learn whether the route is open.
        lines += [f"e{number}: {path} {code}" for path, code in answers if code not in ("200", "400")]
    for file in sorted(run.folder.glob("w*.log")):
        text = file.read_text(errors="replace")
        lines += [f"{file.name}: {line}" for line in text.splitlines() if re.search(r"play .* failed|\d+ failed", line)]
    return lines


def fresh_scores(folders: Sequence[Path], asked: Sequence[Sequence[int]]) -> list[list[np.ndarray]]:
    """For each folder and list of tokens, the log-probabilities of a fresh vLLM engine; the first token's is 0."""
    command = [sys.executable, str(Path(__file__).with_name("fresh_logprobs.py")), *map(str, folders)]
    environment = {**os.environ, **ENVIRONMENT, "P2PCAST_SOCK": "/nonexistent"}
    lists = json.dumps([[int(token) for token in one] for one in asked])
    done = subprocess.run(command, input=lists, env=environment, text=True, capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    return [[np.array([0.0, *row]) for row in rows] for rows in json.loads(done.stdout.strip().splitlines()[-1])]


def k3(told: Sequence[np.ndarray], true: Sequence[np.ndarray]) -> float:
    """KL divergence by the estimator k3, over all tokens but the first of each list."""
    gaps = np.concatenate([a[1:].astype("f8") - b[1:] for a, b in zip(told, true, strict=True)])
    return float(np.mean(np.expm1(gaps) - gaps))
