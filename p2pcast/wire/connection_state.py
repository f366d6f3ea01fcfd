"""The one transition table of the wire protocol (docs/formats/wire-protocol.md, section 3)."""

from __future__ import annotations

from enum import Enum

from p2pcast.wire.messages import Type


class ConnectionState(Enum):
    HELLO = "waiting for HELLO"
    CHALLENGE = "waiting for CHALLENGE"
    PROOF = "waiting for PROOF"
    READY = "waiting for READY"
    CONTROL = "control"
    DATA = "data"
    PUBLISH = "publish"
    ENGINE = "engine"
    ENROL = "enrol"
    CLOSED = "closed"


class Side(Enum):
    """The sender of a frame. In the handshake DIALER connected and LISTENER accepted. Afterwards DIALER is the peer,
    child, rank or member, LISTENER the hub, parent or lead. A parent that dialled its child (role "parent") changes
    places with the child after READY.
    """

    DIALER = "dialer"
    LISTENER = "listener"

    @property
    def other(self) -> Side:
        return Side.LISTENER if self is Side.DIALER else Side.DIALER


Table = dict[tuple[ConnectionState, Side, Type], ConnectionState]

TRANSITIONS: Table = {
    (ConnectionState.HELLO, Side.DIALER, Type.HELLO): ConnectionState.CHALLENGE,
    (ConnectionState.CHALLENGE, Side.LISTENER, Type.CHALLENGE): ConnectionState.PROOF,
    (ConnectionState.PROOF, Side.DIALER, Type.PROOF): ConnectionState.READY,
    # The state after READY depends on the HELLO's purpose. Connection looks it up: this table knows no contents.
    (ConnectionState.READY, Side.LISTENER, Type.READY): ConnectionState.CONTROL,
    # Both sides have shown certificates, so no proof follows.
    (ConnectionState.CHALLENGE, Side.LISTENER, Type.READY): ConnectionState.CONTROL,
    (ConnectionState.ENROL, Side.DIALER, Type.ENROL): ConnectionState.ENROL,
    (ConnectionState.ENROL, Side.LISTENER, Type.ISSUED): ConnectionState.ENROL,
}
for _side in Side:
    for _state in ConnectionState:
        if _state is not ConnectionState.CLOSED:
            TRANSITIONS[_state, _side, Type.ERROR] = ConnectionState.CLOSED
    for _state in (
        ConnectionState.CONTROL,
        ConnectionState.DATA,
        ConnectionState.PUBLISH,
        ConnectionState.ENGINE,
        ConnectionState.ENROL,
    ):
        for _type in (Type.PING, Type.PONG):
            TRANSITIONS[_state, _side, _type] = _state
for _type in (Type.JOIN, Type.REPORT, Type.LEAVE, Type.CALL, Type.UNREACHED, Type.ENROL, Type.SEEK, Type.SQUASH):
    TRANSITIONS[ConnectionState.CONTROL, Side.DIALER, _type] = ConnectionState.CONTROL
for _type in (
    Type.WELCOME,
    Type.PLAN,
    Type.NEIGHBOURS,
    Type.WAYS,
    Type.CALLED,
    Type.SOURCES,
    Type.UNREACHED,
    Type.CATALOG,
    Type.COMMIT,
    Type.HOLD,
    Type.ENGINE,
    Type.ISSUED,
    Type.EVICTED,
    Type.SQUASHING,
):
    TRANSITIONS[ConnectionState.CONTROL, Side.LISTENER, _type] = ConnectionState.CONTROL
for _type in (Type.ATTACH, Type.WANT, Type.SPARE, Type.ASK, Type.RECALL, Type.EASE):
    TRANSITIONS[ConnectionState.DATA, Side.DIALER, _type] = ConnectionState.DATA
for _type in (
    Type.ATTACHED,
    Type.PATH,
    Type.LAYOUT,
    Type.OPEN,
    Type.BATCH,
    Type.PIECE,
    Type.SEAL,
    Type.CONFIRM,
    Type.ABORT,
    Type.GONE,
    Type.HAVE,
    Type.UNSENT,
    Type.ALIVE,
):
    TRANSITIONS[ConnectionState.DATA, Side.LISTENER, _type] = ConnectionState.DATA
for _type in (
    Type.RANK,
    Type.LAYOUT,
    Type.BEGIN,
    Type.CELL,
    Type.PASSED,
    Type.FILE,
    Type.DONE,
    Type.ABORTED,
    Type.LEAVE,
):
    TRANSITIONS[ConnectionState.PUBLISH, Side.DIALER, _type] = ConnectionState.PUBLISH
for _type in (Type.RANKED, Type.LAYOUT, Type.BEGUN, Type.DURABLE, Type.ABORTED, Type.LIVE):
    TRANSITIONS[ConnectionState.PUBLISH, Side.LISTENER, _type] = ConnectionState.PUBLISH
for _type in (Type.MEMBER, Type.HELD, Type.REPORTED):
    TRANSITIONS[ConnectionState.ENGINE, Side.DIALER, _type] = ConnectionState.ENGINE
for _type in (Type.STILL, Type.SERVES):
    TRANSITIONS[ConnectionState.ENGINE, Side.LISTENER, _type] = ConnectionState.ENGINE
