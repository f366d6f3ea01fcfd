"""A whole run of real processes: hub, peers with real vLLM engines, ledger, workers. The learner changes bits."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from real_server import Server, make_model

from p2pcast.version import Version
from trainer_node.sdk.batch_client import BatchClient, Rollout, RolloutBatch

FLAGS = ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
END_S = 600.0
CHANGED_SHARE = 0.02
CHANGED_BITS = 0x0180
"""Bits of a bfloat16 word that a step may flip: enough to change what the model says."""


def trained(folder: Path, out: Path, drawn: random.Random) -> None:
    """The checkpoint with some words changed, written as a training framework does: elsewhere, then renamed."""
    made = out.with_name(f".{out.name}")
    shutil.copytree(folder, made)
    file = made / "model.safetensors"
    content = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little")
    words = (len(content) - begin) // 2
    for _ in range(int(words * CHANGED_SHARE)):
        at = begin + 2 * drawn.randrange(words)
        word = int.from_bytes(content[at : at + 2], "little") ^ (CHANGED_BITS & drawn.getrandbits(16))
        content[at : at + 2] = word.to_bytes(2, "little")
    file.write_bytes(content)
    made.rename(out)


class RealRun:
    """``engines``: a peer with a vLLM server each; workers are dealt out among them."""

    def __init__(self, folder: Path, task: str, steps: int, *, engines: int, workers: int, vocabulary: int) -> None:
        self.folder, self.task, self.steps = folder, task, steps
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.servers: list[Server] = []
        self._workers = workers
        self._engines = engines
        self.model = make_model(folder / "model", vocabulary=vocabulary)
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
            self.servers.append(Server(self.model, folder, *FLAGS))
        hub = [
            str(self.checkpoints),
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
        address = self._until(lambda: self._listening("hub"), "the hub says where it listens")
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
        words += ["--hub-http", self.http("hub"), "--batch-groups", "2", "--group-size", "4", "--staleness", "2"]
        self.command("ledger", "ledger", *words)
        for server in self.servers:
            server.wait()
        for number in range(self._workers):
            self.start_worker(number)

    def start_worker(self, number: int) -> None:
        engine = number % self._engines
        words = [self.http("ledger"), "--task", self.task, "--bearer-file", self._at("ledger/worker.token")]
        words += ["--engine", self.servers[engine].url, "--peer", self.http(f"p{engine}"), "--slots", "4"]
        self.command(f"w{number}", "work", *words, "--name", f"w{number}")

    def _at(self, name: str) -> str:
        return str(self.folder / name)

    def command(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "p2pcast.cli", *words], stdout=log, stderr=log
            )

    def http(self, name: str) -> str:
        """HOST:PORT of a daemon's HTTP server, once it answers."""
        file = self.folder / name / "daemon.json"

        def found() -> str | None:
            return json.loads(file.read_text())["http"].removeprefix("http://") if file.exists() else None

        return str(self._until(found, f"{name} answers"))

    def _listening(self, name: str) -> str | None:
        text = (self.folder / f"{name}.log").read_text()
        _, found, rest = text.partition("listening on ")
        return rest.partition(",")[0] if found and "," in rest else None

    def _until(self, condition: Any, what: str) -> Any:
        until_s = time.monotonic() + END_S
        while not (found := condition()):
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended: {self.said(name)}"
            assert time.monotonic() < until_s, f"not within {END_S:g} s: {what}"
            time.sleep(0.05)
        return found

    def _answer(self, address: str, path: str) -> Any:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return json.load(answer)

    def status(self, name: str) -> Any:
        return self._answer(self.http(name), "/status")

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-4000:]

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes.pop(name).wait()

    def learn(self, seed: int = 1) -> list[RolloutBatch]:
        """Take every batch of the run, and publish a changed checkpoint after each."""
        drawn = random.Random(seed)
        url = f"http://{self.http('ledger')}"
        client = BatchClient(url, bearer_file=self.folder / "ledger" / "http.token", give_up_s=END_S)
        client.resume(0, 0)
        batches: list[RolloutBatch] = []
        while (batch := client.take(len(batches))) is not None:
            batches.append(batch)
            step = len(batches)
            trained(self.checkpoints / f"step_{step - 1}", self.checkpoints / f"step_{step}", drawn)
            client.applied(batch, step)
            client.ack(step, [batch.id], os.urandom(32))
        return batches

    def workers_end(self) -> dict[str, int]:
        """Exit codes of the workers, once the ledger has told them that the run has ended."""
        return {name: self.processes.pop(name).wait(END_S) for name in list(self.processes) if name.startswith("w")}

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
