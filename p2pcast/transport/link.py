"""A link: the stripes between two nodes, as one thing. A control connection is a link of one stripe.

Promises: control messages go over stripe 0, in order; the loss of one stripe ends the link (its owner attaches anew and says what it holds, so
nothing is sent twice); ``on_link_closed`` is called once; an error that an owner did not expect ends this link alone; messages beyond a node's ration wait unread;
the link of a node that does not read its answers ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from p2pcast import limits
from p2pcast.addresses import show_address
from p2pcast.errors import LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.tasks import unforeseen
from p2pcast.transport.ration import Ration, cost
from p2pcast.transport.stripe import Stripe
from p2pcast.wire.connection import Established, Event, Message
from p2pcast.wire.messages import Body, Type

HELD_S = 1.0
"""Interval at which a link that is over its ration is checked, in seconds."""


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
        self.ration: Ration | None = None
        """What the other side may ask for; None: whatever it likes."""
        self._unheard: set[str] = set()
        """Why it is not read from."""
        self._unread_bytes = 0
        """Sent since stripe 0 was full."""
        self._deadline: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Link({self.name}, {len(self.stripes)}/{self.expected} stripes{', closed' if self.closed else ''})"

    @property
    def remote_host(self) -> str:
        return self.stripes[0].remote_address[0] if 0 in self.stripes else ""

    @property
    def certificate(self) -> bytes | None:
        """The other side's, DER; None where links are plain text."""
        return self.stripes[0].certificate if 0 in self.stripes else None

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
        if self._unheard:
            stripe.pause_reading()

    def send(self, kind: Type, body: Body, handle: int = 0) -> None:
        """A control message, over stripe 0. Without effect once the link is closed."""
        if not self.closed and (first := self.stripes.get(0)) is not None and not first.closed:
            self._write(first, first.connection.send(kind, body, handle))

    def await_first_word(self, what: str, seconds: float | None = None) -> None:
        """The link ends unless ``introduced`` is called by then (None: FIRST_WORD_S)."""
        seconds = limits.FIRST_WORD_S if seconds is None else seconds
        late = RemoteError(f"no {what} within {seconds:g} s")
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.close, late)

    def introduced(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def send_signed(self, kind: Type, signed: bytes) -> None:
        """As ``send``, a signed record that names its artifact itself."""
        if not self.closed and (first := self.stripes.get(0)) is not None and not first.closed:
            self._write(first, first.connection.send_signed(kind, signed, 0))

    def _write(self, first: Stripe, said: bytes) -> None:
        if not first.writable:
            self._unread_bytes += len(said)
            if self._unread_bytes > limits.MAX_UNREAD_BYTES:
                # Not at once: whoever tells many links something goes through them just now.
                asyncio.get_running_loop().call_soon(
                    self.abort, RetryableError("the other side does not read what is sent to it")
                )
                return
        first.write(said)

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

    def pause_reading(self, why: str = "owner") -> None:
        self._unheard.add(why)
        for stripe in self.stripes.values():
            stripe.pause_reading()

    def resume_reading(self, why: str = "owner") -> None:
        """Nothing comes as long as another reason stands."""
        self._unheard.discard(why)
        if not self._unheard:
            for stripe in self.stripes.values():
                stripe.resume_reading()

    # -- the ration

    def spend(self, units: float) -> None:
        """The other side has asked for something. What is over its ration is not read before its time."""
        if self.ration is not None and (wait_s := self.ration.spend(units, asyncio.get_running_loop().time())) > 0:
            self._hold(wait_s)

    def _hold(self, wait_s: float) -> None:
        if "ration" not in self._unheard and not self.closed:
            self.pause_reading("ration")
            asyncio.get_running_loop().call_later(min(HELD_S, wait_s), self._look_again)

    def _look_again(self) -> None:
        if self.closed or self.ration is None:
            return
        # It was not listened to: its silence proves nothing.
        self.on_read(self.stripes[0], 0)
        self._unheard.discard("ration")
        if (wait_s := self.ration.spend(0.0, asyncio.get_running_loop().time())) > 0:
            self._hold(wait_s)
        else:
            self.resume_reading("ration")

    def attempt(self, work: Callable[[], None]) -> None:
        """Something that an owner does for this link by itself: if it fails, this link ends, and not the owner."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - told by _fault
            self._fault(error)

    def _fault(self, error: Exception) -> None:
        """What an owner did not expect ends this link, and nothing else."""
        if isinstance(error, P2PCastError):
            self.close(error)
            return
        unforeseen(f"{self.name}: an unexpected error ends this link", error)
        self.close(LocalError(f"internal error ({type(error).__name__})"))

    # -- StripeOwner

    def on_established(self, stripe: Stripe, event: Established) -> None:
        raise AssertionError("a stripe of a link was established already")

    def on_event(self, stripe: Stripe, event: Event) -> None:
        if not self.closed:
            if type(event) is Message and (asked := cost(event.type, event.size)):
                self.spend(asked)
            try:
                self.owner.on_link_event(self, stripe, event)
            except Exception as error:  # noqa: BLE001 - told by _fault
                self._fault(error)

    def on_read(self, stripe: Stripe, payload_bytes: int) -> None:
        if not self.closed:
            try:
                self.owner.on_link_read(self, payload_bytes)
            except Exception as error:  # noqa: BLE001 - told by _fault
                self._fault(error)

    def on_writable(self, stripe: Stripe) -> None:
        if not self.closed:
            if not stripe.number:
                self._unread_bytes = 0
            try:
                self.owner.on_link_writable(self, stripe)
            except Exception as error:  # noqa: BLE001 - told by _fault
                self._fault(error)

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
            self.introduced()
            try:
                self.owner.on_link_closed(self, error)
            except Exception as bug:  # noqa: BLE001 - told by unforeseen
                unforeseen(f"{self.name}: an unexpected error while this link was closing", bug)
