"""Command lines and configurations of the processes of an RL run beside hub and peers: ledger, workers, learner."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from netem.emulation.description import HUB
from netem.fleet.fleet import Fleet
from netem.fleet.processes import ChildProcess

LEDGER, LEARNER = "ledger", "learner"
Tables = Mapping[str, Mapping[str, str | int | float | Path]]


@dataclass(frozen=True, slots=True)
class Batches:
    """``task``: of ledger and workers. A batch has ``groups`` groups of ``size`` rollouts, whose weights are at most
    ``staleness`` steps old.
    """

    task: str
    groups: int
    size: int
    staleness: int


def start_ledger(fleet: Fleet, batches: Batches, hub_http: str, http: str, *words: str | Path) -> ChildProcess:
    """Start a ledger beside the hub. ``hub_http``, ``http``: addresses of the hub's HTTP side and of its own."""
    command: list[str | Path] = ["ledger", "--task", batches.task, "--http", http, "--state", fleet.state(LEDGER)]
    command += ["--hub-http", hub_http, "--hub-bearer-file", fleet.state(HUB) / "http.token"]
    command += ["--batch-groups", str(batches.groups), "--group-size", str(batches.size)]
    command += ["--staleness", str(batches.staleness)]
    return fleet.start(LEDGER, *command, *words, host=HUB)


def configuration(fleet: Fleet, base: Path, token: Path, ledger_url: str, tables: Tables) -> str:
    """A learner's configuration in TOML. ``tables``: further tables."""
    every: Tables = {
        "model": {"path": base, "compute": "float32", "threads": 1},
        "hub": {"address": fleet.place.hub, "token-file": token},
        "ledger": {"url": ledger_url, "bearer-file": fleet.state(LEDGER) / "http.token"},
        **tables,
    }
    lines = []
    for name, values in every.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value, default=str)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"
