"""One connection as a state machine: bytes in, events out; messages in, bytes out. No sockets, no clock, no randomness of its own.

Promises: a piece's payload is read straight into the buffer that carries it on (``get_buffer`` / ``received``, made for
``asyncio.BufferedProtocol``); nothing is allocated before its length was checked; whatever the state does not allow raises RemoteError, on the
receiving side before anybody sees it and on the sending side before a byte leaves.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from p2pcast.errors import P2PCastError, RefusedError, RemoteError
from p2pcast.wire import lenient, messages
from p2pcast.wire.handshake import PARENT as PARENT
from p2pcast.wire.handshake import Established as Established
from p2pcast.wire.handshake import Handshake
from p2pcast.wire.handshake import Identity as Identity
from p2pcast.wire.messages import MAX_BODY, SIGNED, Body, Type
from p2pcast.wire.state import TRANSITIONS, Side, State

HEADER = struct.Struct("<IHHI")
HEADER_BYTES = HEADER.size
SCRATCH_BYTES = 64 * 1024
"""What a connection costs that has not shown a token."""
ARENA_BYTES = 4 * (64 * 1024 + HEADER_BYTES)
"""A child's buffer: one read brings up to four pieces of 64 KiB, more of a small delta's, and their payloads stay where they came to lie."""

_TYPES = {int(t): t for t in Type}
MAX_PIECE = MAX_BODY[Type.PIECE]
_ESTABLISHED = {
    "control": State.CONTROL,
    "data": State.DATA,
    "publish": State.PUBLISH,
    "engine": State.ENGINE,
    "enrol": State.ENROL,
}


@dataclass(frozen=True, slots=True)
class Message:
    """A checked message; for signed records ``body`` is empty and ``signed`` the record."""

    type: Type
    body: Body
    handle: int = 0
    signed: bytes = b""
    odd: tuple[str, ...] = ()
    """Keys whose values made no sense and were taken out (``lenient``)."""
    size: int = field(default=0, compare=False)
    """Bytes of the body."""


@dataclass(slots=True)
class Piece:
    """A piece as it came; its hash has not been looked at. ``payload`` is ours alone."""

    handle: int
    index: int
    payload: memoryview


Event = Message | Piece | Established


class Connection:
    """One side of one connection.

    ``nonce`` is 32 fresh random bytes. A dialer gives ``hello`` ({purpose, role, link, stripe, stripes}) and, where it knows it, the node it
    expects. Bytes to send gather in ``take_output``.
    """

    def __init__(
        self,
        side: Side,
        identity: Identity,
        nonce: bytes,
        hello: Body | None = None,
        expect: bytes | None = None,
    ) -> None:
        self.side = side
        self.other = side.other
        self.state = State.HELLO
        self._output: list[bytes] = []
        self._handshake = Handshake(side, identity, nonce, hello, expect)
        self._buffer = memoryview(bytearray(SCRATCH_BYTES))
        self._start = self._end = 0
        """Bytes received and not yet taken."""
        self._need = HEADER_BYTES
        """Size of the frame at the start, as far as it is known."""
        self._shared = False
        """Payloads of this buffer are in other hands: its used part may not be written again."""
        self._last_piece = 0
        """Size of the last piece's frame: the next is likely to be like it."""
        self._paid = 0
        self._in_piece = False
        self.fault: P2PCastError | None = None
        """What ended it, once something has."""
        if side is Side.DIALER:
            self._put(*self._handshake.begin)

    @property
    def protocol(self) -> int | None:
        """What both sides have settled on: of later protocols each may hold more than this one does. None during the handshake."""
        return None if self._handshake.established is None else self._handshake.established.protocol

    def secured(self, theirs: bytes | None, *, proven: bool) -> None:
        """This connection is behind TLS: ``Handshake.secured``. Comes before any other byte. Raises RefusedError."""
        self._handshake.secured(theirs, proven=proven)

    # -- sending

    def take_output(self) -> bytes:
        """Handshake bytes (and an ERROR) that are waiting to be sent."""
        out = b"".join(self._output)
        self._output.clear()
        return out

    def send(self, kind: Type, body: Body, handle: int = 0) -> bytes:
        """The bytes of a message. Raises RemoteError where the state does not allow it."""
        return self._frame(kind, messages.encode(kind, body), handle)

    def send_signed(self, kind: Type, signed: bytes, handle: int) -> bytes:
        return self._frame(kind, signed, handle)

    def piece_header(self, handle: int, index: int, size: int) -> bytes:
        """The header of a piece; its payload follows as it is. On the hot path: checks the state alone."""
        if self.state is not State.DATA:
            raise RemoteError(f"PIECE is not for a connection that is {self.state.value}")
        return HEADER.pack(size, Type.PIECE, handle, index)

    def fail(self, error: P2PCastError) -> None:
        """Tell the other side why, and close."""
        if self.state is not State.CLOSED:
            self._put(
                Type.ERROR,
                messages.encode(Type.ERROR, {"code": error.wire_code, "message": _printable(error)}),
            )

    def _put(self, kind: Type, body: bytes) -> None:
        self._output.append(self._frame(kind, body, 0))

    def _frame(self, kind: Type, body: bytes, handle: int) -> bytes:
        if len(body) > MAX_BODY[kind]:
            raise RemoteError(f"{kind.name} of {len(body)} bytes is over the limit of {MAX_BODY[kind]}")
        self._move(self.side, kind)
        return HEADER.pack(len(body), kind, handle, 0) + body

    def _move(self, side: Side, kind: Type) -> None:
        state = TRANSITIONS.get((self.state, side, kind))
        if state is None:
            raise RemoteError(f"{kind.name} from the {side.value} is not for a connection that is {self.state.value}")
        if kind is Type.READY:
            if self.state is State.CHALLENGE and not self._handshake.needs_no_proof:
                raise RemoteError("READY before anything was proved")
            state = _ESTABLISHED[self._handshake.hello["purpose"]]
            if self._handshake.hello["role"] == PARENT:
                self.side, self.other = self.other, self.side
        self.state = state

    # -- receiving

    @property
    def payload_bytes(self) -> int:
        """Piece payload received so far, an unfinished piece included."""
        return self._paid + (max(0, self._end - self._start - HEADER_BYTES) if self._in_piece else 0)

    @property
    def missing_bytes(self) -> int:
        """Of the piece that has begun to come; 0 between frames."""
        return self._need - (self._end - self._start) if self._in_piece else 0

    def get_buffer(self) -> memoryview:
        """Where the next bytes go."""
        room = len(self._buffer)
        if self._start == self._end and not self._shared and room <= 2 * MAX_PIECE:
            self._start = self._end = 0
        elif self._start == self._end and room > 2 * MAX_PIECE:
            # A layout came through: its room is given back.
            self._shared = True
            self._renew()
            room = len(self._buffer)
        elif self._start + self._need > room:
            self._renew()
            room = len(self._buffer)
        # What would not fit behind this frame is left to the socket, but for its header: so hardly anything is ever copied into the next buffer.
        frame_end = self._start + self._need
        return self._buffer[self._end : room if frame_end + self._need <= room else max(frame_end + HEADER_BYTES, self._end + 1)]

    def _renew(self) -> None:
        """Room for the frame that has begun: in place, unless payloads of this buffer are in other hands."""
        begun = self._buffer[self._start : self._end]
        if self._shared or self._need > len(self._buffer):
            usual = ARENA_BYTES if self.state is State.DATA and self.side is Side.DIALER else SCRATCH_BYTES
            # Not zeroed: it is written before it is read.
            self._buffer = np.empty(max(usual, self._last_piece + HEADER_BYTES, self._need + HEADER_BYTES), np.uint8).data
            self._shared = False
        self._buffer[: len(begun)] = begun
        self._start, self._end = 0, len(begun)

    def release(self) -> None:
        """Nothing will come any more: give back the room for it."""
        self._buffer = memoryview(b"")
        self._start = self._end = 0

    def received(self, count: int) -> list[Event]:
        """``count`` bytes were put into the last buffer. Raises RemoteError or RefusedError; then the connection is over.

        What came before the error in the same bytes is not lost: it is returned, and the error is in ``fault``.
        """
        if self.fault is not None:
            raise self.fault
        events: list[Event] = []
        try:
            self._take(count, events)
        except P2PCastError as error:
            self.fault = error
            if not events:
                raise
        return events

    def _take(self, count: int, events: list[Event]) -> None:
        self._end += count
        self._in_piece = False
        while (have := self._end - self._start) >= HEADER_BYTES:
            size, number, handle, index = HEADER.unpack_from(self._buffer, self._start)
            if not (number == Type.PIECE and self.state is State.DATA and self.side is Side.DIALER and 0 < size <= MAX_PIECE):
                if not self._control(size, number, handle, have, events):
                    return
                continue
            self._need = HEADER_BYTES + size
            if have < self._need:
                self._in_piece = True
                return
            payload = self._buffer[self._start + HEADER_BYTES : self._start + self._need]
            events.append(Piece(handle, index, payload))
            self._shared = True
            self._paid += size
            self._start += self._need
            self._last_piece = self._need
        self._need = HEADER_BYTES

    def feed(self, data: bytes | memoryview) -> list[Event]:
        """``received`` for bytes that somebody else read; an error is raised whatever came before it."""
        events: list[Event] = []
        view = memoryview(data)
        while view:
            buffer = self.get_buffer()
            take = min(len(buffer), len(view))
            buffer[:take] = view[:take]
            events += self.received(take)
            if self.fault is not None:
                raise self.fault
            view = view[take:]
        return events

    def _control(self, size: int, number: int, handle: int, have: int, events: list[Event]) -> bool:
        """The frame at the start of the buffer, if it is whole; False when more bytes are needed. A piece that comes here is out of place."""
        kind = _TYPES.get(number)
        if kind is None:
            raise RemoteError(f"frame type {number} is unknown")
        if size > MAX_BODY[kind]:
            raise RemoteError(f"{kind.name} of {size} bytes is over the limit of {MAX_BODY[kind]}")
        if (self.state, self.other, kind) not in TRANSITIONS:
            raise RemoteError(f"{kind.name} from the {self.other.value} is not for a connection that is {self.state.value}")
        if kind is Type.PIECE:
            raise RemoteError("PIECE without payload")
        self._need = HEADER_BYTES + size
        if have < self._need:
            return False
        body = self._buffer[self._start + HEADER_BYTES : self._start + self._need]
        self._start += self._need
        self._need = HEADER_BYTES
        self._on_body(kind, handle, body, events)
        return True

    def _on_body(self, kind: Type, handle: int, body: memoryview, events: list[Event]) -> None:
        """``body`` is the buffer's own: what is kept of it is copied, a payload of 32 MiB no more than once."""
        if kind in SIGNED:
            self._move(self.other, kind)
            events.append(Message(kind, {}, handle, bytes(body)))
            return
        content = messages.unpacked(kind, body)
        if kind is Type.HELLO:
            self._handshake.greeted(content)
        messages.checked(kind, content)
        if kind is Type.ERROR:
            self._move(self.other, kind)
            if content["code"] == RefusedError.wire_code:
                raise self._handshake.refusal(content["message"])
            raise RemoteError(f"the other side says: {content['message']}")
        if kind in (Type.HELLO, Type.CHALLENGE, Type.PROOF, Type.READY):
            self._move(self.other, kind)
            if (answer := self._handshake.take(kind, content, bytes(body))) is not None:
                self._put(*answer)
            if self._handshake.established is not None:
                events.append(self._handshake.established)
            return
        odd = lenient.prune(kind, content)
        self._move(self.other, kind)
        events.append(Message(kind, content, handle, odd=odd, size=len(body)))


def _printable(error: P2PCastError) -> str:
    """Its message, short, and without what UTF-8 can't carry (undecodable bytes of a file name)."""
    return str(error)[:1000].encode("utf-8", "replace").decode()
