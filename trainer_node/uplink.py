"""A rank's connection to the hub: a thread of its own, with an event loop, that other threads write to and wait on.

Promises: every wait ends: with what was waited for, with the time that was given, or when the connection is over; a connection on which nothing is heard for
SILENCE_S is over; at most QUEUE_BYTES wait to be sent, and whoever has more waits with it. What the hub says is kept in ``Heard``, which is pure.
Protocol: docs/wire-protocol.md, section 6.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from p2pcast import event_loop, limits
from p2pcast.errors import LocalError, P2PCastError, RefusedError, RetryableError
from p2pcast.transport.dial import dial
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.version import Version
from p2pcast.wire.connection import Established, Event, Identity, Message
from p2pcast.wire.messages import Body, Type
from trainer_node.badge import Badge

logger = logging.getLogger("p2pcast.publisher")

RETRY_MIN_S, RETRY_MAX_S = 0.2, 5.0
"""Before another try to reach the hub: half to one and a half times as long, doubled each time."""
QUEUE_BYTES = 64 * limits.MIB
"""Coded parts that may wait for the socket."""
BEAT_S = 5.0
"""Between two PINGs."""
LEAVE_S = 2.0
"""For the hub to close a connection that says goodbye."""
SILENCE_S = 30.0
"""The hub speaks every few seconds; after such a silence it is taken for dead."""

Found = TypeVar("Found")


@dataclass(slots=True)
class Begun:
    """``codec``: what the version goes out in, as far as the hub says."""

    version: Version
    base: Version | None
    codec: str = "auto"


@dataclass(slots=True)
class Durable:
    """``bytes`` of the artifact, ``changed`` words, ``params`` elements in the state."""

    version: Version
    bytes: int
    changed: int
    params: int


@dataclass(slots=True)
class Ranked:
    """The hub's newest version when all ranks were there: its layout's id and document, and the digest of its state."""

    head: Version | None
    layout: bytes | None
    document: bytes | None
    state: int | None


@dataclass(slots=True)
class Heard:
    """What the hub has said."""

    ranked: Ranked | None = None
    begun: dict[int, Begun] = field(default_factory=dict)
    durable: dict[int, Durable] = field(default_factory=dict)
    aborted: dict[int, str] = field(default_factory=dict)
    """Also of versions that this rank has not come to yet: another one gave up early."""
    engines: dict[str, tuple[Version | None, bool]] = field(default_factory=dict)
    """``peer/engine`` → the version it has committed, and whether it is ready."""
    _document: tuple[bytes, bytes] | None = None

    def take(self, message: Message) -> None:
        body = message.body
        if message.type is Type.LAYOUT:
            self._document = (body["layout"], body["document"])
        elif message.type is Type.RANKED:
            known = self._document is not None and self._document[0] == body["layout"]
            document = self._document[1] if known and self._document is not None else None
            self.ranked = Ranked(_version(body["head"]), body["layout"], document, body["state"])
        elif message.type is Type.BEGUN:
            self.begun = {body["serial"]: Begun(Version.of(body["version"]), _version(body["base"]), body.get("codec", "auto"))}
            self.aborted = {serial: reason for serial, reason in self.aborted.items() if serial >= body["serial"]}
        elif message.type is Type.DURABLE:
            done = Durable(Version.of(body["version"]), body["bytes"], body["changed"], body["params"])
            self.durable = {body["serial"]: done}
        elif message.type is Type.ABORTED:
            self.aborted[body["serial"]] = body["reason"]
        elif message.type is Type.LIVE:
            self.engines = {name: (_version(committed), ready) for name, committed, ready in body["engines"]}


def _version(pair: object) -> Version | None:
    return None if pair is None else Version.of(pair)


class Uplink:
    """One connection; made anew when it is over. Thread-safe."""

    def __init__(self, address: tuple[str, int], badge: Badge, name: str) -> None:
        self.heard = Heard()
        self._address = address
        self._badge = badge
        self._name = name[:128]
        self._changed = threading.Condition()
        """Guards all that follows, and is told of every change of it."""
        self._over: P2PCastError | None = None
        self._queue: deque[tuple[Type, Body, int]] = deque()
        self._queued_bytes = 0
        self._in_peace = False
        self._link: Link | None = None
        self._unreachable: RetryableError | None = None
        """Why the hub could not be dialled, while that is tried."""
        self._until = 0.0
        """When to stop trying, by ``time.monotonic``."""
        self._heard_at = 0.0
        self._loop = event_loop.new_event_loop()
        self._stop = asyncio.Event()
        # A daemon: a training process that forgot to close must be able to end.
        self._thread = threading.Thread(target=self._run, name="p2pcast uplink", daemon=True)

    # -- for other threads

    @property
    def over(self) -> bool:
        return self._over is not None

    def open(self, group: bytes, rank: int, ranks: int, timeout_s: float) -> Ranked:
        """Dial until the hub is there, say who we are, and wait until all ranks have. Raises RetryableError, RefusedError."""
        self._until = time.monotonic() + timeout_s
        self._queue.append((Type.RANK, {"group": group, "rank": rank, "ranks": ranks}, 0))
        self._thread.start()
        ranked = self.wait(lambda heard: heard.ranked, timeout_s)
        if ranked is None:
            unreachable = self._unreachable
            self.close()
            if unreachable is not None:
                raise RetryableError(f"{unreachable}; gave up after {timeout_s:g} s")
            raise RetryableError(f"not all {ranks} ranks of the trainer reached the hub within {timeout_s:.0f} s")
        return ranked

    def send(self, kind: Type, body: Body, nbytes: int = 0) -> None:
        """Queue a message; with ``nbytes`` of payload, wait for room. A serial that was aborted meanwhile is not sent. Raises what the connection ended with."""
        with self._changed:
            while (
                self._queued_bytes and self._queued_bytes + nbytes > QUEUE_BYTES and body.get("serial") not in self.heard.aborted
            ):
                self._raise_if_over()
                self._changed.wait()
            self._raise_if_over()
            self._queue.append((kind, body, nbytes))
            self._queued_bytes += nbytes
        self._loop.call_soon_threadsafe(self._pump)

    def wait(self, look: Callable[[Heard], Found | None], timeout_s: float | None = None) -> Found | None:
        """What ``look`` finds in what was heard, as soon as it finds something; None when the time is over. Raises what the connection ended with."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = look(self.heard)
                if found is not None:
                    return found
                self._raise_if_over()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def abandon(self, serial: int, reason: str) -> None:
        """Drop what is queued of ``serial`` and tell the hub that this rank will not go on with it. Without effect once the connection is over."""
        with self._changed:
            if self._over is not None:
                return
            self._drop(serial)
            self._queue.append((Type.ABORTED, {"serial": serial, "reason": reason[:1000]}, 0))
        self._loop.call_soon_threadsafe(self._pump)

    def close(self, *, in_peace: bool = False) -> None:
        """What is queued is lost. ``in_peace``: nothing is on its way, and the hub is told that this is no failure."""
        with self._changed:
            self._in_peace = in_peace and self._over is None
            if self._over is None:
                self._over = RetryableError("the publisher was closed")
                self._changed.notify_all()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            if self._thread is not threading.current_thread():
                self._thread.join()

    def _raise_if_over(self) -> None:
        if self._over is not None:
            # A new one each time: several threads may raise it.
            raise type(self._over)(str(self._over))

    def _drop(self, serial: int) -> None:
        self._queue = deque(entry for entry in self._queue if entry[1].get("serial") != serial)
        self._queued_bytes = sum(nbytes for _, _, nbytes in self._queue)
        self._changed.notify_all()

    # -- on the loop

    def _run(self) -> None:
        """Whatever ends this thread, or fails in a callback of its loop, ends the connection: callers wait for it with no limit."""
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                self._loop.set_exception_handler(self._failed)
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001 - nobody joins this thread for its result
            self._failed(self._loop, {"message": "the publisher's thread failed", "exception": error})

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or (isinstance(error, OSError) and "transport" in context):
            loop.default_exception_handler(context)  # a connection that broke: its protocol is told
            return
        logger.error("%s", context.get("message"), exc_info=error)
        self._end(
            LocalError(
                f"the publisher's connection failed with an internal error ({type(error).__name__}: {error}); the log has the traceback"
            )
        )

    async def _main(self) -> None:
        try:
            link = await self._dialled()
        except P2PCastError as error:
            self._end(error)
            return
        loop = asyncio.get_running_loop()
        self._link, self._heard_at = link, loop.time()
        self._pump()
        try:
            while not link.closed and not self._stop.is_set():
                if loop.time() - self._heard_at > SILENCE_S:
                    self._end(RetryableError(f"the hub has been silent for {SILENCE_S:.0f} s"))
                    break
                link.send(Type.PING, {"t": int(loop.time() * 1e6)})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            self._failed(loop, {"message": "the publisher's thread failed", "exception": error})
        finally:
            await self._part_from(link)

    async def _dialled(self) -> Link:
        """A hub that is being restarted is waited for. Raises RefusedError, RetryableError."""
        wait_s = RETRY_MIN_S
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
                async with asyncio.timeout(wait_s * random.uniform(0.5, 1.5)):
                    await self._stop.wait()
            wait_s = min(RETRY_MAX_S, wait_s * 2)

    async def _dial(self, tls: ssl.SSLContext | None) -> Link:
        identity = Identity(self._badge.node, self._name, self._badge.token)
        return await dial(self, *self._address, identity, purpose="publish", role="rank", tls=tls)

    async def _part_from(self, link: Link) -> None:
        """The loop ends behind this, and no socket may outlive it."""
        if link.closed:
            return
        stripe, parting = link.stripes[0], _Parting()
        stripe.owner = parting
        if self._in_peace:
            link.send(Type.LEAVE, {})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await parting.over.wait()
        link.abort()
        await parting.over.wait()

    def _pump(self) -> None:
        link = self._link
        if link is None or link.closed:
            return
        stripe = link.stripes[0]
        while stripe.writable:
            with self._changed:
                if not self._queue:
                    return
                kind, body, nbytes = self._queue.popleft()
                self._queued_bytes -= nbytes
                self._changed.notify_all()
            link.send(kind, body)

    def _end(self, error: P2PCastError | None) -> None:
        with self._changed:
            if self._over is None:
                kept = isinstance(error, RefusedError | RetryableError)
                self._over = error if kept else RetryableError(f"the connection to the hub is over: {error or 'it was closed'}")
            self._queue.clear()
            self._queued_bytes = 0
            self._changed.notify_all()
        self._stop.set()

    # -- LinkOwner

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if not isinstance(event, Message):
            return
        if event.type is Type.PING:
            link.send(Type.PONG, {"t": event.body["t"]})
            return
        with self._changed:
            self.heard.take(event)
            if event.type is Type.ABORTED:
                self._drop(event.body["serial"])
            self._changed.notify_all()

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        self._heard_at = asyncio.get_running_loop().time()

    def on_link_writable(self, link: Link, stripe: Stripe) -> None:
        self._pump()

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self._end(error)


class _Parting:
    """Owner of a stripe that is given up: what still comes is not looked at."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    def on_established(self, stripe: Stripe, event: Established) -> None: ...

    def on_event(self, stripe: Stripe, event: Event) -> None: ...

    def on_read(self, stripe: Stripe, payload_bytes: int) -> None: ...

    def on_writable(self, stripe: Stripe) -> None: ...

    def on_closed(self, stripe: Stripe, error: P2PCastError | None) -> None:
        self.over.set()
