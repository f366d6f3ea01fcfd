"""The modules of names that tests of this folder compare and that no user imports.

When a module moves, this file alone is edited.
These modules are no interface: only the values are pinned.
"""

from __future__ import annotations

from p2pcast.artifact.signed_records import KINDS
from p2pcast.ground import errors
from p2pcast.trust import dial_permissions as roles
from p2pcast.trust.join_token import DIALER_LABEL, LISTENER_LABEL
from p2pcast.wire import messages
from p2pcast.wire.connection import HEADER
from p2pcast.wire.connection_state import TRANSITIONS, ConnectionState
from p2pcast.wire.protocol_versions import SPOKEN
from rollout_node.engine import callbacks

__all__ = [
    "CALLBACKS",
    "DIALER_LABEL",
    "HEADER",
    "KINDS",
    "LISTENER_LABEL",
    "SPOKEN",
    "TRANSITIONS",
    "ConnectionState",
    "errors",
    "message_keys",
    "messages",
    "roles",
]

CALLBACKS = callbacks._NAMES


def message_keys(kind: messages.Type, *, required: bool) -> list[str]:
    """Keys that a message of ``kind`` must have, or may leave out; none for a type without a record."""
    record = messages.RECORDS.get(kind)
    return [] if record is None else sorted(f.key for f in record.fields if f.required is required and not f.lenient)
