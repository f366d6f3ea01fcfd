"""A rank's connection to the hub, in its own thread with an event loop. Other threads send through it and wait on it.

Guarantees: every wait returns: with a result, at its time limit, or when the connection closes. A connection that has
been silent for SILENCE_S counts as closed. At most QUEUE_BYTES are queued to send; beyond that, senders block.
``Received`` keeps the hub's messages, and is pure. Protocol: docs/formats/wire-protocol.md, section 6.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from p2pcast.ground import limits
from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import LocalError, P2PCastError, RefusedError, RetryableError
from p2pcast.ground.private_random import uniform
from p2pcast.ground.version import Version
from p2pcast.ledger_api.trainer_certificate import TrainerCertificate
from p2pcast.process import event_loop
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.wire import messages
from p2pcast.wire.connection import Established, Event, Identity, Message
from p2pcast.wire.dispatch import Handlers, dispatch

logger = logging.getLogger("p2pcast.publisher")

RETRY_MIN_S, RETRY_MAX_S = 0.2, 5.0
"""Shortest and longest delay between two attempts to reach the hub, in seconds, before jitter."""
QUEUE_BYTES = 64 * limits.MIB
"""Most bytes of encoded parts that may be queued for the socket."""
BEAT_S = 5.0
"""Interval of the PINGs, in seconds."""
LEAVE_S = 2.0
"""How long the hub has to close the connection after a LEAVE, in seconds."""
SILENCE_S = 30.0
"""The hub sends a message every few seconds. After this many seconds of silence it counts as dead."""

Found = TypeVar("Found")


@dataclass(slots=True)
class VersionBegun:
    """The version that the hub began. ``codec``: the version's codec, or ``auto`` if the hub does not state one."""

    version: Version
    base: Version | None
    codec: str = "auto"


@dataclass(slots=True)
class VersionDurable:
    """A stored version: ``bytes`` of its artifact, ``changed`` words, and ``params`` elements in the state."""

    version: Version
    bytes: int
    changed: int
    params: int


@dataclass(slots=True)
class RanksJoined:
    """The hub's newest version when all ranks had joined: the id and document of its layout, the digest of its state,
    and the BLAKE3 hash of its sparse-attention schedule.
    """

    head: Version | None
    layout: bytes | None
    document: bytes | None
    state: int | None
    schedule: bytes | None


@dataclass(slots=True)
class Received:
    """The hub's messages so far."""

    ranked: RanksJoined | None = None
    begun: dict[int, VersionBegun] = field(default_factory=dict)
    durable: dict[int, VersionDurable] = field(default_factory=dict)
    aborted: dict[int, str] = field(default_factory=dict)
    """Includes versions that this rank has not begun yet, because another rank gave up first."""
    engines: dict[str, tuple[Version | None, bool]] = field(default_factory=dict)
    """``peer/engine`` → the version it has committed, and whether it is ready."""
    _document: tuple[bytes, bytes] | None = None

    def take(self, message: Message) -> None:
        dispatch(_RECEIVERS, message, self)

    def _layout(self, body: messages.Layout) -> None:
        self._document = (body.layout, body.document)

    def _ranked(self, body: messages.Ranked) -> None:
        known = self._document is not None and self._document[0] == body.layout
        document = self._document[1] if known and self._document is not None else None
        self.ranked = RanksJoined(body.head, body.layout, document, body.state, body.schedule)

    def _begun(self, body: messages.Begun) -> None:
        self.begun = {body.serial: VersionBegun(body.version, body.base, body.codec or "auto")}
        self.aborted = {serial: reason for serial, reason in self.aborted.items() if serial >= body.serial}

    def _durable(self, body: messages.Durable) -> None:
        self.durable = {body.serial: VersionDurable(body.version, body.bytes, body.changed, body.params)}

    def _aborted(self, body: messages.Aborted) -> None:
        self.aborted[body.serial] = body.reason

    def _live(self, body: messages.Live) -> None:
        self.engines = {name: (committed, ready) for name, committed, ready in body.engines}


_RECEIVERS: Handlers = {
    messages.Layout: Received._layout,
    messages.Ranked: Received._ranked,
    messages.Begun: Received._begun,
    messages.Durable: Received._durable,
    messages.Aborted: Received._aborted,
    messages.Live: Received._live,
}


