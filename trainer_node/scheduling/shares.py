"""Heterogeneity-aware shares of a batch: SparrowRL's Algorithm 1, as ceilings on leases. Pure; time is passed in.

Guarantees:

- The shares of a batch sum to the batch.
- Equal inputs give equal shares.

Only tokens of accepted results raise a worker's share. A share is a ceiling: workers take leases themselves, so nothing
is sent to a dead worker, and a ceiling applies only while another eligible worker has a free slot.

Differences from the paper: its floors may leave up to one job per worker undone; here the remainders go to the largest
fractions. An excluded worker gets a probe job now and then, because otherwise its throughput could never be measured
again. Exclusion decays a throughput once per publication, however often shares are computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

EXCLUSION_DECAY = 0.9
"""α of Algorithm 1. The paper gives no value."""
SMOOTHING = 0.7
"""β of Algorithm 1: the weight of the earlier estimate. The paper gives no value."""
LEAST_WINDOW_S = 1.0
"""Shortest time over which a rate is measured, in seconds: an instant result would give an arbitrary rate."""
MOST_MEDIANS = 8.0
"""Highest estimate that counts for a share, in medians of the other workers: one worker may serve eight devices, and
the others one each. Tokens are not proved, so without a bound, one worker could claim a whole batch.
"""
PROBE_S = 30.0
"""Interval between two probe jobs of an excluded worker, in seconds. Not measured."""


def split(jobs: int, throughput: Mapping[str, float]) -> dict[str, int]:
    """Split ``jobs`` in proportion to each worker's throughput in tokens per second, or equally if all are 0.
    Remainders go to the largest fractions, then by name.
    """
    if not throughput:
        return {}
    total = sum(throughput.values())
    exact = {w: jobs * t / total if total > 0 else jobs / len(throughput) for w, t in throughput.items()}
    shares = {worker: int(share) for worker, share in exact.items()}
    left = jobs - sum(shares.values())
    for worker in sorted(exact, key=lambda w: (shares[w] - exact[w], w))[:left]:
        shares[worker] += 1
    return shares


@dataclass(slots=True)
class _Worker:
    tokens_per_s: float | None = None
    """None before the first settlement."""
    tokens: int = 0
    """Tokens of accepted results since the last settlement."""
    busy_s: float = 0.0
    """Wall-clock seconds with at least one lease since the last settlement."""
    probed_s: float | None = None


class Throughputs:
    """An estimate for each worker, in accepted tokens per second of wall-clock time with at least one lease."""

    def __init__(self, *, decay: float = EXCLUSION_DECAY, smoothing: float = SMOOTHING) -> None:
        self._decay = decay
        self._smoothing = smoothing
        self._workers: dict[str, _Worker] = {}

    def join(self, worker: str) -> None:
        self._workers.setdefault(worker, _Worker())

    def known(self) -> set[str]:
        """The workers that have joined and not left."""
        return set(self._workers)

    def leave(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def accepted(self, worker: str, tokens: int) -> None:
        """Note that the ledger accepted a result with this many sampled tokens."""
        self._workers[worker].tokens += tokens

    def busy(self, worker: str, seconds: float) -> None:
        """Note that the worker held at least one lease for this long."""
        self._workers[worker].busy_s += seconds

    def settle(self, worker: str) -> None:
        """Close a window: fold its rate into the estimate (line 16). A window that is too short continues."""
        one = self._workers[worker]
        if one.busy_s < LEAST_WINDOW_S:
            return
        rate = one.tokens / one.busy_s
        known = one.tokens_per_s
        one.tokens_per_s = rate if known is None else self._smoothing * known + (1 - self._smoothing) * rate
        one.tokens, one.busy_s = 0, 0.0

    def published(self, eligible: Collection[str]) -> None:
        """Note that a version was published: the estimates of workers that are excluded from it decay (line 14)."""
        for worker, one in self._workers.items():
            if worker not in eligible and one.tokens_per_s is not None:
                one.tokens_per_s *= self._decay

    def estimate(self, worker: str) -> float | None:
        """Tokens per second; None before the first settlement, or if the worker has left."""
        one = self._workers.get(worker)
        return None if one is None else one.tokens_per_s

    def of(self, eligible: Collection[str]) -> dict[str, float]:
        """The estimates of eligible workers, at most MOST_MEDIANS medians of the others. A worker without an estimate
        counts as the others' median, so that it starts with a fair share.
        """
        rates = {w: None if (one := self._workers.get(w)) is None else one.tokens_per_s for w in eligible}
        known = sorted(t for t in rates.values() if t is not None)
        median = known[len(known) // 2] if known else 1.0
        return {w: median if t is None else _capped(t, known) for w, t in rates.items()}

    def may_probe(self, worker: str, now_s: float) -> bool:
        """Whether a worker that is excluded, or whose share is 0, may take one job now."""
        probed_s = self._workers[worker].probed_s
        return probed_s is None or now_s - probed_s >= PROBE_S

    def probed(self, worker: str, now_s: float) -> None:
        self._workers[worker].probed_s = now_s


def _capped(rate: float, known: list[float]) -> float:
    """Limit a rate. ``known``: all estimates in order, including ``rate``. If the number of others is even, the slower
    of the middle two counts as their median. A median of 0 sets no limit.
    """
    if len(known) < 2:
        return rate
    middle = (len(known) - 2) // 2
    others = known[middle + (known.index(rate) <= middle)]
    return min(rate, MOST_MEDIANS * others) if others > 0 else rate


@dataclass(frozen=True, slots=True)
class Load:
    """``leases``: the worker's leases in the current batch, including finished ones. ``free_slots``: jobs that the
    worker is waiting for. It is 0 if the worker asks for none, got all it asked for, or has an engine that is too old
    for every job. A ceiling would otherwise reserve jobs for a worker that never takes them.
    """

    leases: int
    free_slots: int


def jobs_for(worker: str, wanted: int, shares: Mapping[str, int], loads: Mapping[str, Load]) -> int:
    """Return how many of ``wanted`` jobs an eligible worker may lease now."""
    room = max(0, shares.get(worker, 0) - loads[worker].leases)
    if room >= wanted:
        return wanted
    # A ceiling must not leave jobs undone: it applies only if another worker could take them now.
    waiting = any(
        load.free_slots > 0 and load.leases < shares.get(other, 0) for other, load in loads.items() if other != worker
    )
    return room if waiting else wanted
