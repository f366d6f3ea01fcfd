"""A child as its parent knows it: the artifacts sent to it, on which of its stripes, and how fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from p2pcast.relay.active_stripes import ActiveStripes, initial_stripes
from p2pcast.relay.pacing import InboundRate
from p2pcast.relay.send_schedule import ChildSchedules
from p2pcast.relay.tuning import FAR_RTT_S, REMINDER_ROUND_TRIPS
from p2pcast.transport.link import Link
from p2pcast.transport.socket_options import congestion_of
from p2pcast.transport.stripe import Stripe
from p2pcast.transport.stripe_count import LOSS_BLIND


@dataclass(slots=True, eq=False)
class Child:
    link: Link
    last_received_at: float
    schedules: ChildSchedules = field(default_factory=ChildSchedules)
    attached: bool = False
    live: bool = False
    """The plan places the child here, so every version is pushed to it. Otherwise the child pulls."""
    wishes: dict[bytes, Sequence[int]] = field(default_factory=dict)
    """Artifacts that the child wants and this node does not have yet -> ranges of pieces that the child has."""
    skipped: set[bytes] = field(default_factory=set)
    """Artifacts that are not pushed: the child has them, or gets them from a different source."""
    max_bytes_s: int | None = None
    """Bytes per second that the child currently accepts, if it pulls."""
    announced_at: float = 0.0
    """When the child was last sent HAVE."""
    active_stripes: ActiveStripes | None = None
    """None if all stripes of the link are used."""
    loss_blind: bool = False
    """The congestion control on this link does not slow down for loss, and probes each stripe separately."""
    rtt_s: float = 0.0
    """The slowest used stripe's round-trip time, as of the last ``choose_stripes``."""
    path_rtt_s: float = 0.0
    """The same without time in queues: based on each stripe's shortest round trip."""
    carried: dict[Stripe, float] = field(default_factory=dict)
    """Stripe -> when it last got a piece."""
    alive_at: float = 0.0
    """When the child was last sent ALIVE."""
    bytes_sent: int = 0

    def begin_stripes(self, *, reserve: bool) -> None:
        """Choose the first stripes in use, once the child has attached. ``reserve``: use as few as the path needs."""
        # All stripes are alike. The child promises a first one, but do not rely on it.
        congestion = congestion_of(next((stripe.socket for stripe in self.link.stripes.values()), None))
        self.loss_blind = congestion in LOSS_BLIND
        if reserve:
            self.link.in_use = initial_stripes(self.link.expected, congestion)
            self.active_stripes = ActiveStripes() if self.loss_blind else None

    def choose_stripes(self) -> bool:
        """Use as many stripes as the path has turned out to need, and return whether the number grew. Call this while
        there is data to send.
        """
        if not self.schedules:
            return False
        infos = [info for stripe in self.link.carriers if (info := stripe.info()) is not None]
        self.rtt_s = max((info.rtt_s for info in infos), default=0.0)
        self.path_rtt_s = max((info.min_rtt_s for info in infos), default=0.0)
        if self.active_stripes is None:
            return False
        before = self.link.in_use
        self.link.in_use = self.active_stripes.choose(before, self.link.expected, infos)
        return self.link.in_use > before

    def pace(self, inbound: InboundRate) -> None:
        """On a long path, limit the rate of pushed data to little more than the rate at which it comes in."""
        most = inbound.most_bytes_s(self.schedules.waiting_bytes, self.path_rtt_s) if self.live else None
        if most is None:
            return
        if self.loss_blind:
            most = int(most / self.link.in_use)
        for stripe in self.link.stripes.values():
            stripe.pace(most)

    def trailing(self, now: float) -> list[Stripe]:
        """Return a long path's stripes that recently carried pieces and have none queued. A reminder after the last
        piece shows the other side if the piece was lost. Without one, this kernel probes after two round trips and
        retransmits after a third.
        """
        late = now - REMINDER_ROUND_TRIPS * self.rtt_s
        self.carried = {stripe: at for stripe, at in self.carried.items() if at > late and not stripe.closed}
        return [] if self.path_rtt_s < FAR_RTT_S else [stripe for stripe in self.carried if not stripe.unsent_bytes]

    def emptiest(self) -> Stripe | None:
        """Return the first writable stripe without unsent bytes, else the one with the fewest; None if none is
        writable. Stripes do not take turns, because a kernel detects loss late on a connection with little in flight.
        """
        least, found = 0, None
        for stripe in self.link.carriers:
            if not stripe.writable or (self.schedules.apart and not stripe.number):
                continue
            if not (unsent := stripe.unsent_bytes):
                return stripe
            if found is None or unsent < least:
                least, found = unsent, stripe
        return found
