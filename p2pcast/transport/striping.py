"""How many stripes a link is made of: as many as its way may turn out to need, and never less than FEWEST. Pure.

Who dials knows the round trip, and of the rate what it has received before at best; so it makes a link for a way of ASSUMED_RATE_BPS. How many of its stripes carry pieces is decided by who
sends, and anew whenever that knows better (relay.lanes): on a narrow way most of them stand by.

The rule: the least power of two, from FEWEST to MOST, that meets these needs of a way of ``rate_bps`` and ``rtt_s``.

- *Window*: the kernel lets no connection have more on the way than its buffers take. Together they have to hold rate × round trip.
- *Loss*: CUBIC and Reno hold a connection, at a share p of packets lost, to a window that follows from p (RFC 9438, section 5.1: 1.054 · (RTT³/p³)^¼ packets, or Reno's
  1.22/√p where that is more; Mathis et al. 1997). Together they have to reach the rate. BBR does not slow down for loss of this size as they do;
- *Standing still*: whatever it is, a stripe that has lost packets hands on nothing before a round trip has passed, or a timer. And each holds some 256 KiB of its
  own on either side of the kernel, which carries a link over the moments in which a busy processor does not look after it. So there are FEWEST on any way.
- *Start*: versions are bursts, between which a window is taken back to ten packets, and then doubles every round trip. Together the stripes have to reach
  the rate when each has START_GROWTH times that window.

More stripes in use than needed take more of a shared way than is fair, overrun the queue of a narrow one, and the last pieces wait for the slowest of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2, sqrt

MOST = 16
STRIPES_BY_DEFAULT = 4
"""Where the round trip is not known: to a parent that is asked to dial us."""
ASSUMED_RATE_BPS = 100e6
"""Where no transfer has shown more. Less is never assumed: what came slowly may have come through too few stripes, or from somebody slow."""
ASSUMED_LOSS = 0.005
"""The receiver, who decides, can't see what is lost on the way to it."""
FEWEST = 4
"""Measured: one was slower beyond a site wherever packets are lost, and within one on processors that are short (16 peers on four cores: 1.21 × ideal against 1.15)."""
SEGMENT_BYTES = 1448
INITIAL_SEGMENTS = 10
"""RFC 6928."""
START_GROWTH = 20
"""Times that: what slow start reaches between its fourth and fifth round trip. Measured: eight stripes at 100 and 150 ms and 50 Mbit/s, sixteen at 300 ms."""
LOSS_BLIND = frozenset({"bbr"})
CUBIC = frozenset({"cubic"})


@dataclass(frozen=True, slots=True)
class Way:
    """``window_bytes``: what the kernel lets one connection have on the way, at most."""

    rtt_s: float
    rate_bps: float
    congestion: str
    window_bytes: float
    loss: float = ASSUMED_LOSS


def stripes(way: Way) -> int:
    on_the_way = max(way.rate_bps, ASSUMED_RATE_BPS) * way.rtt_s / 8
    window = on_the_way / way.window_bytes
    loss = (
        0.0 if way.congestion in LOSS_BLIND else on_the_way / (SEGMENT_BYTES * lossy_window(way.congestion, way.rtt_s, way.loss))
    )
    start = on_the_way / (INITIAL_SEGMENTS * SEGMENT_BYTES * START_GROWTH)
    needed = max(FEWEST, window, loss, start)
    return min(MOST, 1 << ceil(log2(needed)))


def lossy_window(congestion: str, rtt_s: float, loss: float) -> float:
    """Packets on the way on the average, of one connection that loses this share of them."""
    if not loss:
        return float("inf")
    reno = sqrt(1.5 / loss)
    return max(reno, 1.054 * (rtt_s / loss) ** 0.75) if congestion in CUBIC else reno
