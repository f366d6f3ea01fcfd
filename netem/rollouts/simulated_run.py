"""Parts of a simulated run: workers, lengths of samples, learner, broadcasts, faults. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Final, Literal

from netem.emulation.tables import bounded
from p2pcast.ground.errors import UsageError
from trainer_node.ledger.acceptance import Rule
from trainer_node.ledger.lease_time import FACTOR, GUESS_S, LEAST_S
from trainer_node.scheduling.overlap import CAPACITY_MARGIN

Policy = Literal["shares", "fixed shares", "uniform", "pull"]
"""How jobs are given to workers. ``shares``: the daemon's, ceilings in proportion to throughput that bind only while
another worker could take the job. ``fixed shares``, ``uniform``: ceilings that always bind, in proportion to throughput
or equal. ``pull``: no ceilings.
"""
POLICIES: Final = ("shares", "fixed shares", "uniform", "pull")
FAULTS: Final = ("worker slows", "worker dies", "forwarder slows", "forwarder dies")


@dataclass(frozen=True, slots=True)
class Machine:
    """A worker with its engine. ``slots``: samples at once. ``tokens_per_s``: of each slot. ``most_tokens_per_s``: of
    all slots together; 0: as many as the slots make. ``ready_s``: from its start until it serves the newest version.
    """

    name: str
    slots: int
    tokens_per_s: float
    kind: str = "gpu"
    usd_per_h: float = 0.0
    ready_s: float = 0.0
    most_tokens_per_s: float = 0.0

    @property
    def capacity(self) -> float:
        """Tokens a second when all slots are busy."""
        whole = self.slots * self.tokens_per_s
        return min(whole, self.most_tokens_per_s or whole)


@dataclass(frozen=True, slots=True)
class Samples:
    """Lengths in tokens are log-normal: ``median``, ``spread`` (of the logarithm), at most ``most``. ``stragglers``:
    share of samples that take ``straggler_factor`` times as long. ``equal``: share of groups with equal rewards.
    """

    median: float = 1000.0
    spread: float = 0.5
    most: int = 8192
    stragglers: float = 0.0
    straggler_factor: float = 8.0
    equal: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutFault:
    """``kind``: one of ``FAULTS``. ``at_s``: seconds after the start. ``step``: instead, the fault comes during the
    first broadcast of this step or a later one. ``factor``: remaining rate of a slow machine.
    """

    kind: str
    worker: str
    at_s: float = 0.0
    step: int | None = None
    factor: float = 0.5


@dataclass(frozen=True, slots=True)
class BroadcastDelay:
    """``seconds``: until the share 1/γ of the workers serves a version. ``first``: the first worker's share of that
    time. ``chains``: forwarding chains. ``repair_s``: until a chain passes a failed forwarder by.
    """

    seconds: float
    first: float = 0.7
    chains: int = 3
    repair_s: float = 6.0
    share: float = 1 / CAPACITY_MARGIN


@dataclass(frozen=True, slots=True)
class Control:
    """The fleet's controller. ``target_per_s``: tokens a second. ``standby``: machines that it may start."""

    target_per_s: float
    standby: tuple[Machine, ...] = ()
    look_s: float = 10.0
    window_s: float = 30.0


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """``groups``: P, groups of a batch. ``size``: G, samples of a group. ``train_s``: of one step. ``staleness``: S.
    ``every``: κ. ``newest_only``: engines that do not serve the newest publication get no jobs. ``drains``: an engine
    commits a version between samples only. ``renews``: heartbeats with new tokens extend a lease, by its own
    length or by ``renewal_beats`` heartbeats.
    """

    machines: tuple[Machine, ...]
    broadcast: BroadcastDelay
    train_s: float
    groups: int = 8
    size: int = 8
    steps: int = 40
    staleness: int = 3
    every: int = 2
    samples: Samples = field(default_factory=Samples)
    rule: Rule = "bounded"
    policy: Policy = "shares"
    newest_only: bool = False
    drains: bool = False
    faults: tuple[RolloutFault, ...] = ()
    control: Control | None = None
    heartbeat_s: float = 5.0
    lease_factor: float = FACTOR
    lease_floor_s: float = LEAST_S
    lease_guess_s: float = GUESS_S
    renews: bool = True
    renewal_beats: int = 0

    def check(self) -> None:
        bounded(
            self, train_s=(1e-3, 1e6), groups=(1, 10_000), size=(2, 1024), steps=(1, 100_000), staleness=(0, 1000),
            every=(1, self.staleness + 1), heartbeat_s=(0.1, 1e4), lease_factor=(1, 100), lease_floor_s=(0.1, 1e6),
            lease_guess_s=(0.1, 1e6),
        )  # fmt: skip
        bounded(self.samples, median=(1, 1 << 20), spread=(0, 3), most=(1, 1 << 20), straggler_factor=(1, 1000))
        bounded(self.samples, stragglers=(0, 1), equal=(0, 0.99))
        bounded(self.broadcast, seconds=(0, 1e6), first=(0, 1), chains=(1, 1000), repair_s=(0, 1e6), share=(0.01, 1))
        if not self.machines:
            raise UsageError("a run needs at least one worker")
        names = {machine.name for machine in self.machines}
        for fault in self.faults:
            if fault.kind not in FAULTS or fault.worker not in names:
                raise UsageError(f"fault {fault.kind!r} of worker {fault.worker!r}: kinds are {', '.join(FAULTS)}")
        if self.policy not in POLICIES:
            raise UsageError(f"policy {self.policy!r}: policies are {', '.join(POLICIES)}")


def tokens_per_s(machines: tuple[Machine, ...]) -> float:
    return sum(machine.capacity for machine in machines)


def mean_tokens(samples: Samples, points: int = 2000) -> float:
    """The mean length of a sample, by quantiles of its distribution."""
    normal = NormalDist(0.0, samples.spread) if samples.spread > 0 else None
    total = 0.0
    for at in range(points):
        above = math.exp(normal.inv_cdf((at + 0.5) / points)) if normal else 1.0
        total += max(1.0, min(samples.most, samples.median * above))
    return total / points


def fleet(counts: Mapping[str, int], forms: Mapping[str, Machine]) -> tuple[Machine, ...]:
    """So many machines of each form, by name."""
    return tuple(
        replace(forms[name], name=f"{name}-{number}") for name, count in counts.items() for number in range(count)
    )
