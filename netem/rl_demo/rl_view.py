"""The RL demo's picture: the last steps of the run, and its participants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table

from trainer_node.learning.monitoring.run_record import Publication, RunRecord, StepEvent

ROWS = 12
"""Steps on the screen."""
COLUMNS = ("step", "reward", "age", "KL", "tokens/s", "waited", "version", "changed", "bytes")


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def step_cells(step: StepEvent, version: Publication | None) -> list[str]:
    """``age``: of the rollouts' weights, in learner steps. ``KL``: of sampler and learner."""
    return [
        str(step.step),
        shown(step.reward, ".3f"),
        shown(step.staleness_mean, ".1f"),
        shown(step.kl_same_version, ".1e"),
        shown(step.tokens_per_s, ".0f"),
        shown(step.bubble, ".0%"),
        "-" if version is None else str(version.version),
        "-" if version is None else shown(version.density, ".1%"),
        "-" if version is None or version.bytes is None else f"{version.bytes / 1e3:.0f} kB",
    ]


@dataclass(slots=True)
class RlView:
    """``record``: the learner's. ``peers``: of the hub's status. ``down``: killed participants."""

    phase: str = ""
    record: RunRecord = field(default_factory=RunRecord)
    peers: list[Mapping[str, Any]] = field(default_factory=list)
    workers: list[Mapping[str, Any]] = field(default_factory=list)
    down: set[str] = field(default_factory=set)

    def cells(self) -> list[list[str]]:
        versions = {one.step: one for one in self.record.publications}
        return [step_cells(step, versions.get(step.step)) for step in self.record.steps]

    def picture(self, elapsed_s: float) -> Group:
        steps = Table(*COLUMNS)
        for cells in self.cells()[-ROWS:]:
            steps.add_row(*cells)
        parts = Table("peer", "parent", "serves", "received")
        for peer in self.peers:
            if peer["name"] not in self.down:
                received = f"{(peer.get('bytes_received') or 0) / 1e6:.1f} MB"
                parts.add_row(
                    str(peer["name"]), str(peer.get("parent") or "-"), str(peer.get("committed") or "-"), received
                )
        for worker in self.workers:
            if worker.get("name") not in self.down:
                parts.add_row(
                    str(worker.get("name")), "ledger", str(worker.get("served") or "-"),
                    f"{worker.get('accepted_tokens') or 0} tokens"
                )  # fmt: skip
        for name in sorted(self.down):
            parts.add_row(name, "", "killed", "")
        return Group(steps, parts, f"{elapsed_s:.0f} s  {self.phase}")
