"""One connection as a state machine: bytes in, events out; messages in, bytes out. No sockets, no clock, no randomness of its own.

Promises: a piece's payload is read straight into the buffer that carries it on (``get_buffer`` / ``received``, made for
``asyncio.BufferedProtocol``); nothing is allocated before its length was checked; whatever the state does not allow raises RemoteError, on the
receiving side before anybody sees it and on the sending side before a byte leaves.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from p2pcast.errors import P2PCastError, RefusedError, RemoteError
from p2pcast.wire import messages
from p2pcast.wire.messages import MAX_BODY, PROTOCOL_VERSION, SIGNED, Body, Type
from p2pcast.wire.state import TRANSITIONS, Side, State
from p2pcast.wire.token import DIALER_LABEL, LISTENER_LABEL, Token

HEADER = struct.Struct("<IHHI")
HEADER_BYTES = HEADER.size
SCRATCH_BYTES = 64 * 1024

_TYPES = {int(t): t for t in Type}
MAX_PIECE = MAX_BODY[Type.PIECE]


@dataclass(frozen=True, slots=True)
class Message:
    """A checked message; for signed records ``body`` is empty and ``signed`` the record."""

    type: Type
    body: Body
    handle: int = 0
    signed: bytes = b""


@dataclass(slots=True)
class Piece:
    """A piece as it came; its hash has not been looked at. ``payload`` is ours alone."""

    handle: int
    index: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Established:
    """The handshake is done; ``hello`` is the dialer's HELLO, ``remote`` the other side's node."""

    hello: Body
    remote: bytes


Event = Message | Piece | Established


@dataclass(frozen=True, slots=True)
class Identity:
    """Who we are in handshakes."""

    node: bytes
    name: str
    token: Token


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
        self._identity = identity
        self._nonce = nonce
        self._expect = expect
        self._output: list[bytes] = []
        self._hello_raw = b""
        self._hello: Body = {}
        self._remote = b""
        self._challenge: Body = {}
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = self._end = 0
        self._large: bytearray | None = None  # a control body too long for scratch
        self._piece: memoryview | None = None  # payload being read, with room for the next header
        self._filled = 0
        self._body_bytes = 0
        self._handle = self._index = 0
        self._type = Type.PIECE
        self.payload_bytes = 0
        """Piece payload received so far, unfinished pieces included."""
        if side is Side.DIALER:
            if hello is None:
                raise ValueError("a dialer needs a hello")
            self._hello = {
                "v": PROTOCOL_VERSION,
                "run": identity.token.run,
                "node": identity.node,
                "name": identity.name,
                "nonce": nonce,
                "token": identity.token.ident,
                **hello,
            }
            self._hello_raw = messages.encode(Type.HELLO, self._hello)
            self._put(Type.HELLO, self._hello_raw)

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
        if kind is Type.READY and self._hello["purpose"] == "data":
            state = State.DATA
        self.state = state

    # -- receiving

    def get_buffer(self) -> memoryview:
        """Where the next bytes go."""
        if self._piece is not None:
            return self._piece[self._filled :]
        if self._large is not None:
            return memoryview(self._large)[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end > SCRATCH_BYTES // 2:
            left = self._end - self._start
            self._scratch[:left] = self._scratch[self._start : self._end]
            self._start, self._end = 0, left
        return self._view[self._end :]

    def received(self, count: int) -> list[Event]:
        """``count`` bytes were put into the last buffer. Raises RemoteError or RefusedError; then the connection is over."""
        events: list[Event] = []
        if self._piece is not None:
            self._fill_piece(count, events)
        elif self._large is not None:
            self._filled += count
            if self._filled == self._body_bytes:
                body, self._large = bytes(self._large), None
                self._on_body(body, events)
        else:
            self._end += count
        while self._piece is None and self._large is None and self._end - self._start >= HEADER_BYTES:
            if not self._next_frame(events):
                break
        return events

    def feed(self, data: bytes | memoryview) -> list[Event]:
        """``received`` for bytes that somebody else read."""
        events: list[Event] = []
        view = memoryview(data)
        while view:
            buffer = self.get_buffer()
            take = min(len(buffer), len(view))
            buffer[:take] = view[:take]
            events += self.received(take)
            view = view[take:]
        return events

    def _next_frame(self, events: list[Event]) -> bool:
        """Begin or finish the frame at the start of scratch; False when more bytes are needed."""
        size, number, handle, index = HEADER.unpack_from(self._scratch, self._start)
        if number == Type.PIECE and self.state is State.DATA and self.side is Side.DIALER and 0 < size <= MAX_PIECE:
            # The hot path; a piece that fails here is turned away with its reason below.
            self._start += HEADER_BYTES
            self._type, self._handle, self._index, self._body_bytes = Type.PIECE, handle, index, size
            take = min(self._end - self._start, size)
            piece = self._piece = np.empty(size + HEADER_BYTES, np.uint8).data
            self._filled = 0
            if take:
                piece[:take] = self._view[self._start : self._start + take]
                self._start += take
                self._fill_piece(take, events)
            return self._piece is None
        kind = _TYPES.get(number)
        if kind is None:
            raise RemoteError(f"frame type {number} is unknown")
        if size > MAX_BODY[kind]:
            raise RemoteError(f"{kind.name} of {size} bytes is over the limit of {MAX_BODY[kind]}")
        if (self.state, self.other, kind) not in TRANSITIONS:
            raise RemoteError(f"{kind.name} from the {self.other.value} is not for a connection that is {self.state.value}")
        have = self._end - self._start - HEADER_BYTES
        self._type, self._handle, self._index, self._body_bytes = kind, handle, index, size
        if kind is Type.PIECE:
            raise RemoteError("PIECE without payload")
        if have >= size:
            self._start += HEADER_BYTES
            body = bytes(self._view[self._start : self._start + size])
            self._start += size
            self._on_body(body, events)
            return True
        if HEADER_BYTES + size > SCRATCH_BYTES // 2:
            self._large = bytearray(size)
            self._start += HEADER_BYTES
            self._large[:have] = self._view[self._start : self._end]
            self._start = self._end = 0
            self._filled = have
        return False

    def _fill_piece(self, count: int, events: list[Event]) -> None:
        # A piece's buffer has room for the header that follows: in steady state one read brings a payload and the next header.
        piece, size = self._piece, self._body_bytes
        assert piece is not None
        before = min(self._filled, size)
        self._filled += count
        self.payload_bytes += min(self._filled, size) - before
        if self._filled < size:
            return
        events.append(Piece(self._handle, self._index, piece[:size]))
        rest = self._filled - size
        self._piece = None
        if rest:
            # A socket filled the piece, so scratch was empty: the beginning of the next header is all there is.
            self._view[:rest] = piece[size : size + rest]
            self._start, self._end = 0, rest

    def _on_body(self, body: bytes, events: list[Event]) -> None:
        kind = self._type
        if kind in SIGNED:
            self._move(self.other, kind)
            events.append(Message(kind, {}, self._handle, body))
            return
        content = messages.decode(kind, body)
        if kind is Type.ERROR:
            self._move(self.other, kind)
            error: type[P2PCastError] = RefusedError if content["code"] == RefusedError.wire_code else RemoteError
            raise error(f"the other side says: {content['message']}")
        if kind in (Type.HELLO, Type.CHALLENGE, Type.PROOF, Type.READY):
            self._handshake(kind, content, body, events)
            return
        self._move(self.other, kind)
        events.append(Message(kind, content, self._handle))

    # -- handshake

    def _handshake(self, kind: Type, content: Body, body: bytes, events: list[Event]) -> None:
        token = self._identity.token
        self._move(self.other, kind)
        if kind in (Type.HELLO, Type.CHALLENGE):
            if content["v"] != PROTOCOL_VERSION:
                raise RefusedError(
                    f"this side speaks protocol {PROTOCOL_VERSION}, the other {content['v']}: use one release of p2pcast"
                )
            if content["run"] != token.run:
                raise RefusedError("that token belongs to another run: take the one that this hub wrote")
        if kind is Type.HELLO:
            if content["token"] != token.ident:
                raise RefusedError("the token is not one that this hub gave out")
            self._hello, self._hello_raw, self._remote = content, body, content["node"]
            proof = token.proof(LISTENER_LABEL, body, self._nonce, self._identity.node)
            answer: dict[str, Any] = {
                "v": PROTOCOL_VERSION,
                "run": token.run,
                "node": self._identity.node,
                "nonce": self._nonce,
                "proof": proof,
            }
            self._challenge = answer
            self._put(Type.CHALLENGE, messages.encode(Type.CHALLENGE, answer))
        elif kind is Type.CHALLENGE:
            expected = token.proof(LISTENER_LABEL, self._hello_raw, content["nonce"], content["node"])
            if not hmac.compare_digest(expected, content["proof"]):
                raise RefusedError("the other side does not know this run's token")
            if self._expect is not None and content["node"] != self._expect:
                raise RefusedError("another node answers at this address")
            self._remote = content["node"]
            proof = token.proof(DIALER_LABEL, self._hello_raw, content["nonce"], content["node"])
            self._put(Type.PROOF, messages.encode(Type.PROOF, {"proof": proof}))
        elif kind is Type.PROOF:
            expected = token.proof(DIALER_LABEL, self._hello_raw, self._nonce, self._identity.node)
            if not hmac.compare_digest(expected, content["proof"]):
                raise RefusedError("the token's proof is wrong")
            self._put(Type.READY, messages.encode(Type.READY, {}))
            events.append(Established(self._hello, self._remote))
        else:
            events.append(Established(self._hello, self._remote))


def _printable(error: P2PCastError) -> str:
    """Its message, short, and without what UTF-8 can't carry (undecodable bytes of a file name)."""
    return str(error)[:1000].encode("utf-8", "replace").decode()
