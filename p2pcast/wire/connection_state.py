"""The one transition table of the wire protocol (docs/formats/wire-protocol.md, section 3)."""

from __future__ import annotations

from enum import Enum
from typing import Final

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
    """The sender of a frame. In the handshake, DIALER is the node that connected and LISTENER the one that accepted.
    Afterwards, DIALER is the peer, child, rank or member, and LISTENER the hub, parent or lead. A parent that dialled
    its child (role "parent") swaps sides with the child after READY.
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
    # Both sides have presented certificates, so no proof follows.
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
_SENDS: Final = {
    (ConnectionState.CONTROL, Side.DIALER): "JOIN REPORT LEAVE CALL UNREACHABLE ENROL FIND_SOURCES SQUASH",
    (
        ConnectionState.CONTROL,
        Side.LISTENER,
    ): "WELCOME PLAN NEIGHBOURS ADDRESSES CALLED SOURCES UNREACHABLE CATALOG COMMIT"
    " HOLD ENGINE ISSUED EVICTED SQUASHING",
    (ConnectionState.DATA, Side.DIALER): "ATTACH WANT SKIP REQUEST CANCEL SET_RATE",
    (
        ConnectionState.DATA,
        Side.LISTENER,
    ): "ATTACHED PATH LAYOUT OPEN BATCH PIECE SEAL CONFIRM ABORT GONE HAVE CANCELLED ALIVE",
    (ConnectionState.PUBLISH, Side.DIALER): "RANK LAYOUT BEGIN CELL PASSED FILE DONE ABORTED LEAVE",
    (ConnectionState.PUBLISH, Side.LISTENER): "RANKED LAYOUT BEGUN DURABLE ABORTED LIVE",
    (ConnectionState.ENGINE, Side.DIALER): "MEMBER HELD WORKER_REPORT",
    (ConnectionState.ENGINE, Side.LISTENER): "FREEZE SERVING",
}
"""Messages that leave the connection in its state."""
for (_state, _side), _names in _SENDS.items():
    for _name in _names.split():
        TRANSITIONS[_state, _side, Type[_name]] = _state
