"""Choice: which codec brings a version to the last peer soonest, or nearly so in fewer bytes.

Three stages work at the same time, cell by cell: the trainer's cores encode, the narrowest link carries, a peer's cores decode. Of n equal cells a
pipeline's slowest stage works all the time and each other stage adds one cell, so with T_i the time of stage i for everything and f_i for one cell

    T = max over stages i of (max(T_i, f_i) + sum of f_j over the other stages j)

which is exact where a stage does one thing at a time. What takes as long with any codec is left out: moving the shadow on, installing, round trips.
``sequential_s`` and ``crossover_bps`` are PULSE's model (appendix E.4.5, equations 25 and 26), in which nothing overlaps: the reference.

Pure: rates, sizes and cores are passed in. Rates of cores are bytes of the state a second, those of links bits a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

SLACK = 1.15
"""Codecs within this factor of the best predicted time count as equally fast: a prediction is no better than that. The fewest bytes win among them."""
SLACK_S = 0.05
"""So do all that are through within this: an engine's pause is as long."""
PEER_CORES = 16
"""Taken for a peer that does not say: few hosts of a GPU have less."""
_LOWEST_BPS, _HIGHEST_BPS = 1e3, 1e15


@dataclass(frozen=True, slots=True)
class Cost:
    """A codec at some share of changed words: what one core encodes and decodes a second, in bytes of the state, and payload bytes a byte of state."""

    encode_bytes_s: float
    decode_bytes_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Way:
    """From the trainer to the last peer. ``proof``: the cores that encode decode everything too, as a hub does with what it publishes."""

    link_bps: float
    encode_cores: int
    decode_cores: int
    proof: bool = True


@dataclass(frozen=True, slots=True)
class State:
    """What is sent: its size, and that of its largest cell."""

    nbytes: int
    cell_bytes: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that each stage takes for everything, and the whole, in which they overlap."""

    encode_s: float
    transfer_s: float
    decode_s: float
    whole_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """``codec`` and the times that it was chosen by; without times it was told."""

    codec: str
    way: Way | None = None
    times: Mapping[str, Times] | None = None

    @property
    def why(self) -> str:
        """In a line."""
        if self.way is None or self.times is None:
            return "as told"
        order = sorted(self.times.items(), key=lambda item: item[1].whole_s)
        shown = ", ".join(f"{name} {times.whole_s:.3g} s" for name, times in order)
        return (
            f"{shown} to the last peer, at {self.way.link_bps / 1e6:.4g} Mbit/s, "
            f"{self.way.encode_cores} cores here and {self.way.decode_cores} there"
            + ("" if order[0][0] == self.codec else f"; {self.codec} takes fewer bytes and hardly longer")
        )


MEASURED_BEFORE: Mapping[str, Cost] = {
    "context": Cost(3.5e9, 3.5e9, 1 / 189),
    "flat": Cost(8.1e9, 8.9e9, 1 / 111),
    "dense": Cost(0.4e9, 1.0e9, 1 / 1.46),
}
"""Until something has been measured here: one core of an AMD EPYC (Zen 3), bf16, 1.5 % changed (docs/measurements.md)."""


def predict(cost: Cost, way: Way, state: State) -> Times:
    """Times of a version in one codec; an empty state takes none."""
    if state.nbytes == 0:
        return Times(0.0, 0.0, 0.0, 0.0)
    cell = min(state.cell_bytes, state.nbytes)
    encode_s = 1 / cost.encode_bytes_s
    decode_s = 1 / cost.decode_bytes_s
    transfer_s = 8 * cost.share / way.link_bps
    busy_s = encode_s + decode_s if way.proof else encode_s
    # Seconds a byte of state; of one cell, and of all.
    firsts = [cell * encode_s, cell * transfer_s, cell * decode_s]
    alls = [state.nbytes * busy_s / way.encode_cores, state.nbytes * transfer_s, state.nbytes * decode_s / way.decode_cores]
    alls = [max(whole, first) for whole, first in zip(alls, firsts, strict=True)]
    whole_s = max(whole + sum(firsts) - first for whole, first in zip(alls, firsts, strict=True))
    return Times(alls[0], alls[1], alls[2], whole_s)


def choose(costs: Mapping[str, Cost], way: Way, state: State) -> Choice:
    """Of the codecs that are through within SLACK of the first, or within SLACK_S, the one with the fewest bytes; of equals the quickest."""
    times = {name: predict(cost, way, state) for name, cost in costs.items()}
    enough_s = max(SLACK * min(t.whole_s for t in times.values()), SLACK_S)
    quick = [name for name in costs if times[name].whole_s <= enough_s]
    return Choice(min(quick, key=lambda name: (costs[name].share, times[name].whole_s)), way, times)


def sequential_s(cost: Cost, way: Way, state: State) -> float:
    """PULSE's equation 25: encode, then transfer, then decode."""
    return _compute_s(cost, way, state) + 8 * state.nbytes * cost.share / way.link_bps


def crossover_bps(small: Cost, quick: Cost, way: Way, state: State) -> float:
    """PULSE's equation 26: below this rate ``small`` is through first, above it ``quick``. Infinite where ``small`` is no slower to make.

    ``small`` is the one with fewer payload bytes; ``way.link_bps`` is not looked at.
    """
    more_s = _compute_s(small, way, state) - _compute_s(quick, way, state)
    fewer_bits = 8 * state.nbytes * (quick.share - small.share)
    return math.inf if more_s <= 0 else max(0.0, fewer_bits / more_s)


def overlapped_crossover_bps(small: Cost, quick: Cost, way: Way, state: State) -> float:
    """As ``crossover_bps``, by ``predict``: by bisection, from 1 kbit/s to 1 Pbit/s; infinite, or 0, beyond."""

    def behind(bps: float) -> bool:
        link = Way(bps, way.encode_cores, way.decode_cores, way.proof)
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


def _compute_s(cost: Cost, way: Way, state: State) -> float:
    return state.nbytes * (1 / (cost.encode_bytes_s * way.encode_cores) + 1 / (cost.decode_bytes_s * way.decode_cores))
