"""A hub, and two peers as on two rollout machines, for verl's workers on CPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from netem.fleet.processes import Processes, free_port
from tests.environments import ROOT, python_of
from tests.support.until import wait_until
from tests.trainer_node.frameworks.verl_backend.odd_model import write_odd_model

HERE = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}:{HERE}",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    # CPUs are a platform of verl by cpu_platform.py; its engines are registered for accelerators alone.
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
}
Document = dict[str, Any]


class Stage:
    """A hub, and two peers as on two rollout machines. ``bytes``: of the model's weights."""

    def __init__(self, folder: Path, tmpfs: Path, processes: Processes, **shape: int) -> None:
        self.folder, self.tmpfs, self.processes = folder, tmpfs, processes
        self.hub, self.token, self.base = f"127.0.0.1:{free_port()}", folder / "token", folder / "base"
        self.bytes = write_odd_model(self.base, **shape)
        self.p2pcast("hub", "seed", "--base", self.base, "--listen", self.hub, "--http", "127.0.0.1:0",
                     "--token-file", self.token)  # fmt: skip
        self.until("the hub answers", self.token.exists)
        self.peers = [folder / "a", folder / "b"]
        for peer in self.peers:
            self.p2pcast(peer.name, "join", self.hub, "--token-file", self.token, "--base", self.base, "--name",
                         peer.name, "--listen", "127.0.0.1:0", "--install", "exec:true")  # fmt: skip

    def p2pcast(self, name: str, *words: object) -> None:
        python = ROOT / ".venv" / "bin" / "python"
        places = ("--state", self.folder / name, "--shadow", self.tmpfs / name)
        self.processes.start(name, [python, "-m", "p2pcast.cli", *map(str, words), *map(str, places)])

    def until(self, what: str, done: Any) -> None:
        wait_until(done, what, check=self.processes.check)

    def run(self, managers: list[str], *, naive: int = 0, kill: str | None = None) -> Document:
        """The report of synced_run.py."""
        orders, report = self.folder / "orders.json", self.folder / "report.json"
        # A short hold_s, since the peer of a killed worker stays at its version for so long.
        settings = {"hub": self.hub, "token_file": str(self.token), "base": str(self.base), "wait_s": 120, "hold_s": 5}
        told = {
            "model": str(self.base),
            "settings": settings,
            "peers": [str(peer) for peer in self.peers],
            "managers": managers,
            "naive": naive,
            "kill": kill,
            "temporary": str(self.tmpfs / "ray"),
        }
        orders.write_text(json.dumps(told))
        command = [python_of("verl"), HERE / "synced_run.py", orders, report]
        child = self.processes.start("run", command, environment=ENVIRONMENT)
        child.expected = True
        self.until("the run ends", lambda: not child.alive)
        assert report.exists(), child.tail(60)
        document: Document = json.loads(report.read_text())
        return document
