"""How many of a link's stripes carry pieces; the others stand ready. Pure: it is told what the kernel says.

Who dials has to choose a number of stripes (transport.striping) before it knows what the way carries, and chooses enough for a fast one. Who sends finds out, and uses as few as do:
several BBR connections overrun the queue of a narrow way together, and as many pieces as there are stripes in use share its rate, which every hop of a chain adds to a version's time.

- Congestion control that loss holds back (CUBIC, Reno): all of them. What comes through slowly is no proof of a slow way there.
- BBR: FEWEST, which fill a way whatever is lost on it. NARROW, where little passes and little of it is on the way at once; FEWEST again should more pass (docs/measurements.md). What
  counts is what passes while there is something to send, measured over some round trips at a time, several times: the first is slow start's, and any may fall into one of BBR's pauses, so
  it takes the best of them. That too few stripes make a way look narrow can't last: two of BBR carry more than half of any, and one measurement that says more is enough.
- Twice as many whenever those in use were held back by their windows, the receiver's buffers or the sender's, for most of the time that they had something to send. A narrow way alone
  never does that: there it is BBR that holds back.

What it has once been raised to, a link does not fall below again. A stripe that joins others in the middle of a version searches for the way's rate at their expense. (Tried and left out:
eight on ways of 100 Mbit/s and 150 ms, where they carry 4 % more than four; as they joined and left by what had passed, all of them together carried a quarter less.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from p2pcast.transport.striping import FEWEST, LOSS_BLIND
from p2pcast.transport.tcp_info import TcpInfo

HELD_BACK: Final = 0.5
"""Of the time that they were busy."""
NARROW: Final = 2
"""Measured at 10 Mbit/s and 100 ms: two carry 0.90 of the way and more, four 0.77–0.89, eight 0.58–0.65."""
NARROW_BPS: Final = 20e6
"""Below it no processor is too busy for a stripe, which is what the others are for within a site."""
NARROW_BYTES: Final = 250_000
"""On the way at once. At 10 Mbit/s and 300 ms, 375 kB, neither is better: four 0.70–0.76 without loss and 0.71 with 0.5 %, two 0.66 and 0.74–0.81."""
MORE: Final = 1.25
"""Times a limit, to be above it."""
TELLING_S: Final = 1.0
TELLING_ROUND_TRIPS: Final = 8
"""Of one measurement: the longer of the two."""
TELLING: Final = 3
"""Measurements that have to say little."""


def at_first(most: int, congestion: str | None) -> int:
    """Of ``most`` stripes; ``congestion``: of who sends, None where its kernel does not say."""
    return min(most, FEWEST) if congestion in LOSS_BLIND else most


def suited(rate_bps: float, rtt_s: float) -> int:
    """To a way on which so much passes."""
    return NARROW if rate_bps < NARROW_BPS and rate_bps * rtt_s / 8 < NARROW_BYTES else FEWEST


class Lanes:
    """What the stripes in use of one link come up against."""

    def __init__(self) -> None:
        self._least = 0
        """What it was raised to."""
        self._last: Sequence[TcpInfo] = ()
        self._rates_bps: deque[float] = deque(maxlen=TELLING)
        self._mark: Sequence[TcpInfo] = ()
        """Since when what passes is measured."""

    def look(self, in_use: int, most: int, infos: Sequence[TcpInfo]) -> int:
        """How many are to be used from now on. ``infos``: of those in use, now and then while there is something to send."""
        since = list(zip(infos, self._last, strict=False))
        self._last = infos
        busy_s = sum(now.busy_s - last.busy_s for now, last in since)
        if busy_s > 0 and sum(now.held_back_s - last.held_back_s for now, last in since) > HELD_BACK * busy_s:
            wanted = max(FEWEST, 2 * in_use)
        else:
            wanted = max(self._least, self._by_rate(in_use, infos))
        if wanted > in_use:
            self._least = wanted
        return min(most, wanted)

    def _by_rate(self, in_use: int, infos: Sequence[TcpInfo]) -> int:
        if len(infos) != len(self._mark) or not infos:
            self._mark = infos
            return in_use
        rtt_s = min(info.min_rtt_s for info in infos)
        busy_s = max(now.busy_s - mark.busy_s for now, mark in zip(infos, self._mark, strict=True))
        if busy_s < max(TELLING_S, TELLING_ROUND_TRIPS * rtt_s):
            return in_use
        rate_bps = 8 * sum(now.acked_bytes - mark.acked_bytes for now, mark in zip(infos, self._mark, strict=True)) / busy_s
        self._mark = infos
        self._rates_bps.append(rate_bps)
        if suited(rate_bps / MORE, rtt_s) > in_use:
            return FEWEST
        narrow = len(self._rates_bps) == TELLING and suited(max(self._rates_bps), rtt_s) == NARROW
        return NARROW if narrow else in_use
