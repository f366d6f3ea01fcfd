"""A link: all stripes between two nodes. A control connection is a link with one stripe.

Promises:

- Control messages go over stripe 0, in order.
- The loss of one stripe closes the link. The owner attaches again and reports what it has, so nothing is sent twice.
- ``on_link_closed`` is called once.
- An unexpected error in the owner closes only this link.
- Messages over the node's rate limit are not read until later.
- The link to a node that does not read its answers is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, Protocol

from p2pcast.ground import limits
from p2pcast.ground.addresses import show_address
from p2pcast.ground.errors import LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.process.background_tasks import report_bug
from p2pcast.transport.rate_limit import RateLimit, cost
from p2pcast.transport.stripe import Stripe
from p2pcast.wire.connection import Established, Event, Message
from p2pcast.wire.messages import Record, Type

P = ParamSpec("P")

RATE_CHECK_S = 1.0
"""Longest interval in seconds between two checks of a link that is over its rate limit."""


class LinkOwner(Protocol):
    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None: ...
    def on_link_read(self, link: Link, payload_bytes: int) -> None: ...
    def on_link_writable(self, link: Link, stripe: Stripe) -> None: ...
    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None: ...


class QuietOwner:
    """A `LinkOwner` that ignores all events; subclasses override the ones they need. Enough for an owner that only
    accepts links and passes them on.
    """

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None: ...
    def on_link_read(self, link: Link, payload_bytes: int) -> None: ...
    def on_link_writable(self, link: Link, stripe: Stripe) -> None: ...
    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None: ...


class Link:
    """``remote``: the other node's id. ``name``: the other node's name, as it gives it. ``stripes``: by number.
    ``dialled``: whether this side dialled. ``reserve``: the link has spare stripes in case the path needs them.
    ``in_use``: how many stripes carry pieces from this side; they are those with the lowest numbers.
    """

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
        self.rate_limit: RateLimit | None = None
        """The limit on the other node's requests; None if unlimited."""
        self._pause_reasons: set[str] = set()
        """The reasons for which reading is paused; empty while it is not."""
        self._unread_bytes = 0
        """Bytes written since stripe 0's write buffer became full."""
        self._deadline: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"Link({self.name}, {len(self.stripes)}/{self.expected} stripes{', closed' if self.closed else ''})"

    @property
    def remote_host(self) -> str:
        return self.stripes[0].remote_address[0] if 0 in self.stripes else ""

    @property
    def certificate(self) -> bytes | None:
        """The other node's certificate (DER); None on plaintext links."""
        return self.stripes[0].certificate if 0 in self.stripes else None

    @property
    def own_host(self) -> str:
        """This machine's address on the link."""
        return self.stripes[0].own_host if 0 in self.stripes else ""

    @property
    def address(self) -> str:
        """The other node's address on the link."""
        return show_address(*self.stripes[0].remote_address) if 0 in self.stripes else ""

    @property
    def protocol(self) -> int | None:
        """The negotiated protocol version (``wire.protocol_versions``)."""
        return self.stripes[0].connection.protocol if 0 in self.stripes else None

    @property
    def carriers(self) -> list[Stripe]:
        """The stripes in use, by number."""
        return [self.stripes[number] for number in range(self.in_use) if number in self.stripes]

    @property
    def rtt_s(self) -> float | None:
        """The slowest stripe's round-trip time in seconds, from the kernel; None if unknown."""
        return max(
            (info.rtt_s for stripe in self.stripes.values() if (info := stripe.info()) is not None), default=None
        )

    def add(self, stripe: Stripe, number: int) -> None:
        stripe.number = number
        stripe.owner = self
        self.stripes[number] = stripe
        if self._pause_reasons:
            stripe.pause_reading()

    def send(self, record: Record, handle: int = 0) -> None:
        """Send a control message over stripe 0. Does nothing if the link is closed."""
        if not self.closed and (first := self.stripes.get(0)) is not None and not first.closed:
            self._write(first, first.connection.send(record, handle))

    def expect_first_message(self, what: str, seconds: float | None = None) -> None:
        """Close the link after ``seconds`` (None: FIRST_MESSAGE_S) unless ``introduced`` is called first. ``what``: the
        awaited message, for the error.
        """
        seconds = limits.FIRST_MESSAGE_S if seconds is None else seconds
        late = RemoteError(f"no {what} within {seconds:g} s")
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.close, late)

    def introduced(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def send_signed(self, kind: Type, signed: bytes) -> None:
        """Like ``send``, for a signed record that names its artifact itself."""
        if not self.closed and (first := self.stripes.get(0)) is not None and not first.closed:
            self._write(first, first.connection.send_signed(kind, signed, 0))

    def _write(self, first: Stripe, said: bytes) -> None:
        if not first.writable:
            self._unread_bytes += len(said)
            if self._unread_bytes > limits.MAX_UNREAD_BYTES:
                # Close it later, because the caller may be iterating over its links.
                asyncio.get_running_loop().call_soon(
                    self.abort, RetryableError("the other side does not read its messages")
                )
                return
        first.write(said)

    def close(self, error: P2PCastError | None = None) -> None:
        for stripe in list(self.stripes.values()):
            stripe.close(error)
        self._close_once(error)

    def abort(self, error: P2PCastError | None = None) -> None:
        for stripe in list(self.stripes.values()):
            stripe.abort(error)
        self._close_once(error)

    def gather(self, on: bool) -> None:
        """See ``Stripe.gather``."""
        for stripe in self.stripes.values():
            stripe.gather(on)

    def pause_reading(self, why: str = "owner") -> None:
        self._pause_reasons.add(why)
        for stripe in self.stripes.values():
            stripe.pause_reading()

    def resume_reading(self, why: str = "owner") -> None:
        """Remove a reason for pausing; reading resumes when none is left."""
        self._pause_reasons.discard(why)
        if not self._pause_reasons:
            for stripe in self.stripes.values():
                stripe.resume_reading()

    # -- rate limit

    def spend(self, units: float) -> None:
        """Charge a request to the other node. If it is over its rate limit, reading pauses until it has units again."""
        if (
            self.rate_limit is not None
            and (wait_s := self.rate_limit.spend(units, asyncio.get_running_loop().time())) > 0
        ):
            self._hold(wait_s)

    def _hold(self, wait_s: float) -> None:
        if "rate limit" not in self._pause_reasons and not self.closed:
            self.pause_reading("rate limit")
            asyncio.get_running_loop().call_later(min(RATE_CHECK_S, wait_s), self._check_rate)

    def _check_rate(self) -> None:
        if self.closed or self.rate_limit is None:
            return
        # Count as activity: the node may have sent messages that this side has not read.
        self.on_read(self.stripes[0], 0)
        self._pause_reasons.discard("rate limit")
        if (wait_s := self.rate_limit.spend(0.0, asyncio.get_running_loop().time())) > 0:
            self._hold(wait_s)
        else:
            self.resume_reading("rate limit")

    def attempt(self, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run the owner's work for this link. If the work fails, only this link is closed."""
        try:
            work(*args, **kwargs)
        except P2PCastError as error:
            self.close(error)
        except Exception as error:  # noqa: BLE001 - reported
            report_bug(f"{self.name}: an unexpected error ended this link", error)
            self.close(LocalError(f"internal error ({type(error).__name__})"))

    # -- StripeOwner

    def on_established(self, stripe: Stripe, event: Established) -> None:
        raise AssertionError("a stripe of a link was established already")

    def on_event(self, stripe: Stripe, event: Event) -> None:
        if not self.closed:
            if type(event) is Message and (asked := cost(event.type, event.size)):
                self.spend(asked)
            self.attempt(self.owner.on_link_event, self, stripe, event)

    def on_read(self, stripe: Stripe, payload_bytes: int) -> None:
        if not self.closed:
            self.attempt(self.owner.on_link_read, self, payload_bytes)

    def on_writable(self, stripe: Stripe) -> None:
        if not self.closed:
            if not stripe.number:
                self._unread_bytes = 0
            self.attempt(self.owner.on_link_writable, self, stripe)

    def on_closed(self, stripe: Stripe, error: P2PCastError | None) -> None:
        if not self.closed:
            for other in list(self.stripes.values()):
                if other is not stripe:
                    other.abort()
            self._close_once(error)

    def _close_once(self, error: P2PCastError | None) -> None:
        if not self.closed:
            self.closed = True
            self.error = error
            self.introduced()
            try:
                self.owner.on_link_closed(self, error)
            except Exception as bug:  # noqa: BLE001 - reported by report_bug
                report_bug(f"{self.name}: an unexpected error while this link was closing", bug)
