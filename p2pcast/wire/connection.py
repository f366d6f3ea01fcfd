"""One connection as a state machine: bytes in, events out; messages in, bytes out. It has no sockets, clock or
randomness of its own.

Guarantees: a piece's payload is read directly into the buffer that is passed on (``get_buffer`` / ``received``, made
for ``asyncio.BufferedProtocol``). Memory is allocated only for lengths that have been checked. A message that the state
does not allow raises RemoteError: at the receiver before it is handled, at the sender before a byte is sent.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np

from p2pcast.ground.errors import P2PCastError, RefusedError, RemoteError
from p2pcast.wire import messages, records
from p2pcast.wire.connection_state import TRANSITIONS, ConnectionState, Side
from p2pcast.wire.handshake import PARENT as PARENT
from p2pcast.wire.handshake import ConnectionRequest as ConnectionRequest
from p2pcast.wire.handshake import Established as Established
from p2pcast.wire.handshake import Greeting, Handshake
from p2pcast.wire.handshake import Identity as Identity
from p2pcast.wire.messages import MAX_BODY, NO_BODY, SIGNED, Record, Type

HEADER = struct.Struct("<IHHI")
HEADER_BYTES = HEADER.size
SCRATCH_BYTES = 64 * 1024
"""Size of the usual receive buffer; a child's is larger."""
ARENA_BYTES = 4 * (64 * 1024 + HEADER_BYTES)
"""Size of a child's receive buffer: one read takes up to four 64 KiB pieces. Payloads stay in it."""

_TYPES = {int(t): t for t in Type}
MAX_PIECE = MAX_BODY[Type.PIECE]
_ESTABLISHED = {
    "control": ConnectionState.CONTROL,
    "data": ConnectionState.DATA,
    "publish": ConnectionState.PUBLISH,
    "engine": ConnectionState.ENGINE,
    "enrol": ConnectionState.ENROL,
}


@dataclass(frozen=True, slots=True)
class Message:
    """A received message. A signed message has NO_BODY as ``body``, and its signed record in ``signed``."""

    type: Type
    body: Record
    handle: int = 0
    signed: bytes = b""
    invalid_keys: tuple[str, ...] = ()
    """Keys of lenient fields whose invalid values were dropped."""
    size: int = field(default=0, compare=False)
    """The body's size in bytes."""


@dataclass(slots=True)
class Piece:
    """A received piece, whose hash has not been checked yet. Nothing else refers to the memory of ``payload``."""

    handle: int
    index: int
    payload: memoryview


Event = Message | Piece | Established


