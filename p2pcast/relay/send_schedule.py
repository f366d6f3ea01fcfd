"""Chooses what to send next to a child (docs/formats/wire-protocol.md, section 5). Pure: handles piece numbers, not
payload.

Promises:
- Each piece is given to a child once, on the stripe that asks first (work-conserving).
- Each stripe can be read alone. There OPEN comes before all else of its artifact (the layout before it, if the child
  lacks it), and a piece's BATCH before the piece.
- Live artifacts are sent before others. SEAL is sent on stripe 0 after everything else.
- Of an artifact that it pulls, a child gets the pieces that it requested, and the directory if it requested that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError, RetryableError
from p2pcast.relay.verified_pieces import VerifiedPieces

MAX_HANDLE = 65535


class FrameKind(Enum):
    LAYOUT = "layout"
    OPEN = "open"
    BATCH = "batch"
    PIECE = "piece"
    SEAL = "seal"
    CONFIRM = "confirm"


@dataclass(slots=True)
class Send:
    """One frame to send: ``index`` is a piece's number; ``signed`` the record of an OPEN, BATCH, SEAL or CONFIRM."""

    kind: FrameKind
    artifact: VerifiedPieces
    handle: int
    index: int = 0
    signed: bytes = b""


@dataclass(slots=True)
class SendSchedule:
    """One artifact on its way to one child."""

    artifact: VerifiedPieces
    handle: int
    live: bool
    queue: deque[int]
    have: Sequence[int]
    """Ranges that the child has, which may include pieces that arrive here later."""
    opened: set[int] = field(default_factory=set)
    batches: set[tuple[int, bytes]] = field(default_factory=set)
    """(stripe, batch) pairs that were sent."""
    vouched: set[bytes] = field(default_factory=set)
    """Batches that were sent on any stripe."""
    asked: bool = False
    """The child pulls it."""
    seal: bool = False
    """The child has requested the directory, which has not been sent."""
    news: list[int] = field(default_factory=list)
    """Pieces that arrived here and have not been announced by HAVE yet; for a child that pulls."""
    announced_sealed: bool = False


