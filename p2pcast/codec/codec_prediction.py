"""Predicts which codec brings a version to the last peer soonest, or nearly as soon with fewer bytes.

Three stages run concurrently, cell by cell: the trainer's cores encode, the slowest link transfers, and a peer's cores
decode. In a pipeline of equal cells the slowest stage is always busy, and each other stage adds the time of one cell.
If T_i is the time of stage i for all cells and f_i its time for one cell,

    T = max over stages i of (max(T_i, f_i) + sum of f_j over the other stages j)

This is exact if a stage does one thing at a time. Times that do not depend on the codec are left out: the shadow
update, the install, round trips. ``sequential_s`` and ``crossover_bps`` are PULSE's model without overlap (appendix
E.4.5, equations 25 and 26), kept for reference.

Pure: rates, sizes and cores are passed in. Cores' rates are in bytes of state per second, links' rates in bits per
second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

SLACK = 1.15
"""Codecs within this factor of the best predicted time count as equally fast, since predictions are no more accurate.
Among these, the one with the fewest bytes is chosen.
"""
SLACK_S = 0.05
"""Codecs that finish within this many seconds also count as equally fast: an engine's pause takes as long."""
PEER_CORES = 16
"""Number of cores assumed for a peer that does not report it: few GPU hosts have fewer."""
_LOWEST_BPS, _HIGHEST_BPS = 1e3, 1e15


@dataclass(frozen=True, slots=True)
class Cost:
    """A codec's cost at a given share of changed words.

    ``encode_bytes_s``, ``decode_bytes_s``: bytes of state per second on one core. ``share``: payload bytes per byte of
    state.
    """

    encode_bytes_s: float
    decode_bytes_s: float
    share: float


@dataclass(frozen=True, slots=True)
class BroadcastPath:
    """The path from the trainer to the last peer.

    ``proof``: the encoding cores also decode every cell, as the hub does before it publishes.
    """

    link_bps: float
    encode_cores: int
    decode_cores: int
    proof: bool = True


@dataclass(frozen=True, slots=True)
class StateSize:
    """The size of the state to send and of its largest cell, in bytes."""

    nbytes: int
    cell_bytes: int


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The seconds that each stage takes for all cells, and that the whole takes with the stages overlapped."""

    encode_s: float
    transfer_s: float
    decode_s: float
    whole_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen codec, and the predicted times that led to it; None if the codec was configured."""

    codec: str
    way: BroadcastPath | None = None
    times: Mapping[str, StageTimes] | None = None

    @property
    def why(self) -> str:
        """The reason for the choice, on one line."""
        if self.way is None or self.times is None:
            return "configured"
        order = sorted(self.times.items(), key=lambda item: item[1].whole_s)
        shown = ", ".join(f"{name} {times.whole_s:.3g} s" for name, times in order)
        return (
            f"{shown} to the last peer, at {self.way.link_bps / 1e6:.4g} Mbit/s, "
            f"{self.way.encode_cores} cores at the trainer and {self.way.decode_cores} at the peer"
            + ("" if order[0][0] == self.codec else f"; {self.codec} takes fewer bytes and hardly longer")
        )


MEASURED_BEFORE: Mapping[str, Cost] = {
    "context": Cost(3.5e9, 3.5e9, 1 / 189),
    "flat": Cost(8.1e9, 8.9e9, 1 / 111),
    "dense": Cost(0.4e9, 1.0e9, 1 / 1.46),
}
"""Costs used until this machine is measured: those of one AMD EPYC (Zen 3) core with bf16 and 1.5 % of the words
changed (docs/design/decisions/codec.md).
"""


def predict(cost: Cost, way: BroadcastPath, state: StateSize) -> StageTimes:
    """Predict the times of a version in one codec; all are zero for an empty state."""
    if state.nbytes == 0:
        return StageTimes(0.0, 0.0, 0.0, 0.0)
    cell = min(state.cell_bytes, state.nbytes)
    encode_s = 1 / cost.encode_bytes_s
    decode_s = 1 / cost.decode_bytes_s
    transfer_s = 8 * cost.share / way.link_bps
    busy_s = encode_s + decode_s if way.proof else encode_s
    # The times above are per byte of state; those below are for one cell, and for all cells.
    firsts = [cell * encode_s, cell * transfer_s, cell * decode_s]
    alls = [
        state.nbytes * busy_s / way.encode_cores,
        state.nbytes * transfer_s,
        state.nbytes * decode_s / way.decode_cores,
    ]
    alls = [max(whole, first) for whole, first in zip(alls, firsts, strict=True)]
    whole_s = max(whole + sum(firsts) - first for whole, first in zip(alls, firsts, strict=True))
    return StageTimes(alls[0], alls[1], alls[2], whole_s)


def choose(costs: Mapping[str, Cost], way: BroadcastPath, state: StateSize) -> Choice:
    """Choose the codec with the fewest bytes among those within SLACK of the fastest, or below SLACK_S. Ties go to the
    faster one.
    """
    times = {name: predict(cost, way, state) for name, cost in costs.items()}
    enough_s = max(SLACK * min(t.whole_s for t in times.values()), SLACK_S)
    quick = [name for name in costs if times[name].whole_s <= enough_s]
    return Choice(min(quick, key=lambda name: (costs[name].share, times[name].whole_s)), way, times)


def sequential_s(cost: Cost, way: BroadcastPath, state: StateSize) -> float:
    """Return the seconds by PULSE's equation 25: encode, then transfer, then decode."""
    return _compute_s(cost, way, state) + 8 * state.nbytes * cost.share / way.link_bps


def crossover_bps(small: Cost, quick: Cost, way: BroadcastPath, state: StateSize) -> float:
    """Return the link rate below which ``small`` is faster, and above which ``quick`` is (PULSE's equation 26).
    Infinite if ``small`` takes no more compute.

    ``small`` is the codec with fewer payload bytes; ``way.link_bps`` is ignored.
    """
    more_s = _compute_s(small, way, state) - _compute_s(quick, way, state)
    fewer_bits = 8 * state.nbytes * (quick.share - small.share)
    return math.inf if more_s <= 0 else max(0.0, fewer_bits / more_s)


def overlapped_crossover_bps(small: Cost, quick: Cost, way: BroadcastPath, state: StateSize) -> float:
    """Return the crossover by ``predict``, found by bisection from 1 kbit/s to 1 Pbit/s; 0 or infinite beyond."""

    def behind(bps: float) -> bool:
        link = BroadcastPath(bps, way.encode_cores, way.decode_cores, way.proof)
        return predict(small, link, state).whole_s > predict(quick, link, state).whole_s

    low, high = _LOWEST_BPS, _HIGHEST_BPS
    if behind(low):
        return 0.0
    if not behind(high):
        return math.inf
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if behind(middle) else (middle, high)
    return low


def _compute_s(cost: Cost, way: BroadcastPath, state: StateSize) -> float:
    return state.nbytes * (1 / (cost.encode_bytes_s * way.encode_cores) + 1 / (cost.decode_bytes_s * way.decode_cores))
