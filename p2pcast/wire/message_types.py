"""Message types by number, and the largest body of each (docs/formats/wire-protocol.md, sections 1, 2 and 4 to 7)."""

from __future__ import annotations

from enum import IntEnum

from p2pcast.ground import limits


class Type(IntEnum):
    __hash__ = (
        int.__hash__
    )  # implemented in C: every frame is looked up by its type, and Enum's own hash is a Python function

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    READY = 4
    ERROR = 5
    PING = 6
    PONG = 7

    JOIN = 16
    WELCOME = 17
    REPORT = 18
    PLAN = 19
    CATALOG = 20
    COMMIT = 21
    LEAVE = 22
    HOLD = 23
    NEIGHBOURS = 24
    ADDRESSES = 25
    CALL = 26
    CALLED = 27
    UNREACHABLE = 28
    ENROL = 29
    ISSUED = 30
    EVICTED = 31

    ATTACH = 32
    ATTACHED = 33
    PATH = 34
    WANT = 35
    OPEN = 36
    BATCH = 37
    SEAL = 38
    ABORT = 39
    PIECE = 40
    GONE = 41
    ALIVE = 42
    LAYOUT = 43
    SKIP = 44
    CONFIRM = 45

    RANK = 48
    RANKED = 49
    BEGIN = 50
    BEGUN = 51
    CELL = 52
    PASSED = 53
    FILE = 54
    DONE = 55
    DURABLE = 56
    ABORTED = 57
    LIVE = 58

    ENGINE = 64
    MEMBER = 65
    HELD = 66
    WORKER_REPORT = 67
    FREEZE = 68
    SERVING = 69

    REQUEST = 72
    HAVE = 73
    CANCEL = 74
    CANCELLED = 75
    SET_RATE = 76
    FIND_SOURCES = 77
    SOURCES = 78

    SQUASH = 80
    SQUASHING = 81


SIGNED = frozenset({Type.OPEN, Type.BATCH, Type.SEAL, Type.CONFIRM})
"""The body of these types is a signed record, sent exactly as its signer wrote it."""
PLAIN = frozenset({Type.LAYOUT, Type.CELL, Type.FILE, Type.WORKER_REPORT})
"""Bodies of these types may be megabytes long, so even empty containers would add up. So no value may be a map or an
array.
"""

MAX_BODY: dict[Type, int] = dict.fromkeys(Type, 64 * limits.KIB) | {
    Type.ERROR: 4 * limits.KIB,
    Type.HELLO: 4 * limits.KIB,
    Type.CHALLENGE: limits.MAX_CERTIFICATE_BYTES + limits.KIB,
    Type.ENROL: limits.MAX_CERTIFICATE_BYTES + limits.KIB,
    Type.ISSUED: limits.MAX_CERTIFICATE_BYTES + limits.KIB,
    Type.EVICTED: limits.MIB,
    Type.PROOF: limits.KIB,
    Type.READY: limits.KIB,
    Type.CATALOG: 4 * limits.MIB,
    Type.ATTACH: limits.MIB,
    Type.ATTACHED: limits.MIB,
    Type.WANT: limits.MIB,
    Type.REQUEST: limits.MIB,
    Type.HAVE: limits.MIB,
    Type.CANCEL: limits.MIB,
    Type.CANCELLED: limits.MIB,
    Type.OPEN: limits.MAX_SIGNED_BYTES,
    Type.BATCH: limits.MAX_SIGNED_BYTES,
    Type.SEAL: limits.MAX_MANIFEST_BYTES,
    Type.CONFIRM: limits.MAX_DURABLE_BYTES,
    Type.LAYOUT: limits.MAX_LAYOUT_BYTES + limits.KIB,
    Type.PIECE: limits.MAX_PIECE_BYTES,
    Type.CELL: limits.MAX_PART_BYTES + limits.KIB,
    Type.FILE: limits.MAX_SMALL_FILE_BYTES + 4 * limits.KIB,
    Type.LIVE: 4 * limits.MIB,
    Type.WORKER_REPORT: limits.MAX_INSTALL_REQUEST_BYTES + limits.KIB,
}
"""Most bytes of each type's body. A frame that claims more is rejected before anything is allocated."""
