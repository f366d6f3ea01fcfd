"""A link: the stripes between two nodes, as one thing. A control connection is a link of one stripe.

Promises: control messages go over stripe 0, in order; the loss of one stripe ends the link (its owner attaches anew and says what it holds, so
nothing is sent twice); ``on_link_closed`` is called once.
"""

from __future__ import annotations

from typing import Protocol

from p2pcast.addresses import show_address
from p2pcast.errors import P2PCastError
from p2pcast.transport.stripe import Stripe
from p2pcast.wire.connection import Established, Event
from p2pcast.wire.messages import Body, Type


class LinkOwner(Protocol):
    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None: ...
    def on_link_read(self, link: Link, payload_bytes: int) -> None: ...
    def on_link_writable(self, link: Link, stripe: Stripe) -> None: ...
    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None: ...


class QuietOwner:
    """A `LinkOwner` to whom nothing matters; what does is overridden. One that accepts links and hands them on needs no more."""

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None: ...
    def on_link_read(self, link: Link, payload_bytes: int) -> None: ...
    def on_link_writable(self, link: Link, stripe: Stripe) -> None: ...
    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None: ...


class Link:
    """``remote`` is the other side's node, ``name`` what it calls itself, ``stripes`` by number; ``dialled``: from here, not by the other side;
    ``reserve``: as many stripes as the way may come to need, which need not all be used; ``in_use``: how many carry pieces from here, those of the lowest numbers."""

    def __init__(
        self, owner: LinkOwner, remote: bytes, name: str, expected: int, *, dialled: bool = False, reserve: bool = False
    ) -> None:
        self.owner = owner
        self.remote = remote
        self.name = name
        self.expected = expected
        self.dialled = dialled
        self.reserve = reserve
        self.in_use = expected
        self.stripes: dict[int, Stripe] = {}
        self.closed = False
        self.error: P2PCastError | None = None

    def __repr__(self) -> str:
        return f"Link({self.name}, {len(self.stripes)}/{self.expected} stripes{', closed' if self.closed else ''})"

    @property
    def remote_host(self) -> str:
        return self.stripes[0].remote_address[0] if 0 in self.stripes else ""

    @property
    def own_host(self) -> str:
        """The address from which this machine speaks to the other side."""
        return self.stripes[0].own_host if 0 in self.stripes else ""

    @property
    def address(self) -> str:
        """Where the other side's connections are from, or were dialled at."""
        return show_address(*self.stripes[0].remote_address) if 0 in self.stripes else ""

    @property
    def protocol(self) -> int | None:
        """What both sides have settled on (``wire.versions``)."""
        return self.stripes[0].connection.protocol if 0 in self.stripes else None

    @property
    def carriers(self) -> list[Stripe]:
        """The stripes in use, by number."""
        return [self.stripes[number] for number in range(self.in_use) if number in self.stripes]

    @property
    def rtt_s(self) -> float | None:
        """The slowest stripe's round trip, by the kernel's word; None where it says nothing."""
        return max((info.rtt_s for stripe in self.stripes.values() if (info := stripe.info()) is not None), default=None)

    def add(self, stripe: Stripe, number: int) -> None:
        stripe.number = number
        stripe.owner = self
        self.stripes[number] = stripe

    def send(self, kind: Type, body: Body, handle: int = 0) -> None:
        """A control message, over stripe 0. Without effect once the link is closed."""
        if not self.closed and (first := self.stripes.get(0)) is not None and not first.closed:
            first.write(first.connection.send(kind, body, handle))

    def send_signed(self, kind: Type, signed: bytes) -> None:
        """As ``send``, a signed record that names its artifact itself."""
        if not self.closed and (first := self.stripes.get(0)) is not None and not first.closed:
            first.write(first.connection.send_signed(kind, signed, 0))

    def close(self, error: P2PCastError | None = None) -> None:
        for stripe in list(self.stripes.values()):
            stripe.close(error)
        self._over(error)

    def abort(self, error: P2PCastError | None = None) -> None:
        for stripe in list(self.stripes.values()):
            stripe.abort(error)
        self._over(error)

    def gather(self, on: bool) -> None:
        """See ``Stripe.gather``."""
        for stripe in self.stripes.values():
            stripe.gather(on)

    def pause_reading(self) -> None:
        for stripe in self.stripes.values():
            stripe.pause_reading()

    def resume_reading(self) -> None:
        for stripe in self.stripes.values():
            stripe.resume_reading()

    # -- StripeOwner

    def on_established(self, stripe: Stripe, event: Established) -> None:
        raise AssertionError("a stripe of a link was established already")

    def on_event(self, stripe: Stripe, event: Event) -> None:
        if not self.closed:
            self.owner.on_link_event(self, stripe, event)

    def on_read(self, stripe: Stripe, payload_bytes: int) -> None:
        if not self.closed:
            self.owner.on_link_read(self, payload_bytes)

    def on_writable(self, stripe: Stripe) -> None:
        if not self.closed:
            self.owner.on_link_writable(self, stripe)

    def on_closed(self, stripe: Stripe, error: P2PCastError | None) -> None:
        if not self.closed:
            for other in list(self.stripes.values()):
                if other is not stripe:
                    other.abort()
            self._over(error)

    def _over(self, error: P2PCastError | None) -> None:
        if not self.closed:
            self.closed = True
            self.error = error
            self.owner.on_link_closed(self, error)
