"""The one transition table of the wire protocol (docs/formats/wire-protocol.md, section 3)."""

from __future__ import annotations

from enum import Enum

from p2pcast.wire.messages import Type


class State(Enum):
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


Table = dict[tuple[State, Side, Type], State]

TRANSITIONS: Table = {
    (State.HELLO, Side.DIALER, Type.HELLO): State.CHALLENGE,
    (State.CHALLENGE, Side.LISTENER, Type.CHALLENGE): State.PROOF,
    (State.PROOF, Side.DIALER, Type.PROOF): State.READY,
    # The state after READY depends on the HELLO's purpose. Connection looks it up: this table knows no contents.
    (State.READY, Side.LISTENER, Type.READY): State.CONTROL,
    # Both sides have shown certificates, so no proof follows.
    (State.CHALLENGE, Side.LISTENER, Type.READY): State.CONTROL,
    (State.ENROL, Side.DIALER, Type.ENROL): State.ENROL,
    (State.ENROL, Side.LISTENER, Type.ISSUED): State.ENROL,
}
for _side in Side:
    for _state in State:
        if _state is not State.CLOSED:
            TRANSITIONS[_state, _side, Type.ERROR] = State.CLOSED
    for _state in (State.CONTROL, State.DATA, State.PUBLISH, State.ENGINE, State.ENROL):
        for _type in (Type.PING, Type.PONG):
            TRANSITIONS[_state, _side, _type] = _state
for _type in (Type.JOIN, Type.REPORT, Type.LEAVE, Type.CALL, Type.UNREACHED, Type.ENROL, Type.SEEK, Type.SQUASH):
    TRANSITIONS[State.CONTROL, Side.DIALER, _type] = State.CONTROL
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
    TRANSITIONS[State.CONTROL, Side.LISTENER, _type] = State.CONTROL
for _type in (Type.ATTACH, Type.WANT, Type.SPARE, Type.ASK, Type.RECALL, Type.EASE):
    TRANSITIONS[State.DATA, Side.DIALER, _type] = State.DATA
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
    TRANSITIONS[State.DATA, Side.LISTENER, _type] = State.DATA
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
    TRANSITIONS[State.PUBLISH, Side.DIALER, _type] = State.PUBLISH
for _type in (Type.RANKED, Type.LAYOUT, Type.BEGUN, Type.DURABLE, Type.ABORTED, Type.LIVE):
    TRANSITIONS[State.PUBLISH, Side.LISTENER, _type] = State.PUBLISH
for _type in (Type.MEMBER, Type.HELD, Type.REPORTED):
    TRANSITIONS[State.ENGINE, Side.DIALER, _type] = State.ENGINE
for _type in (Type.STILL, Type.SERVES):
    TRANSITIONS[State.ENGINE, Side.LISTENER, _type] = State.ENGINE
