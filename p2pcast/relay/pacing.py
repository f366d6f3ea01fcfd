"""Limits how fast a relay forwards data: not much faster than the data arrived. Pure.

On a long path, data arrives in bursts: after a lost packet, everything waits for a round trip and then arrives at once.
A burst forwarded at full speed overflows the next narrow link, whose queue fits less than a round trip of data. So each
hop loses more than the one above it. The kernel does not prevent that. In its start-up phase, BBR sends at almost three
times the rate it found. That phase ends only if BBR always has data to send, but a relay waits for its parent.

On a short path, a burst fits into a queue, so such a child is not paced.
"""

from __future__ import annotations

from collections import deque

from p2pcast.relay.tuning import (
    FAR_BEHIND_S,
    INBOUND_ARTIFACTS,
    PACED_RTT_S,
    PACING_HEADROOM,
    RATE_WINDOW_S,
    UNPACED_BYTES_S,
)


class InboundRate:
    """The rate at which whole artifacts arrived. Shorter intervals would measure the end of a burst."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=INBOUND_ARTIFACTS)

    def add(self, count_bytes: int, took_s: float) -> None:
        """Record that an artifact of ``count_bytes`` has arrived completely."""
        if took_s >= RATE_WINDOW_S:
            self._rates.append(count_bytes / took_s)

    def most_bytes_s(self, waiting_bytes: int, rtt_s: float) -> int | None:
        """Return the rate limit for a child with ``waiting_bytes`` queued and a round trip of ``rtt_s``; None while no
        inbound rate is known.
        """
        if not self._rates:
            return None
        bytes_s = max(self._rates)
        if rtt_s < PACED_RTT_S or waiting_bytes > FAR_BEHIND_S * bytes_s:
            return UNPACED_BYTES_S
        return int(PACING_HEADROOM * bytes_s)
