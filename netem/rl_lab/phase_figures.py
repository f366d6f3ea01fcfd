"""Figures of an RL run by its phases: tokens/s, bubble, staleness, seconds and bytes of a version. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class RunPhase:
    """Unix times. ``reached``: hosts that are not cut off."""

    name: str
    began_s: float
    ended_s: float
    reached: tuple[str, ...]

    @property
    def lasted_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class RunSample:
    """One look: ``tokens`` accepted by the ledger so far, by host; ``trunks``: bytes so far over each region's trunk,
    to the region and from it.
    """

    at_s: float
    tokens: Mapping[str, int]
    trunks: Mapping[str, tuple[int, int]]


@dataclass(slots=True)
class PhaseRecord:
    """``steps``: the learner's events ``step``, with ``time`` at the step's end. ``opened``: version → time,
    at the hub. ``version_bytes``: of each version that was sent. ``committed``: host → version → time at which the
    host's engine served it.
    """

    steps: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[RunSample] = ()
    opened: Mapping[str, float] = field(default_factory=dict)
    version_bytes: Mapping[str, int] = field(default_factory=dict)
    committed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def figures(run: PhaseRecord, phase: RunPhase) -> dict[str, Any]:
    """One row for a phase."""
    opened = {version: at_s for version, at_s in run.opened.items() if phase.began_s <= at_s < phase.ended_s}
    ended = [step for step in run.steps if phase.began_s <= step["time"] < phase.ended_s]
    ages = staleness(ended)
    known = [run.version_bytes[version] for version in opened if version in run.version_bytes]
    times = [took for version in opened if (took := live_s(run, version, phase.reached)) is not None]
    waited_s, trained_s = learner_s(run, phase)
    return {
        "phase": phase.name,
        "seconds": round(phase.lasted_s, 1),
        "tokens_per_s": round(accepted(run, phase) / phase.lasted_s, 2),
        "bubble": round(waited_s / (waited_s + trained_s), 4) if waited_s + trained_s else None,
        "wait_s": round(waited_s / len(ended), 3) if ended else None,
        "steps": len(ended),
        "step_s": step_s(run, phase),
        "staleness_max": max(ages, default=None),
        "staleness_mean": round(sum(age * n for age, n in ages.items()) / ages.total(), 3) if ages else None,
        "staleness": shares(ages),
        "versions": len(opened),
        "version_s": round(median(times), 3) if times else None,
        "skipped": len(opened) - len(times),
        "version_bytes": round(median(known)) if known else None,
        "trunk_bytes": trunk_bytes(run, phase, len(opened)),
    }


def accepted(run: PhaseRecord, phase: RunPhase) -> float:
    """Sampled tokens that the ledger accepted during the phase."""
    totals = [(sample.at_s, sum(sample.tokens.values())) for sample in run.samples]
    return _at(totals, phase.ended_s) - _at(totals, phase.began_s)


def learner_s(run: PhaseRecord, phase: RunPhase) -> tuple[float, float]:
    """Seconds of the phase in which the learner waited for a batch, and in which it trained. Time after the last step
    counts as waiting.
    """
    waited_s = trained_s = 0.0
    for step in run.steps:
        trained_from_s = step["time"] - step["train_s"]
        trained_s += _overlap(phase, trained_from_s, step["time"])
        waited_s += _overlap(phase, trained_from_s - step["wait_s"], trained_from_s)
    last_s = max((step["time"] for step in run.steps), default=phase.began_s)
    return waited_s + _overlap(phase, last_s, phase.ended_s), trained_s


def step_s(run: PhaseRecord, phase: RunPhase) -> float | None:
    """Mean seconds from the end of a step to the end of the next one, of those that end in the phase."""
    times = sorted(step["time"] for step in run.steps)
    last = bisect_left(times, phase.ended_s) - 1
    first = max(0, bisect_left(times, phase.began_s) - 1)
    return round((times[last] - times[first]) / (last - first), 3) if last > first else None


def staleness(steps: Sequence[Mapping[str, Any]]) -> Counter[int]:
    """Trained rollouts by the learner steps between their batch and their oldest version."""
    found: Counter[int] = Counter()
    for step in steps:
        found.update({int(age): count for age, count in step["staleness"].items()})
    return found


def shares(ages: Counter[int]) -> str:
    """``0: 25 %, 1: 75 %``."""
    return ", ".join(f"{age}: {ages[age] / ages.total():.0%}".replace("%", " %") for age in sorted(ages))


def live_s(run: PhaseRecord, version: str, hosts: Sequence[str]) -> float | None:
    """Seconds from the opening of the version until all hosts' engines serve it; None if one has skipped it."""
    times = [run.committed.get(host, {}).get(version) for host in hosts]
    if not times or None in times:
        return None
    return max(at_s for at_s in times if at_s is not None) - run.opened[version]


def trunk_bytes(run: PhaseRecord, phase: RunPhase, versions: int) -> int | None:
    """All bytes to a region for each version opened in the phase; the mean of the regions."""
    regions = run.samples[0].trunks if run.samples else {}
    if not regions or not versions:
        return None
    crossed = 0.0
    for region in regions:
        seen = [(sample.at_s, sample.trunks[region][0]) for sample in run.samples]
        crossed += _at(seen, phase.ended_s) - _at(seen, phase.began_s)
    return round(crossed / len(regions) / versions)


def caught_up_s(run: PhaseRecord, host: str, healed_s: float) -> float | None:
    """Seconds from the end of the cut until the host's engine serves a version that is as new as the newest at that
    time; None if it never does.
    """
    newest = max((step_of(version) for version, at_s in run.opened.items() if at_s <= healed_s), default=0)
    times = [at_s for version, at_s in run.committed.get(host, {}).items() if step_of(version) >= newest]
    return max(0.0, min(times) - healed_s) if times else None


def step_of(version: str) -> int:
    return int(version.rpartition(".")[2])


def _overlap(phase: RunPhase, began_s: float, ended_s: float) -> float:
    return max(0.0, min(phase.ended_s, ended_s) - max(phase.began_s, began_s))


def _at(seen: Sequence[tuple[float, float]], at_s: float) -> float:
    """A count at a time between two looks, by a straight line; at the ends the nearest look's."""
    after = bisect_right(seen, at_s, key=lambda one: one[0])
    if after in (0, len(seen)):
        return seen[min(after, len(seen) - 1)][1] if seen else 0.0
    (t0, n0), (t1, n1) = seen[after - 1], seen[after]
    return n0 + (n1 - n0) * (at_s - t0) / (t1 - t0)
