"""The commands of hub, ledger and peer in the manifests, as processes of this machine: a version goes through.

Paths below a folder stand for the volumes, loopback and free ports for the services. A folder stands for vLLM.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from netem.fleet.processes import free_port
from tests.deploy.deploy_files import ROOT
from tests.deploy.kubernetes_files import Document, overlay, pods, values, words
from tests.support.until import wait_until

DEADLINE_S = 600.0
PORTS = (7077, 7078, 7079, 7080, 7081, 7082)
P2PCAST = [sys.executable, "-m", "p2pcast.cli"]


class Machine:
    """Runs containers of the overlay ``run``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = {port: free_port() for port in PORTS}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.containers: dict[str, Document] = {c["name"]: c for p in pods(overlay("run")) for c in p.containers}

    def path(self, name: str, inside: str) -> Path:
        return self.folder / name / inside.lstrip("/")

    def here(self, name: str, word: str) -> str:
        option, sign, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if value.startswith("/"):
            value = str(self.path(name, value))
        for port, free in self.ports.items():
            if value.endswith(f":{port}"):
                value = f"127.0.0.1:{free}"
        return option + sign + value

    def start(self, name: str, *more: object, install: Path | None = None) -> None:
        container = self.containers[name]
        command = [self.here(name, word) for word in words(container) if install is None or "--install=" not in word]
        environment = {**os.environ, **{k: v for k, v in values(container).items() if k.startswith("P2PCAST_")}}
        with (self.folder / f"{name}.log").open("wb") as log:
            started = [*P2PCAST, *command, *map(str, more)]
            self.processes.append(subprocess.Popen(started, stdout=log, stderr=log, env=environment, cwd=ROOT))

    def token(self, name: str, role: str) -> None:
        """As docs/guides/kubernetes.md makes the secret of ``name``."""
        file = self.path(name, f"/tokens/{name}/token")
        file.parent.mkdir(parents=True)
        made = [
            *P2PCAST,
            "token",
            "create",
            "--state",
            str(self.path("hub", "/state")),
            "--role",
            role,
            "-o",
            str(file),
        ]
        subprocess.run(made, check=True, cwd=ROOT, capture_output=True)

    def answer(self, name: str, kind: str) -> int | None:
        """Status that the container's probe gets; None while the container does not listen."""
        asked = self.containers[name][kind]["httpGet"]
        port = {p["name"]: p["containerPort"] for p in self.containers[name]["ports"]}[asked["port"]]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[port]}{asked['path']}", timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def until(self, holds: Callable[[], bool], state: str) -> None:
        def logs() -> str:
            return state + "".join(f"\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

        def check() -> None:
            ended = [process.args for process in self.processes if process.poll() is not None]
            assert not ended, f"{ended}: {logs()}"

        wait_until(holds, logs, check=check)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for process in made.processes:
        process.terminate()
    for process in made.processes:
        process.wait()


def checkpoint(folder: Path, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    weights = np.random.default_rng(0).standard_normal(100_000).astype(np.float16)
    weights.view(np.uint16)[rng.random(weights.size) < 0.01] += step
    (folder / f"step_{step}").mkdir(parents=True)
    tensors = {"model.weight": weights.reshape(100, 1000)}
    save_file(tensors, folder / f"step_{step}" / "model.safetensors")
    (folder / f"step_{step}" / "STABLE").touch()
    return tensors


def test_version_goes_through_the_commands_of_the_pods(machine: Machine, tmp_path: Path) -> None:
    checkpoints, target = tmp_path / "checkpoints", tmp_path / "target"
    checkpoints.mkdir()
    machine.start("hub", "--shadow", tmp_path / "hub-shadow", checkpoints)
    machine.until(lambda: machine.answer("hub", "livenessProbe") == 200, "the hub is alive")
    assert machine.answer("hub", "readinessProbe") == 503, "no version is published"
    machine.token("peer", "peer")
    machine.token("ledger", "ledger")
    machine.start("ledger")
    machine.start("peer", "--shadow", tmp_path / "peer-shadow", "--install", f"safetensors:{target}", install=target)
    machine.until(lambda: machine.answer("peer", "livenessProbe") == 200, "the peer is alive")
    assert machine.answer("peer", "readinessProbe") == 503, "the engine holds no verified weights"
    for step in (0, 1):
        tensors = checkpoint(checkpoints, step)
        machine.until((target / f"step_{step}" / "STABLE").exists, f"step {step} is installed")
        found = load_file(target / f"step_{step}" / "model.safetensors")
        assert {name: t.tobytes() for name, t in found.items()} == {name: t.tobytes() for name, t in tensors.items()}
    for name in ("hub", "peer", "ledger"):
        machine.until(lambda name=name: machine.answer(name, "readinessProbe") == 200, f"{name} is ready")