class ChildSchedules:
    """All artifacts on their way to one child."""

    def __init__(self) -> None:
        self._schedules: dict[bytes, SendSchedule] = {}
        self._next_handle = 1
        self.layouts: frozenset[bytes] = frozenset()
        """Layouts that the child knew when it attached."""
        self.apart = False
        """Whether pulled pieces avoid stripe 0, which is then never paced."""
        self._sent_layouts: set[tuple[int, bytes]] = set()
        """(stripe, layout) pairs that were sent."""

    def __bool__(self) -> bool:
        return bool(self._schedules)

    def __iter__(self) -> Iterator[SendSchedule]:
        return iter(self._schedules.values())

    def add(self, artifact: VerifiedPieces, have: Sequence[int], *, live: bool) -> SendSchedule | None:
        """Begin to send ``artifact`` to a child that has the pieces ``have``. Returns None if it is being sent already.
        Raises RetryableError.
        """
        if artifact.id in self._schedules:
            return None
        schedule = SendSchedule(artifact, self._handle(), live, deque(artifact.held.lacking(have)), have)
        self._schedules[artifact.id] = schedule
        return schedule

    def _handle(self) -> int:
        if self._next_handle > MAX_HANDLE:
            raise RetryableError("this link has used up its handles; it must be made anew")
        self._next_handle += 1
        return self._next_handle - 1

    def get(self, artifact: bytes) -> SendSchedule | None:
        return self._schedules.get(artifact)

    def request(self, artifact: VerifiedPieces, pieces: Collection[int], *, seal: bool) -> list[int]:
        """The child pulls these pieces. Returns those of them that this node does not hold. Raises
        RetryableError, RemoteError.
        """
        schedule = self._schedules.get(artifact.id)
        if schedule is None:
            schedule = self._schedules[artifact.id] = SendSchedule(
                artifact, self._handle(), False, deque(), [], asked=True
            )
        elif not schedule.asked:
            raise RemoteError("pieces were asked for of an artifact that is being sent whole")
        if len(schedule.queue) + len(pieces) > limits.MAX_REQUESTED:
            raise RemoteError(f"more than {limits.MAX_REQUESTED} pieces were asked for at once")
        schedule.seal = schedule.seal or seal
        schedule.queue.extend(index for index in pieces if index in artifact.held)
        return [index for index in pieces if index not in artifact.held]

    def cancel(self, artifact: bytes, pieces: Sequence[int]) -> list[int]:
        """The child asks another source for pieces in these ranges. Returns those of them that it asked for here and
        that were not sent, ascending.
        """
        schedule = self._schedules.get(artifact)
        if schedule is None or not schedule.asked:
            return []
        back = {index for index in schedule.queue if bisect_right(pieces, index) % 2}
        schedule.queue = deque(index for index in schedule.queue if index not in back)
        return sorted(back)

    @property
    def pushing(self) -> bool:
        """Whether part of a live artifact is on its way to this child, or could be."""
        return any(
            schedule.live and (schedule.queue or schedule.artifact.complete) for schedule in self._schedules.values()
        )

    @property
    def asked(self) -> bool:
        """Whether pulled pieces are queued."""
        return any(schedule.asked and schedule.queue for schedule in self._schedules.values())

    def piece_held(self, artifact: VerifiedPieces, index: int) -> bool:
        """Note that a piece was verified, and return whether it was queued for this child."""
        schedule = self._schedules.get(artifact.id)
        if schedule is None or bisect_right(schedule.have, index) % 2:
            return False
        if schedule.asked:
            schedule.news.append(index)
            return False
        schedule.queue.append(index)
        return True

    @property
    def waiting(self) -> bool:
        """Whether any pieces are queued."""
        return any(schedule.queue for schedule in self._schedules.values())

    @property
    def waiting_bytes(self) -> int:
        """Bytes of all queued pieces."""
        return sum(len(schedule.queue) * schedule.artifact.open.piece for schedule in self._schedules.values())

    def drop(self, artifact: VerifiedPieces) -> SendSchedule | None:
        """Send nothing more of the artifact: it was aborted, or the child has it by now."""
        return self._schedules.pop(artifact.id, None)

    def put_back(self, send: Send) -> None:
        """Put a piece from ``next`` that could not be read yet back at the head of the queue."""
        self._schedules[send.artifact.id].queue.appendleft(send.index)

    def upcoming(self, most: int) -> list[Send]:
        """The pieces that ``next`` will give out soon, for reading ahead."""
        out: list[Send] = []
        for schedule in self._ordered():
            for index in schedule.queue:
                if len(out) == most:
                    return out
                out.append(Send(FrameKind.PIECE, schedule.artifact, schedule.handle, index))
        return out

    def next(self, stripe: int) -> list[Send]:
        """Return the frames that ``stripe`` should send now, ending with at most one piece; empty if there is nothing
        for it.
        """
        for schedule in self._ordered():
            out: list[Send] = []
            artifact, handle = schedule.artifact, schedule.handle
            if schedule.asked:
                if out := self._directory(schedule, stripe):
                    return out
                if not schedule.queue or (self.apart and stripe == 0):
                    continue
            if stripe not in schedule.opened and (schedule.queue or stripe == 0):
                out += self._opening(schedule, stripe)
            if schedule.queue:
                index = schedule.queue.popleft()
                batch = artifact.assembly.batch_for_piece(index)
                assert batch is not None, "a piece is held only once a batch has vouched for it"
                if (stripe, batch) not in schedule.batches:
                    schedule.batches.add((stripe, batch))
                    schedule.vouched.add(batch)
                    out.append(Send(FrameKind.BATCH, artifact, handle, signed=batch))
                out.append(Send(FrameKind.PIECE, artifact, handle, index))
                return out
            if stripe == 0 and artifact.complete:
                out += self._seal(schedule)
                del self._schedules[artifact.id]
                return out
            if out:
                return out
        return []

    def _opening(self, schedule: SendSchedule, stripe: int) -> list[Send]:
        schedule.opened.add(stripe)
        artifact, out = schedule.artifact, []
        layout = artifact.open.layout
        if layout not in self.layouts and (stripe, layout) not in self._sent_layouts:
            self._sent_layouts.add((stripe, layout))
            out.append(Send(FrameKind.LAYOUT, artifact, schedule.handle))
        out.append(Send(FrameKind.OPEN, artifact, schedule.handle, signed=artifact.assembly.open_signed))
        return out

    def _directory(self, schedule: SendSchedule, stripe: int) -> list[Send]:
        """The frames of the directory, which a child needs before it can ask for pieces. On stripe 0."""
        if not schedule.seal or stripe or not schedule.artifact.assembly.complete_directory:
            return []
        schedule.seal = False
        return [*([] if stripe in schedule.opened else self._opening(schedule, stripe)), *self._seal(schedule)]

    @staticmethod
    def _seal(schedule: SendSchedule) -> list[Send]:
        artifact, handle = schedule.artifact, schedule.handle
        manifest, durable = artifact.assembly.manifest_signed, artifact.assembly.durable_signed
        assert manifest is not None
        batches = (batch for batch in artifact.assembly.signed_batches() if batch not in schedule.vouched)
        return [
            *(Send(FrameKind.BATCH, artifact, handle, signed=batch) for batch in batches),
            Send(FrameKind.SEAL, artifact, handle, signed=manifest),
            *([] if durable is None else [Send(FrameKind.CONFIRM, artifact, handle, signed=durable)]),
        ]

    def _ordered(self) -> list[SendSchedule]:
        if len(self._schedules) < 2:
            return list(self._schedules.values())
        return sorted(self._schedules.values(), key=lambda f: not f.live)
