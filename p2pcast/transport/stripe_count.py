"""Chooses a link's number of stripes: as many as the path may need, and at least FEWEST. Pure.

The dialling side knows the round-trip time, but about the rate only what earlier transfers have shown. So it sizes the
link for a path of at least ASSUMED_RATE_BPS. The sender decides how many of the stripes carry pieces, and adjusts that
number as it learns (``relay.active_stripes``); on a narrow path, most stripes stay idle.

The rule: the lowest power of two, from FEWEST to MOST, that meets the needs of a path with ``rate_bps`` and ``rtt_s``:

- *Window*: the kernel's buffers limit the bytes in flight on a connection. All stripes together must have space for
  rate × round-trip time.
- *Loss*: at a loss rate of p, CUBIC and Reno limit a connection to a window that follows from p. RFC 9438, section 5.1:
  1.054 · (RTT³/p³)^¼ packets; Reno (Mathis et al. 1997): 1.22/√p, if that is more. All stripes together must reach the
  rate. BBR does not slow down for such loss.
- *Stalls*: a stripe that has lost packets delivers nothing for a round trip, or until a timer fires. Each stripe also
  buffers about 256 KiB on either side of the kernel, which keeps a link busy while the processor is busy elsewhere. So
  there are at least FEWEST stripes on any path.
- *Start*: versions are bursts. Between two bursts, a window shrinks to ten packets; then it doubles every round trip.
  All stripes together must reach the rate when each has START_GROWTH times the initial window.

If more stripes are in use than needed, they take an unfair share of a shared path and overflow a narrow path's queue.
Also, the last pieces wait for the slowest stripe.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2, sqrt

MOST = 16
ASSUMED_RATE_BPS = 100e6
"""Lowest rate in bits per second that is assumed of a path. A slower transfer proves nothing: it may have had too few
stripes, or a slow sender.
"""
ASSUMED_LOSS = 0.005
"""Assumed share of lost packets: the receiver chooses the number, and cannot see the loss on the path towards it."""
FEWEST = 4
"""Also used if the round-trip time is unknown, when the parent dials. Measured: a single stripe is slower between sites
if packets are lost. Within a site it is slower on busy processors (16 peers on four cores: 1.21 × ideal with one
stripe, 1.15 × with four).
"""
SEGMENT_BYTES = 1448
INITIAL_SEGMENTS = 10
"""Initial window in segments (RFC 6928)."""
START_GROWTH = 20
"""Factor by which slow start has grown the initial window between its fourth and fifth round trip. It fits the best
numbers measured: eight stripes at 50 Mbit/s and 100 or 150 ms, sixteen at 300 ms.
"""
LOSS_BLIND = frozenset({"bbr"})
CUBIC = frozenset({"cubic"})


@dataclass(frozen=True, slots=True)
class NetworkPath:
    """A network path. ``window_bytes``: most bytes in flight per connection. ``loss``: share of lost packets."""

    rtt_s: float
    rate_bps: float
    congestion: str
    window_bytes: float
    loss: float = ASSUMED_LOSS


def stripes(way: NetworkPath) -> int:
    """Return the number of stripes for a path, by the module's rule."""
    on_the_way = max(way.rate_bps, ASSUMED_RATE_BPS) * way.rtt_s / 8
    window = on_the_way / way.window_bytes
    loss = (
        0.0
        if way.congestion in LOSS_BLIND
        else on_the_way / (SEGMENT_BYTES * lossy_window(way.congestion, way.rtt_s, way.loss))
    )
    start = on_the_way / (INITIAL_SEGMENTS * SEGMENT_BYTES * START_GROWTH)
    needed = max(FEWEST, window, loss, start)
    return min(MOST, 1 << ceil(log2(needed)))


def lossy_window(congestion: str, rtt_s: float, loss: float) -> float:
    """Return a connection's average window in packets at this share of lost packets (RFC 9438, section 5.1)."""
    if not loss:
        return float("inf")
    reno = sqrt(1.5 / loss)
    return max(reno, 1.054 * (rtt_s / loss) ** 0.75) if congestion in CUBIC else reno
