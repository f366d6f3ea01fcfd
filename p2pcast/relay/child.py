"""A child as its parent knows it: what it wants, and how much is sent to it over which of its stripes."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2pcast.relay.feed import ChildFeeds
from p2pcast.relay.lanes import Lanes, at_first
from p2pcast.relay.smoothing import Inflow
from p2pcast.transport.link import Link
from p2pcast.transport.sockets import congestion_of
from p2pcast.transport.stripe import Stripe
from p2pcast.transport.striping import LOSS_BLIND

FAR_S = 0.05
"""Round trip from which on it pays to make sure that the last packets are missed soon."""
TRAIL_ROUND_TRIPS = 2.0
"""For so long after a piece its stripe is reminded: what is lost has been asked for again by then."""


@dataclass(slots=True, eq=False)
class Child:
    link: Link
    heard_at: float
    feeds: ChildFeeds = field(default_factory=ChildFeeds)
    attached: bool = False
    live: bool = False
    wishes: dict[bytes, list[int]] = field(default_factory=dict)
    """Artifacts that it wants and that are not here yet, with what it holds of them."""
    spared: set[bytes] = field(default_factory=set)
    """Artifacts that it has, or gets from elsewhere: not pushed."""
    eased: int | None = None
    """Bytes per second that it takes for now, if it pulls."""
    told_at: float = 0.0
    lanes: Lanes | None = None
    """None: all its stripes are used, whatever comes."""
    searching: bool = False
    """Our kernel takes losses on this link for chance, and searches for more on each stripe by itself."""
    rtt_s: float = 0.0
    """The slowest of its stripes in use, as of the last look."""
    carried: dict[Stripe, float] = field(default_factory=dict)
    """Stripe → when it was last given a piece."""
    alive_at: float = 0.0
    bytes_sent: int = 0

    def meet(self, *, reserve: bool) -> None:
        """It has attached. ``reserve``: of its stripes as many are to be used as are needed."""
        # All are alike; that the first is there is the child's duty, and not to be relied on.
        congestion = congestion_of(next((stripe.socket for stripe in self.link.stripes.values()), None))
        self.searching = congestion in LOSS_BLIND
        if reserve:
            self.link.in_use = at_first(self.link.expected, congestion)
            self.lanes = Lanes() if self.searching else None

    def suit(self) -> bool:
        """Now and then while there is something to send: use as many of the stripes as the way has turned out to need. True when they have become more."""
        if not self.feeds:
            return False
        infos = [info for stripe in self.link.carriers if (info := stripe.info()) is not None]
        self.rtt_s = max((info.rtt_s for info in infos), default=0.0)
        if self.lanes is None:
            return False
        before, self.link.in_use = self.link.in_use, self.lanes.look(self.link.in_use, self.link.expected, infos)
        return self.link.in_use > before

    def hold(self, inflow: Inflow) -> None:
        """What is passed on by plan leaves not much faster than it comes in (relay.smoothing)."""
        most = inflow.most_bytes_s(self.feeds.waiting_bytes) if self.live else None
        if most is None:
            return
        if self.searching:
            most = int(most / self.link.in_use)
        for stripe in self.link.stripes.values():
            stripe.pace(most)

    def trailing(self, now: float) -> list[Stripe]:
        """Stripes on a long way that have carried pieces, and no more are behind them. If the last of these are lost, the other side finds them missing by what comes after: without
        that our kernel finds out after two round trips by itself, and sends them again a third one later."""
        late = now - TRAIL_ROUND_TRIPS * self.rtt_s
        self.carried = {stripe: at for stripe, at in self.carried.items() if at > late and not stripe.closed}
        return [] if self.rtt_s < FAR_S else [stripe for stripe in self.carried if not stripe.unsent_bytes]

    def emptiest(self) -> Stripe | None:
        """Of the stripes that take more, the first on which nothing waits to be sent, else that on which the least does; None: all are full. Not each in turn: of a
        connection with little on the way the kernel is late to see what was lost."""
        least, found = 0, None
        for stripe in self.link.carriers:
            if not stripe.writable or (self.feeds.apart and not stripe.number):
                continue
            if not (unsent := stripe.unsent_bytes):
                return stripe
            if found is None or unsent < least:
                least, found = unsent, stripe
        return found
