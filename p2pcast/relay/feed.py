"""What to send next to a child. Pure: it knows numbers, never bytes.

Promises: a piece is handed out once to a child, on whichever stripe asks first (work-conserving); on every stripe the OPEN (behind the layout, where the child does not
know it) comes before all else of its artifact and a piece's BATCH before the piece, so each stripe can be read alone; live artifacts go before catch-up; SEAL goes out on
stripe 0 once nothing else is left. Of an artifact that the child pulls, the pieces go out that it has asked for and no others; its directory when that was asked
for. Source of the rules: docs/wire-protocol.md, section 5.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum

from p2pcast import limits
from p2pcast.errors import RemoteError, RetryableError
from p2pcast.relay.artifact import Artifact

MAX_HANDLE = 65535


class Do(Enum):
    LAYOUT = "layout"
    OPEN = "open"
    BATCH = "batch"
    PIECE = "piece"
    SEAL = "seal"
    CONFIRM = "confirm"


@dataclass(slots=True)
class Send:
    """One frame to send: ``index`` is a piece's number; ``signed`` the record of an OPEN, BATCH, SEAL or CONFIRM."""

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
    asked: bool = False
    """The child pulls it."""
    seal: bool = False
    """It has asked for the directory, and has not been sent it."""
    news: list[int] = field(default_factory=list)
    """Pieces that came in here and that a child which pulls has not been told of."""
    told_sealed: bool = False


class ChildFeeds:
    """All artifacts on their way to one child."""

    def __init__(self) -> None:
        self._feeds: dict[bytes, Feed] = {}
        self._next_handle = 1
        self.layouts: frozenset[bytes] = frozenset()
        """Those that the child knows without us."""
        self.apart = False
        """Pieces that were asked for keep off stripe 0, which is never held back."""
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
        feed = Feed(artifact, self._handle(), live, deque(artifact.held.lacking(have)), have)
        self._feeds[artifact.id] = feed
        return feed

    def _handle(self) -> int:
        if self._next_handle > MAX_HANDLE:
            raise RetryableError("this link has used up its handles; it must be made anew")
        self._next_handle += 1
        return self._next_handle - 1

    def get(self, artifact: bytes) -> Feed | None:
        return self._feeds.get(artifact)

    def ask(self, artifact: Artifact, pieces: Collection[int], *, seal: bool) -> list[int]:
        """The child pulls: send it these pieces. Those of them that are not held here are given back. Raises RetryableError, RemoteError."""
        feed = self._feeds.get(artifact.id)
        if feed is None:
            feed = self._feeds[artifact.id] = Feed(artifact, self._handle(), False, deque(), [], asked=True)
        elif not feed.asked:
            raise RemoteError("pieces were asked for of an artifact that is being sent whole")
        if len(feed.queue) + len(pieces) > limits.MAX_ASKED:
            raise RemoteError(f"more than {limits.MAX_ASKED} pieces were asked for at once")
        feed.seal = feed.seal or seal
        feed.queue.extend(index for index in pieces if index in artifact.held)
        return [index for index in pieces if index not in artifact.held]

    def recall(self, artifact: bytes, pieces: list[int]) -> list[int]:
        """The child asks somebody else for pieces within these ranges: those that it has asked for here and that have not gone out, ascending."""
        feed = self._feeds.get(artifact)
        if feed is None or not feed.asked:
            return []
        back = {index for index in feed.queue if bisect_right(pieces, index) % 2}
        feed.queue = deque(index for index in feed.queue if index not in back)
        return sorted(back)

    @property
    def pushing(self) -> bool:
        """Whether some of a live artifact is on its way to this child, or could be."""
        return any(feed.live and (feed.queue or feed.artifact.complete) for feed in self._feeds.values())

    @property
    def asked(self) -> bool:
        """Whether pieces that were asked for are in line."""
        return any(feed.asked and feed.queue for feed in self._feeds.values())

    def piece_held(self, artifact: Artifact, index: int) -> bool:
        """A piece was checked and may go on. True when this child waits for it."""
        feed = self._feeds.get(artifact.id)
        if feed is None or bisect_right(feed.have, index) % 2:
            return False
        if feed.asked:
            feed.news.append(index)
            return False
        feed.queue.append(index)
        return True

    @property
    def waiting(self) -> bool:
        """Whether pieces are in line."""
        return any(feed.queue for feed in self._feeds.values())

    @property
    def waiting_bytes(self) -> int:
        """Of the pieces in line."""
        return sum(len(feed.queue) * feed.artifact.open.piece for feed in self._feeds.values())

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
            if feed.asked:
                if out := self._directory(feed, stripe):
                    return out
                if not feed.queue or (self.apart and stripe == 0):
                    continue
            if stripe not in feed.opened and (feed.queue or stripe == 0):
                out += self._opening(feed, stripe)
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
                out += self._seal(feed)
                del self._feeds[artifact.id]
                return out
            if out:
                return out
        return []

    def _opening(self, feed: Feed, stripe: int) -> list[Send]:
        feed.opened.add(stripe)
        artifact, out = feed.artifact, []
        layout = artifact.open.layout
        if layout not in self.layouts and (stripe, layout) not in self._told:
            self._told.add((stripe, layout))
            out.append(Send(Do.LAYOUT, artifact, feed.handle))
        out.append(Send(Do.OPEN, artifact, feed.handle, signed=artifact.assembly.open_signed))
        return out

    def _directory(self, feed: Feed, stripe: int) -> list[Send]:
        """All that a child needs before it can ask for pieces, on stripe 0."""
        if not feed.seal or stripe or not feed.artifact.assembly.complete_directory:
            return []
        feed.seal = False
        return [*([] if stripe in feed.opened else self._opening(feed, stripe)), *self._seal(feed)]

    @staticmethod
    def _seal(feed: Feed) -> list[Send]:
        artifact, handle = feed.artifact, feed.handle
        manifest, durable = artifact.assembly.manifest_signed, artifact.assembly.durable_signed
        assert manifest is not None
        batches = (batch for batch in artifact.assembly.signed_batches() if batch not in feed.vouched)
        return [
            *(Send(Do.BATCH, artifact, handle, signed=batch) for batch in batches),
            Send(Do.SEAL, artifact, handle, signed=manifest),
            *([] if durable is None else [Send(Do.CONFIRM, artifact, handle, signed=durable)]),
        ]

    def _ordered(self) -> list[Feed]:
        if len(self._feeds) < 2:
            return list(self._feeds.values())
        return sorted(self._feeds.values(), key=lambda f: not f.live)
