"""How fast a link's stripes may send together, over a way whose queue they overrun. Pure: it is told what the kernel says.

BBR takes a loss for chance, and every eighth round trip it sends a quarter more than it has found, each connection for itself. Over a long way that is more than a short queue holds: four
connections at 10 Mbit/s and 300 ms, with a queue of 50 ms, sent 28 % of all again. What the way carries is known by then. So a link that loses much is held, all its stripes together,
to what got through; while it then loses little, to more and more, since the way may have more to give.
Loss that stays, though the link is held, is the way's own: for a while it is left to BBR. So are wide ways: at 50 Mbit/s, 150 ms and 0.5 % of loss four connections carry 0.83 of the
way and send a third of it again, and 0.74 to 0.77 held, with a quarter sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from p2pcast.relay.smoothing import UNHELD_BYTES_S
from p2pcast.transport.tcp_info import TcpInfo

TELLING_S: Final = 0.5
TELLING_ROUND_TRIPS: Final = 4
"""Of one measurement: the longer of the two."""
MEASURED: Final = 16
"""Measurements that are remembered, of which the second best counts: many fall into one of BBR's pauses, or a rest of the sender's, and one may say too
much, when what was held up is acknowledged at once. Of a way that comes to carry less BBR knows soon enough by itself; what is prevented here is that it searches for more."""
ENOUGH: Final = 8
"""Measurements before a link is held at all: while BBR still searches for its rate, it loses much and has carried little."""
NARROW_BPS: Final = 12e6
"""Links that have carried more are not held: a way of 30 Mbit/s that loses 0.5 % by itself seems to carry 15 for some seconds, and would be held to that."""
MUCH: Final = 0.04
"""Of what is sent, sent again: the link is held."""
LITTLE: Final = 0.02
"""The way may carry more. Above what ways lose by themselves."""
GROWTH: Final = 0.01
"""From one measurement to the next, and as much more with each further one in a row: near what was too much it grows slowly, and doubles in 12."""
STRIKES: Final = 24
"""Measurements in a row of much loss under restraint, more than are remembered: it is not our doing."""
LEFT_ALONE: Final = 64
"""Measurements until it is tried again."""


class Restraint:
    """``most_bytes_s``: for all stripes in use together; None: there was never any need, UNHELD_BYTES_S: there is none now."""

    def __init__(self) -> None:
        self.most_bytes_s: float | None = None
        self._rates: deque[float] = deque(maxlen=MEASURED)
        self._mark: Sequence[TcpInfo] = ()
        """Since when what passes is measured."""
        self._strikes = 0
        self._left_alone = 0
        self._quiet = 0
        """Measurements of little loss in a row."""

    def look(self, infos: Sequence[TcpInfo]) -> None:
        """``infos``: of the stripes in use, now and then while there is something to send."""
        if len(infos) != len(self._mark) or not infos:
            self._mark = infos
            return
        since = list(zip(infos, self._mark, strict=True))
        busy_s = max(now.busy_s - mark.busy_s for now, mark in since)
        if busy_s < max(TELLING_S, TELLING_ROUND_TRIPS * min(now.min_rtt_s for now in infos)):
            return
        self._mark = infos
        sent = sum(now.sent_bytes - mark.sent_bytes for now, mark in since)
        again = sum(now.retransmitted_bytes - mark.retransmitted_bytes for now, mark in since)
        # Not what is acknowledged in order: that stands still and leaps.
        self._rates.append(
            sum((now.delivered_packets - mark.delivered_packets) * now.segment_bytes for now, mark in since) / busy_s
        )
        self._judge(again / sent if sent > 0 else 0.0)

    def _judge(self, lost: float) -> None:
        if self._left_alone:
            self._left_alone -= 1
        elif lost > MUCH:
            self._quiet = 0
            self._strikes += self._held
            if self._strikes == STRIKES:
                self.most_bytes_s, self._strikes, self._left_alone = UNHELD_BYTES_S, 0, LEFT_ALONE
            elif len(self._rates) >= ENOUGH and 0 < 8 * (carried := sorted(self._rates)[-2]) < NARROW_BPS:
                self.most_bytes_s = carried
        else:
            self._strikes = 0
            self._quiet = self._quiet + 1 if lost < LITTLE else 0
            if self.most_bytes_s is not None:
                self.most_bytes_s = min((1 + GROWTH * self._quiet) * self.most_bytes_s, UNHELD_BYTES_S)

    @property
    def _held(self) -> bool:
        return self.most_bytes_s is not None and self.most_bytes_s < UNHELD_BYTES_S