class Connection:
    """One side of one connection.

    ``nonce``: 32 fresh random bytes. ``request``: the dialer's request; None for a listener. ``expect``: the node that
    the dialer expects to answer; None for any. ``take_output`` returns the bytes to send.
    """

    def __init__(
        self,
        side: Side,
        identity: Identity,
        nonce: bytes,
        request: ConnectionRequest | None = None,
        expect: bytes | None = None,
    ) -> None:
        self.side = side
        self.other = side.other
        self.state = ConnectionState.HELLO
        self._output: list[bytes] = []
        self._handshake = Handshake(side, identity, nonce, request, expect)
        self._buffer = memoryview(bytearray(SCRATCH_BYTES))
        self._start = self._end = 0
        """The span of received bytes that have not been parsed."""
        self._need = HEADER_BYTES
        """The size of the span's first frame, as far as its header is known."""
        self._shared = False
        """Pieces refer to this buffer, so its used part may not be written again."""
        self._last_piece = 0
        """The size of the last piece's frame; the next piece probably has the same size."""
        self._paid = 0
        self._in_piece = False
        self.fault: P2PCastError | None = None
        """The error that ended the connection."""
        if side is Side.DIALER:
            self._put(*self._handshake.begin)

    @property
    def protocol(self) -> int | None:
        """The protocol that both sides settled on; None during the handshake."""
        return None if self._handshake.established is None else self._handshake.established.protocol

    def secured(self, theirs: bytes | None, *, proven: bool) -> None:
        """Record that TLS is up, before any byte is received; see ``Handshake.secured``. Raises RefusedError."""
        self._handshake.secured(theirs, proven=proven)

    # -- sending

    def take_output(self) -> bytes:
        """Return the bytes of the handshake, or of an ERROR, that the caller has to send."""
        out = b"".join(self._output)
        self._output.clear()
        return out

    def send(self, record: Record, handle: int = 0) -> bytes:
        """Return a message's bytes. Raises RemoteError if the state does not allow the message."""
        return self._frame(record.type, messages.encode(record), handle)

    def send_signed(self, kind: Type, signed: bytes, handle: int) -> bytes:
        return self._frame(kind, signed, handle)

    def piece_header(self, handle: int, index: int, size: int) -> bytes:
        """Return a piece's header; the caller sends the payload after it. A hot path: only the state is checked."""
        if self.state is not ConnectionState.DATA:
            raise RemoteError(f"PIECE is not for a connection that is {self.state.value}")
        return HEADER.pack(size, Type.PIECE, handle, index)

    def fail(self, error: P2PCastError) -> None:
        """Queue an ERROR that gives the reason, and close the connection."""
        if self.state is not ConnectionState.CLOSED:
            self._put(Type.ERROR, messages.encode(messages.Error(error.wire_code, _printable(error))))

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
            if self.state is ConnectionState.CHALLENGE and not self._handshake.needs_no_proof:
                raise RemoteError("READY before anything was proved")
            state = _ESTABLISHED[self._handshake.hello.purpose]
            if self._handshake.hello.role == PARENT:
                self.side, self.other = self.other, self.side
        self.state = state

    # -- receiving

    @property
    def payload_bytes(self) -> int:
        """Bytes of piece payload received so far, including an unfinished piece."""
        return self._paid + (max(0, self._end - self._start - HEADER_BYTES) if self._in_piece else 0)

    @property
    def missing_bytes(self) -> int:
        """Bytes that are missing from an unfinished piece; 0 between frames."""
        return self._need - (self._end - self._start) if self._in_piece else 0

    def get_buffer(self) -> memoryview:
        """Return the memory into which the next bytes are received."""
        room = len(self._buffer)
        if self._start == self._end and not self._shared and room <= 2 * MAX_PIECE:
            self._start = self._end = 0
        elif self._start == self._end and room > 2 * MAX_PIECE:
            # A large message, such as a layout, has grown the buffer: free it.
            self._shared = True
            self._renew()
            room = len(self._buffer)
        elif self._start + self._need > room:
            self._renew()
            room = len(self._buffer)
        # If the next frame may not fit, read only this frame and the next header. The rest stays in the socket, and
        # hardly any byte is copied into the next buffer.
        frame_end = self._start + self._need
        return self._buffer[
            self._end : room if frame_end + self._need <= room else max(frame_end + HEADER_BYTES, self._end + 1)
        ]

    def _renew(self) -> None:
        """Make space for the unfinished frame: in place, or in a new buffer if pieces refer to this one."""
        begun = self._buffer[self._start : self._end]
        if self._shared or self._need > len(self._buffer):
            usual = ARENA_BYTES if self.state is ConnectionState.DATA and self.side is Side.DIALER else SCRATCH_BYTES
            # np.empty does not zero: every byte is written before it is read.
            self._buffer = np.empty(
                max(usual, self._last_piece + HEADER_BYTES, self._need + HEADER_BYTES), np.uint8
            ).data
            self._shared = False
        self._buffer[: len(begun)] = begun
        self._start, self._end = 0, len(begun)

    def release(self) -> None:
        """Free the receive buffer of a closed connection."""
        self._buffer = memoryview(b"")
        self._start = self._end = 0

    def received(self, count: int) -> list[Event]:
        """Parse ``count`` bytes that the caller has written to the last buffer. RemoteError and RefusedError end the
        connection.

        If events precede the error, they are returned, and ``fault`` is the error; otherwise the error is raised.
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
            if not (
                number == Type.PIECE
                and self.state is ConnectionState.DATA
                and self.side is Side.DIALER
                and 0 < size <= MAX_PIECE
            ):
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
        """Like ``received``, for bytes in the caller's memory. Raises every error, even if events precede it."""
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
        """Parse the first frame, which is not a valid piece. Returns False if more bytes are needed."""
        kind = _TYPES.get(number)
        if kind is None:
            raise RemoteError(f"frame type {number} is unknown")
        if size > MAX_BODY[kind]:
            raise RemoteError(f"{kind.name} of {size} bytes is over the limit of {MAX_BODY[kind]}")
        if (self.state, self.other, kind) not in TRANSITIONS:
            raise RemoteError(
                f"{kind.name} from the {self.other.value} is not for a connection that is {self.state.value}"
            )
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
        """Handle a frame. ``body`` is a view of the buffer; values are copied from it once, even 32 MiB payloads."""
        if kind in SIGNED:
            self._move(self.other, kind)
            events.append(Message(kind, NO_BODY, handle, bytes(body)))
            return
        content = records.unpacked(kind, body)
        if kind is Type.HELLO:
            self._handshake.greeted(content)
        record, invalid_keys = records.read(kind, content)
        self._move(self.other, kind)
        if isinstance(record, messages.Error):
            if record.code == RefusedError.wire_code:
                raise self._handshake.refusal(record.message)
            raise RemoteError(f"the other side says: {record.message}")
        if isinstance(record, Greeting):
            if (answer := self._handshake.take(record, bytes(body))) is not None:
                self._put(*answer)
            if self._handshake.established is not None:
                events.append(self._handshake.established)
            return
        events.append(Message(kind, record, handle, invalid_keys=invalid_keys, size=len(body)))


def _printable(error: P2PCastError) -> str:
    """Return the error's message, truncated, without characters that UTF-8 cannot encode (from file names)."""
    return str(error)[:1000].encode("utf-8", "replace").decode()
