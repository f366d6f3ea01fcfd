"""Figures of a simulated run: pace, waiting, waste, staleness, and the recovery of lost jobs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from netem.rollouts.simulated_ledger import Lease, SimulatedJob, SimulatedLedger
from netem.rollouts.simulated_run import SimulatedRun
from trainer_node.ledger.batch_cut import GroupVerdict

TRAINED: Final = "trained"
FILTERED: Final = GroupVerdict.EQUAL.value


@dataclass(slots=True)
class RunFigures:
    """``tokens``: sampled tokens by what became of them. ``staleness``: learner steps between a trained sample's oldest
    version and its training; ``in_flight`` until the ledger accepted it, ``in_queue`` from then on.
    """

    run: SimulatedRun
    deadlock: bool = False
    wall_s: float = 0.0
    wait_s: list[float] = field(default_factory=list)
    """Before each step."""
    applied_s: list[float] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    in_flight: Counter[int] = field(default_factory=Counter)
    in_queue: Counter[int] = field(default_factory=Counter)
    timeline: list[tuple[float, float]] = field(default_factory=list)
    """Time and all tokens sampled until then."""
    struck_s: float | None = None
    short_s: float | None = None
    recovered_s: float | None = None
    least_capacity: float = math.inf
    """Tokens a second that the fleet's controller measured after the fault, at least."""
    late_s: float | None = None
    """Delay of the broadcast's last worker by a fault."""
    repeated: int = 0
    """Jobs that were leased again although their worker was at work."""
    redone_s: list[float] = field(default_factory=list)
    """Of each job of a dead worker, the time from its death until another worker handed the job in."""
    lost_jobs: int = 0
    started: int = 0
    released: int = 0
    """Workers that the fleet's controller started, and released."""
    _lost: dict[int, SimulatedJob] = field(default_factory=dict)

    def lost(self, lease: Lease) -> None:
        self._lost[id(lease.job)] = lease.job
        self.lost_jobs += 1

    def expired(self, leases: list[Lease]) -> None:
        self.repeated += sum(id(lease.job) not in self._lost for lease in leases)

    def handed_in(self, lease: Lease, said: str, now_s: float) -> None:
        if said == "accepted" and self._lost.pop(id(lease.job), None) is not None and self.struck_s is not None:
            self.redone_s.append(now_s - self.struck_s)

    def close(self, ledger: SimulatedLedger, now_s: float, wait_s: list[float], applied_s: list[float]) -> None:
        self.wall_s, self.wait_s, self.applied_s = now_s, wait_s, applied_s
        self.tokens, self.endings = ledger.tokens, ledger.endings
        self.staleness, self.in_flight, self.in_queue = ledger.staleness, ledger.in_flight, ledger.in_queue
        for group in ledger.groups.values():
            if group.fate is None:
                self.tokens["left over"] += sum(each[2] for each in group.results)

    @property
    def timeline_tokens(self) -> float:
        """All tokens sampled."""
        return self.timeline[-1][1] if self.timeline else 0.0

    @property
    def steps_per_s(self) -> float:
        return len(self.applied_s) / self.wall_s if self.wall_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second of wall-clock time."""
        return self.tokens[TRAINED] / self.wall_s if self.wall_s else 0.0

    def bubble(self, warm_up: int = 0) -> float:
        """Share of wall-clock time in which the learner waited, from step ``warm_up`` on."""
        waited, steps = sum(self.wait_s[warm_up:]), len(self.wait_s) - warm_up
        return waited / (waited + steps * self.run.train_s) if steps > 0 else 1.0

    @property
    def wasted_share(self) -> float:
        """Share of sampled tokens that were neither trained nor dropped for equal rewards."""
        whole = sum(self.tokens.values())
        return 1 - (self.tokens[TRAINED] + self.tokens[FILTERED]) / whole if whole else 0.0

    @property
    def filtered_share(self) -> float:
        """Share of sampled tokens in groups with equal rewards."""
        whole = sum(self.tokens.values())
        return self.tokens[FILTERED] / whole if whole else 0.0

    @property
    def worst_staleness(self) -> int:
        return max(self.staleness, default=0)
