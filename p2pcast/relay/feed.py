"""What to send next to a child. Pure: it knows numbers, never bytes.

Promises: a piece is handed out once to a child, on whichever stripe asks first (work-conserving); on every stripe the OPEN (behind the layout, where the child does not
know it) comes before all else of its artifact and a piece's BATCH before the piece, so each stripe can be read alone; live artifacts go before catch-up; SEAL goes out on
stripe 0 once nothing else is left. Source of the rules: docs/wire-protocol.md, section 5.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from p2pcast.errors import RetryableError
from p2pcast.relay.artifact import Artifact

MAX_HANDLE = 65535


class Do(Enum):
    LAYOUT = "layout"
    OPEN = "open"
    BATCH = "batch"
    PIECE = "piece"
    SEAL = "seal"


@dataclass(slots=True)
class Send:
    """One frame to send: ``index`` is a piece's number; ``signed`` the record of an OPEN, BATCH or SEAL."""

    what: Do
    artifact: Artifact
    handle: int
    index: int = 0
    signed: bytes = b""


@dataclass(slots=True)
class Feed:
    """One artifact on its way to one child."""

    artifact: Artifact
    handle: int
    live: bool
    queue: deque[int]
    have: list[int]
    """Ranges that the child said it holds: they count for pieces that come in here later, too."""
    opened: set[int] = field(default_factory=set)
    batches: set[tuple[int, bytes]] = field(default_factory=set)
    """(stripe, batch) pairs that went out."""
    vouched: set[bytes] = field(default_factory=set)
    """Batches that went out on some stripe."""


class ChildFeeds:
    """All artifacts on their way to one child."""

    def __init__(self) -> None:
        self._feeds: dict[bytes, Feed] = {}
        self._next_handle = 1
        self.layouts: frozenset[bytes] = frozenset()
        """Those that the child knows without us."""
        self._told: set[tuple[int, bytes]] = set()
        """(stripe, layout) pairs that went out."""

    def __bool__(self) -> bool:
        return bool(self._feeds)

    def __iter__(self) -> Iterator[Feed]:
        return iter(self._feeds.values())

    def add(self, artifact: Artifact, have: list[int], *, live: bool) -> Feed | None:
        """Begin to send ``artifact`` to a child that holds the pieces ``have``. None when it is on its way already. Raises RetryableError."""
        if artifact.id in self._feeds:
            return None
        if self._next_handle > MAX_HANDLE:
            raise RetryableError("this link has used up its handles; it must be made anew")
        feed = Feed(artifact, self._next_handle, live, deque(artifact.held.lacking(have)), have)
        self._next_handle += 1
        self._feeds[artifact.id] = feed
        return feed

    def piece_held(self, artifact: Artifact, index: int) -> bool:
        """A piece was checked and may go on. True when this child waits for it."""
        feed = self._feeds.get(artifact.id)
        if feed is None or bisect_right(feed.have, index) % 2:
            return False
        feed.queue.append(index)
        return True

    @property
    def waiting(self) -> bool:
        """Whether pieces are in line."""
        return any(feed.queue for feed in self._feeds.values())

    def drop(self, artifact: Artifact) -> Feed | None:
        """An artifact was aborted, or the child has it by now: nothing more of it goes out."""
        return self._feeds.pop(artifact.id, None)

    def put_back(self, send: Send) -> None:
        """A piece that ``next`` gave could not be read yet: it stays first in line."""
        self._feeds[send.artifact.id].queue.appendleft(send.index)

    def upcoming(self, most: int) -> list[Send]:
        """The pieces that ``next`` will give out soon, for reading ahead."""
        out: list[Send] = []
        for feed in self._ordered():
            for index in feed.queue:
                if len(out) == most:
                    return out
                out.append(Send(Do.PIECE, feed.artifact, feed.handle, index))
        return out

    def next(self, stripe: int) -> list[Send]:
        """The frames that ``stripe`` should send now, ending with at most one piece; empty when there is nothing for it."""
        for feed in self._ordered():
            out: list[Send] = []
            artifact, handle = feed.artifact, feed.handle
            if stripe not in feed.opened and (feed.queue or stripe == 0):
                feed.opened.add(stripe)
                layout = artifact.open.layout
                if layout not in self.layouts and (stripe, layout) not in self._told:
                    self._told.add((stripe, layout))
                    out.append(Send(Do.LAYOUT, artifact, handle))
                out.append(Send(Do.OPEN, artifact, handle, signed=artifact.assembly.open_signed))
            if feed.queue:
                index = feed.queue.popleft()
                batch = artifact.assembly.batch_for_piece(index)
                assert batch is not None, "a piece is held only once a batch has vouched for it"
                if (stripe, batch) not in feed.batches:
                    feed.batches.add((stripe, batch))
                    feed.vouched.add(batch)
                    out.append(Send(Do.BATCH, artifact, handle, signed=batch))
                out.append(Send(Do.PIECE, artifact, handle, index))
                return out
            if stripe == 0 and artifact.complete:
                out += [
                    Send(Do.BATCH, artifact, handle, signed=batch)
                    for batch in artifact.assembly.signed_batches()
                    if batch not in feed.vouched
                ]
                assert artifact.assembly.manifest_signed is not None
                out.append(Send(Do.SEAL, artifact, handle, signed=artifact.assembly.manifest_signed))
                del self._feeds[artifact.id]
                return out
            if out:
                return out
        return []

    def _ordered(self) -> list[Feed]:
        if len(self._feeds) < 2:
            return list(self._feeds.values())
        return sorted(self._feeds.values(), key=lambda f: not f.live)
