"""A rank's connection at the hub, and the version that a group of ranks is sending.

Guarantees:

- A rank that does not read does not delay other ranks.
- A silent rank counts as dead.

Memory is bounded: the hub stops reading from ranks that are ahead of the slowest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from p2pcast.ground import limits
from p2pcast.ground.errors import P2PCastError, RetryableError
from p2pcast.transport.link import Link
from p2pcast.transport.stripe import Stripe
from p2pcast.wire import messages
from p2pcast.wire.connection import Event, Message
from p2pcast.wire.dispatch import Handlers, dispatch
from trainer_node.publish.rank_parts import Complete, RankGroup, RankParts, Terms

T = TypeVar("T")

PING_S = 5.0
SILENCE_S = 30.0
"""A rank that has been silent for this many seconds counts as dead. This is longer than for peers, because a trainer
may stall while it compiles or saves.
"""


class RankOwner(Protocol):
    def on_message(self, session: RankSession, message: Message) -> None:
        """Handle a message. If this raises P2PCastError, the rank's connection is closed."""

    def on_closed(self, session: RankSession, error: P2PCastError | None) -> None: ...
    def changed(self) -> None:
        """Called when the rank may be able to receive more."""


class RankSession:
    """A rank's connection; owns the link. ``group`` is set when its RANK arrives."""

    def __init__(self, link: Link, owner: RankOwner) -> None:
        self.link = link
        self.group: RankGroup | None = None
        self.rank = -1
        self.farewell = False
        """The rank sent LEAVE, so the end of its connection is not a failure."""
        self._owner = owner
        self._paused = False
        self._last_received_at = self._pinged_at = asyncio.get_running_loop().time()
        self._live: messages.Live | None = None
        self._handlers: Handlers = {
            messages.Ping: lambda body: link.send(messages.Pong(body.t)),
            messages.Pong: lambda body: None,
            messages.Leave: self._on_leave,
        }
        link.expect_first_message("RANK")

    def beat(self, now: float) -> None:
        if self._paused:
            # Silence counts only while the hub is reading from the rank.
            self._last_received_at = now
        elif now - self._last_received_at > SILENCE_S:
            self.link.abort(RetryableError(f"silent for {SILENCE_S:.0f} s"))
        elif now - self._pinged_at > PING_S:
            self._pinged_at = now
            self.link.send(messages.Ping(int(now * 1e6)))

    @property
    def paused(self) -> bool:
        """Whether the hub has stopped reading from this rank."""
        return self._paused

    def pause(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            if paused:
                self.link.pause_reading()
            else:
                self._last_received_at = asyncio.get_running_loop().time()
                self.link.resume_reading()

    def send_live(self, body: messages.Live) -> None:
        """Send LIVE if it is new to this rank and the rank is reading; otherwise it is sent later."""
        first = self.link.stripes.get(0)
        if body != self._live and first is not None and first.writable:
            self._live = body
            self.link.send(body)

    # -- LinkOwner

    def on_link_event(self, link: Link, stripe: Stripe, event: Event) -> None:
        if not isinstance(event, Message):
            return
        try:
            if not dispatch(self._handlers, event):
                self._owner.on_message(self, event)
        except P2PCastError as error:
            link.close(error)

    def _on_leave(self, body: messages.Leave) -> None:
        self.farewell = True
        self.link.close()

    def on_link_read(self, link: Link, payload_bytes: int) -> None:
        self._last_received_at = asyncio.get_running_loop().time()

    def on_link_writable(self, link: Link, stripe: Stripe) -> None:
        self._owner.changed()

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None:
        self._owner.on_closed(self, error)


class PendingVersion:
    """A version that all ranks of a group have begun. Once it is BEGUN, it is a ``delta_builder.Incoming``."""

    def __init__(self, group: RankGroup, terms: Terms, sessions: list[RankSession], document: bytes | None) -> None:
        self.group = group
        self.terms = terms
        self.sessions = sessions
        self.document = document
        self.parts: RankParts | None = None
        self.all_received = False
        """All parts have been received, so the version is published whatever happens to the ranks."""
        self.queued_bytes = 0
        """Bytes of payloads of complete cells that are not in the log yet."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.farewell: P2PCastError | None = None
        """Why the group is over, if it closed while the version was being sealed."""
        self._stopped = False
        """Whether the hub has stopped reading from some ranks."""
        self._progress = asyncio.Event()

    @property
    def open(self) -> bool:
        return self.parts is not None and not self.failure.done()

    def fail(self, error: P2PCastError) -> None:
        if not self.failure.done() and not self.all_received:
            self.failure.set_exception(error)
            self.failure.exception()  # marks it as retrieved, in case no task awaits it
            self._progress.set()

    def notify(self) -> None:
        self._progress.set()

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``, unless the version fails first; then raise its error."""
        task = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [task, self.failure]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.failure.result()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])

    # -- Incoming

    async def take(self) -> list[Complete]:
        assert self.parts is not None
        while True:
            if self.failure.done():
                self.failure.result()
            found = self.parts.take()
            if found:
                self.queued_bytes += sum(one.bytes for one in found)
                return found
            if self.parts.ended:
                self.all_received = True
                return []
            self._progress.clear()
            await self._progress.wait()

    def settled(self, nbytes: int) -> None:
        self.queued_bytes -= nbytes
        self.balance()

    @property
    def files(self) -> dict[str, bytes] | None:
        assert self.parts is not None
        return self.parts.files

    # -- memory

    def balance(self) -> None:
        """Read from the ranks that the others wait for, and from ranks that are ahead while there is memory. Read from
        no rank while the disk is behind.
        """
        if self.parts is None:
            return
        waiting = self.queued_bytes + self.parts.waiting_bytes
        if waiting > limits.PARTS_HIGH_BYTES:
            needed = set() if self.queued_bytes > limits.PARTS_HIGH_BYTES else set(self.parts.behind)
            for rank, session in enumerate(self.sessions):
                session.pause(rank not in needed)
            self._stopped = True
        elif self._stopped:
            self._stopped = waiting >= limits.PARTS_LOW_BYTES
            for rank in self.parts.behind if self._stopped else range(len(self.sessions)):
                self.sessions[rank].pause(False)

    def release(self) -> None:
        for session in self.sessions:
            session.pause(False)
