"""Chooses how many of a link's stripes carry pieces; the others stay idle. Pure: the kernel's statistics are passed in.

The dialling node chooses the number of stripes (p2pcast.transport.stripe_count) before it knows the path, so it chooses
enough for a fast one. The sender measures the path and uses only as many as the path needs: several BBR connections
together overflow a narrow path's queue. Pieces on several stripes share the path's rate, and every hop of a chain adds
that delay to a version's time.

- With congestion control that slows down for loss (CUBIC, Reno), all stripes are used: a low rate does not prove that a
  path is narrow.
- With BBR, FEWEST stripes fill a path whatever its loss. NARROW_STRIPES are used while the rate and the bytes in flight
  are both low. The rate is measured only over busy time, in samples of several round trips. The first sample is from
  slow start and any may include a pause of BBR, so the fastest of several decides. Too few stripes cannot make a path
  look narrow for long: two BBR stripes carry more than half of any path's rate, and one sample above the limit is
  enough.
- The number is doubled as soon as the stripes in use were limited by the receiver's or sender's window for most of
  their busy time. On a narrow path BBR is the limit, not windows.

A link never uses fewer stripes than it was raised to: a stripe that joins during a version searches for the path's rate
at the others' expense. (Tried and left out: eight stripes at 100 Mbit/s and 150 ms, where eight carry 4 % more than
four. As stripes joined and left by rate, all together carried a quarter less.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from p2pcast.relay.tuning import (
    HELD_BACK_SHARE,
    NARROW_BPS,
    NARROW_IN_FLIGHT_BYTES,
    NARROW_STRIPES,
    RAISE_MARGIN,
    RATE_SAMPLE_ROUND_TRIPS,
    RATE_SAMPLE_S,
    RATE_SAMPLES,
)
from p2pcast.transport.stripe_count import FEWEST, LOSS_BLIND
from p2pcast.transport.tcp_info import TcpInfo


def initial_stripes(most: int, congestion: str | None) -> int:
    """Return how many of ``most`` stripes to use at first. ``congestion``: the sender's, None if unknown."""
    return min(most, FEWEST) if congestion in LOSS_BLIND else most


def stripes_for(rate_bps: float, rtt_s: float) -> int:
    """Return the number of BBR stripes for a path that carries ``rate_bps``."""
    narrow = rate_bps < NARROW_BPS and rate_bps * rtt_s / 8 < NARROW_IN_FLIGHT_BYTES
    return NARROW_STRIPES if narrow else FEWEST


class ActiveStripes:
    """Chooses one link's number of stripes in use, by what limits them."""

    def __init__(self) -> None:
        self._least = 0
        """The number of stripes to which the link was raised."""
        self._last: Sequence[TcpInfo] = ()
        self._rates_bps: deque[float] = deque(maxlen=RATE_SAMPLES)
        self._sample_start: Sequence[TcpInfo] = ()

    def choose(self, in_use: int, most: int, infos: Sequence[TcpInfo]) -> int:
        """Return the number of stripes to use from now on. ``infos``: those of the stripes in use. Call this a few
        times a second while there is data to send.
        """
        since = list(zip(infos, self._last, strict=False))
        self._last = infos
        busy_s = sum(now.busy_s - last.busy_s for now, last in since)
        held_back_s = sum(now.held_back_s - last.held_back_s for now, last in since)
        if busy_s > 0 and held_back_s > HELD_BACK_SHARE * busy_s:
            wanted = max(FEWEST, 2 * in_use)
        else:
            wanted = max(self._least, self._by_rate(in_use, infos))
        if wanted > in_use:
            self._least = wanted
        return min(most, wanted)

    def _by_rate(self, in_use: int, infos: Sequence[TcpInfo]) -> int:
        start = self._sample_start
        if len(infos) != len(start) or not infos:
            self._sample_start = infos
            return in_use
        rtt_s = min(info.min_rtt_s for info in infos)
        busy_s = max(now.busy_s - then.busy_s for now, then in zip(infos, start, strict=True))
        if busy_s < max(RATE_SAMPLE_S, RATE_SAMPLE_ROUND_TRIPS * rtt_s):
            return in_use
        rate_bps = 8 * sum(now.acked_bytes - then.acked_bytes for now, then in zip(infos, start, strict=True)) / busy_s
        self._sample_start = infos
        self._rates_bps.append(rate_bps)
        if stripes_for(rate_bps / RAISE_MARGIN, rtt_s) > in_use:
            return FEWEST
        all_sampled = len(self._rates_bps) == RATE_SAMPLES
        return NARROW_STRIPES if all_sampled and stripes_for(max(self._rates_bps), rtt_s) == NARROW_STRIPES else in_use