def _serial(record: messages.Record) -> int | None:
    """The serial of the version that a message belongs to, or None."""
    return getattr(record, "serial", None)


class HubConnection:
    """One connection, used by any thread. After it closes, a new one replaces it."""

    def __init__(self, address: tuple[str, int], badge: TrainerCertificate, name: str) -> None:
        self.received = Received()
        self._address = address
        self._badge = badge
        self._name = name[:128]
        self._changed = threading.Condition()
        """Guards everything below, and is notified of every change."""
        self._over: P2PCastError | None = None
        self._queue: deque[tuple[messages.Record, int]] = deque()
        self._queued_bytes = 0
        self._in_peace = False
        self._link: Link | None = None
        self._unreachable: RetryableError | None = None
        """Why the hub could not be dialled; None once it is reached."""
        self._until = 0.0
        """When to give up dialling, by ``time.monotonic``."""
        self._last_received_at = 0.0
        self._loop = event_loop.new_event_loop()
        self._stop = asyncio.Event()
        # A daemon thread: a training process that does not close the publisher must be able to exit.
        self._thread = threading.Thread(target=self._run, name="p2pcast uplink", daemon=True)

    # -- for other threads

    @property
    def over(self) -> bool:
        return self._over is not None

    def open(self, group: bytes, rank: int, ranks: int, timeout_s: float) -> RanksJoined:
        """Dial until the hub answers, send RANK, and wait until all ranks have joined. Raises RetryableError or
        RefusedError.
        """
        self._until = time.monotonic() + timeout_s
        self._queue.append((messages.Rank(group, rank, ranks), 0))
        self._thread.start()
        ranked = self.wait(lambda received: received.ranked, timeout_s)
        if ranked is None:
            unreachable = self._unreachable
            self.close()
            if unreachable is not None:
                raise RetryableError(f"{unreachable}; gave up after {timeout_s:g} s")
            raise RetryableError(f"not all {ranks} ranks of the trainer reached the hub within {timeout_s:.0f} s")
        return ranked

    def send(self, record: messages.Record, nbytes: int = 0) -> None:
        """Queue a message. With ``nbytes`` of payload, wait until the queue has space, or until the serial is aborted.
        Raises the error that closed the connection.
        """
        with self._changed:
            while (
                self._queued_bytes
                and self._queued_bytes + nbytes > QUEUE_BYTES
                and _serial(record) not in self.received.aborted
            ):
                self._raise_if_over()
                self._changed.wait()
            self._raise_if_over()
            self._queue.append((record, nbytes))
            self._queued_bytes += nbytes
        self._call(self._pump)

    def wait(self, find: Callable[[Received], Found | None], timeout_s: float | None = None) -> Found | None:
        """Wait until ``find``, called with the hub's messages, returns something other than None, and return it.
        Returns None at the time limit. Raises the error that closed the connection.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = find(self.received)
                if found is not None:
                    return found
                self._raise_if_over()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def abandon(self, serial: int, reason: str) -> None:
        """Drop the queued messages of ``serial`` and tell the hub that this rank gives the version up. Does nothing
        once the connection is closed.
        """
        with self._changed:
            if self._over is not None:
                return
            self._drop(serial)
            self._queue.append((messages.Aborted(serial, reason[:1000]), 0))
        self._call(self._pump)

    def close(self, *, in_peace: bool = False) -> None:
        """Close the connection and drop queued messages. ``in_peace``: no version is in progress, so the hub is
        informed that this is not a failure.
        """
        with self._changed:
            self._in_peace = in_peace and self._over is None
            if self._over is None:
                self._over = RetryableError("the publisher was closed")
                self._changed.notify_all()
        if self._thread.is_alive():
            self._call(self._stop.set)
            if self._thread is not threading.current_thread():
                self._thread.join()

    def _call(self, callback: Callable[[], object]) -> None:
        """Run a callback on the loop. Does nothing once the loop is closed: its thread is then about to exit, and
        closes the connection.
        """
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _raise_if_over(self) -> None:
        if self._over is not None:
            # A new exception each time, because several threads may raise it.
            raise type(self._over)(str(self._over))

    def _drop(self, serial: int) -> None:
        self._queue = deque(entry for entry in self._queue if _serial(entry[0]) != serial)
        self._queued_bytes = sum(nbytes for _, nbytes in self._queue)
        self._changed.notify_all()

    # -- on the loop

    def _run(self) -> None:
        """Run the loop. If the thread stops for any reason, or a callback fails, the connection closes, because callers
        may be waiting on it without a time limit.
        """
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                self._loop.set_exception_handler(self._failed)
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001 - the thread's result is never read
            self._failed(self._loop, {"message": "the publisher's thread failed", "exception": error})

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or (isinstance(error, OSError) and "transport" in context):
            loop.default_exception_handler(context)  # a broken connection: its protocol handles the error
            return
        logger.error("%s", context.get("message"), exc_info=error)
        self._end(
            LocalError(
                f"the publisher's connection failed with an internal error ({type(error).__name__}: {error});"
                " the log has the traceback"
            )
        )

    async def _main(self) -> None:
        try:
            link = await self._dialled()
        except P2PCastError as error:
            self._end(error)
            return
        loop = asyncio.get_running_loop()
        self._link, self._last_received_at = link, loop.time()
        self._pump()
        try:
            while not link.closed and not self._stop.is_set():
                if loop.time() - self._last_received_at > SILENCE_S:
                    self._end(RetryableError(f"the hub has been silent for {SILENCE_S:.0f} s"))
                    break
                link.send(messages.Ping(int(loop.time() * 1e6)))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - callers that wait get the error
            self._failed(loop, {"message": "the publisher's thread failed", "exception": error})
        finally:
            await self._close_link(link)

    async def _dialled(self) -> Link:
        """Dial, and retry while the hub restarts. Raises RefusedError or RetryableError."""
        backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, uniform)
        while True:
            try:
                tls = await self._badge.show(self._address, self._name)
                link = await self._dial(tls)
            except RetryableError as error:
                if self._unreachable is None:
                    logger.warning("%s; trying for another %.0f s", error, max(0.0, self._until - time.monotonic()))
                self._unreachable = error
                if self._stop.is_set() or time.monotonic() >= self._until:
                    raise
            else:
                self._unreachable = None
                return link
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_s()):
                    await self._stop.wait()

    async def _dial(self, tls: ssl.SSLContext | None) -> Link:
        identity = Identity(self._badge.node, self._name, self._badge.token)
        return await dial(self, *self._address, identity, purpose="publish", role="rank", tls=tls)

    async def _close_link(self, link: Link) -> None:
        """Close the link and wait until its socket is closed, because the loop closes next."""
        if link.closed:
            return
        stripe, closing = link.stripes[0], ClosingLink()
        stripe.owner = closing
        if self._in_peace:
            link.send(messages.Leave())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await closing.over.wait()
        link.abort()
        await closing.over.wait()

    def _pump(self) -> None:
        link = self._link
        if link is None or link.closed:
            return
        stripe = link.stripes[0]
        while stripe.writable:
            with self._changed:
                if not self._queue:
                    return
                record, nbytes = self._queue.popleft()
                self._queued_bytes -= nbytes
                self._changed.notify_all()
            link.send(record)

    def _end(self, error: P2PCastError | None) -> None:
        with self._changed:
            if self._over is None:
                kept = isinstance(error, RefusedError | RetryableError)
                self._over = (
                    error if kept else RetryableError(f"the connection to the hub is over: {error or 'it was closed'}")
                )
            self._queue.clear()
            self._queued_bytes = 0
            self._changed.notify_all()
        self._stop.set()

    # -- LinkOwner

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if not isinstance(event, Message):
            return
        if isinstance(event.body, messages.Ping):
            link.send(messages.Pong(event.body.t))
            return
        with self._changed:
            self.received.take(event)
            if isinstance(event.body, messages.Aborted):
                self._drop(event.body.serial)
            self._changed.notify_all()

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        self._last_received_at = asyncio.get_running_loop().time()

    def on_link_writable(self, link: Link, stripe: Stripe) -> None:
        self._pump()

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self._end(error)


class ClosingLink:
    """Owner of a stripe that is being closed: ignores its messages."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    def on_established(self, stripe: Stripe, event: Established) -> None: ...

    def on_event(self, stripe: Stripe, event: Event) -> None: ...

    def on_read(self, stripe: Stripe, payload_bytes: int) -> None: ...

    def on_writable(self, stripe: Stripe) -> None: ...

    def on_closed(self, stripe: Stripe, error: P2PCastError | None) -> None:
        self.over.set()
