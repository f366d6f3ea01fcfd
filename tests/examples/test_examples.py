"""The unchanged examples against a real hub, real peers and a real vLLM server, compared with the weights that the
trainer saved.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from netem.demo.train import make_model, snapshot, write_checkpoint
from netem.fleet.participants import ENGINE_ENVIRONMENT, ENGINE_OPTIONS
from netem.fleet.processes import Processes, free_port
from tests.support.until import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 600.0
STEPS = 4


class Stage:
    """A hub with a small Qwen3 as its base, and the other processes of a test."""

    def __init__(self, folder: Path, tmpfs: Path, processes: Processes, *, hidden: int = 128, layers: int = 1) -> None:
        self.folder, self.tmpfs, self.processes = folder, tmpfs, processes
        self.hub = f"127.0.0.1:{free_port()}"
        self.token = folder / "token"
        self.base = folder / "base"
        torch.manual_seed(3)
        model = make_model(hidden, layers, tied=True)
        write_checkpoint(self.base, snapshot(model), model)
        self.hub_up()

    def hub_up(self) -> None:
        self.token.unlink(missing_ok=True)
        words = ["--base", self.base, "--listen", self.hub, "--http", "127.0.0.1:0", "--token-file", self.token]
        self.p2pcast("hub", "seed", *words, "--state", self.folder / "hub", "--shadow", self.tmpfs / "hub")
        self.until("the hub answers", self.token.exists)

    def p2pcast(self, name: str, *words: object) -> None:
        self.processes.start(name, [sys.executable, "-m", "p2pcast.cli", *map(str, words)])

    def until(self, what: str, done: Callable[[], Any]) -> None:
        wait_until(done, what, check=self.processes.check)

    def status(self, name: str) -> dict[str, Any]:
        """/status of a daemon; nothing yet while it starts."""
        try:
            url = json.loads((self.folder / name / "daemon.json").read_text())["http"]
            with urllib.request.urlopen(f"{url}/status", timeout=10) as answer:
                document: dict[str, Any] = json.load(answer)
                return document
        except (OSError, ValueError):
            return {}

    def joined_with_folder(self, name: str = "peer") -> Path:
        """A peer that writes folders; where."""
        out = self.folder / ("installed" if name == "peer" else f"{name}-installed")
        self.p2pcast(
            name,
            "join",
            self.hub,
            "--token-file",
            self.token,
            "--base",
            self.base,
            "--install",
            f"safetensors:{out}",
            "--state",
            self.folder / name,
            "--shadow",
            self.tmpfs / name,
            "--listen",
            "127.0.0.1:0",
        )
        self.until(f"{name} has the base", lambda: self.status(name).get("committed") == "0.0")
        return out

    def vllm_server(self, *options: str) -> tuple[int, Path]:
        """A vLLM server and its peer, by the example; the server's port and the peer's state folder."""
        port, state = free_port(), self.folder / "engine"
        environment = {
            **ENGINE_ENVIRONMENT,
            "HUB": self.hub,
            "TOKEN_FILE": str(self.token),
            "MODEL": str(self.base),
            "PORT": str(port),
            "STATE": str(state),
            "PYTHON": sys.executable,
        }
        command: list[str | Path] = [EXAMPLES / "vllm_server.sh", *options, *ENGINE_OPTIONS]
        self.processes.start("server", command, environment=environment)
        self.until("the engine has the base", lambda: self.status("engine").get("committed") == "0.0")
        return port, state

    def train(self, *command: str, more: Sequence[object] = (), steps: int = STEPS) -> str:
        """Run an example's training loop to its end; returns its output. ``more``: its further arguments."""
        words = [*command, str(self.base), self.hub, str(self.token), str(steps), str(self.folder / "out")]
        words += map(str, more)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(EXAMPLES.parent)}
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    def assert_trained(self, installed: Path) -> None:
        """The folder that the peer wrote holds what the trainer saved by itself, and not what it began from."""
        truth, found, base = (load_file(f / "model.safetensors") for f in (self.folder / "out", installed, self.base))
        assert truth.keys() == found.keys()
        assert all(torch.equal(truth[n].view(torch.int16), found[n].view(torch.int16)) for n in truth)
        assert any(not torch.equal(base[n], found[n]) for n in found)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as tmpfs, Processes(tmp_path) as processes:
        yield Stage(tmp_path, Path(tmpfs), processes)


def test_plain_loop(stage: Stage) -> None:
    out = stage.joined_with_folder()
    said = stage.train(sys.executable, str(EXAMPLES / "plain_loop.py"))
    assert f"version 0.{STEPS} is at the hub" in said
    stage.assert_trained(out / f"step_{STEPS}")


@pytest.mark.prove  # test_trainer_with_fsdp2_publishes_from_two_ranks is the sample
def test_fsdp2_loop(stage: Stage) -> None:
    out = stage.joined_with_folder()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = stage.train(*torchrun, str(EXAMPLES / "fsdp2_loop.py"))
    assert f"step={STEPS}" in said
    stage.assert_trained(out / f"step_{STEPS}")


@pytest.mark.prove  # test_plain_loop is the sample
@pytest.mark.vllm
def test_vllm_server_follows_the_loop(stage: Stage) -> None:
    port, state = stage.vllm_server("--served-model-name", "policy")
    stage.train(sys.executable, str(EXAMPLES / "plain_loop.py"))
    verify = [sys.executable, "-m", "p2pcast.cli", "verify", "--live", "--state", str(state), "--json"]
    verified = subprocess.run(verify, capture_output=True, text=True, timeout=900)
    assert verified.returncode == 0, verified.stderr
    assert f"0.{STEPS}" in verified.stdout
    body = {"model": "policy", "prompt": "17+25=", "max_tokens": 3, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=900) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] >= 1
    stage.processes.stop("server")
    assert not stage.processes.children["server"].alive
