"""Message types, and what each must look like.

A schema says which keys a message must have and what each value must be (``SINCE``: which it may have); what it does not name is ignored. Nothing past
``decode`` needs to check a type again, and what ``lenient`` reads of a REPORT needs no check either. Specification: docs/wire-protocol.md, sections 1, 2 and 4 to 7.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from itertools import pairwise
from typing import Any

import msgpack

from p2pcast import limits
from p2pcast.addresses import is_host
from p2pcast.errors import RemoteError
from p2pcast.wire.versions import MAX_PROTOCOL

Body = dict[str, Any]
Check = Callable[[Any], bool]


class Type(IntEnum):
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
    WAYS = 25
    CALL = 26
    CALLED = 27
    UNREACHED = 28
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
    SPARE = 44
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
    REPORTED = 67
    STILL = 68
    SERVES = 69

    ASK = 72
    HAVE = 73
    RECALL = 74
    UNSENT = 75
    EASE = 76
    SEEK = 77
    SOURCES = 78

    SQUASH = 80
    SQUASHING = 81


SIGNED = frozenset({Type.OPEN, Type.BATCH, Type.SEAL, Type.CONFIRM})
"""Their body is a signed record, carried as it was made."""
PLAIN = frozenset({Type.LAYOUT, Type.CELL, Type.FILE, Type.REPORTED})
"""They may be so long that even empty containers would add up: their values are plain, no map and no array."""

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
    Type.ASK: limits.MIB,
    Type.HAVE: limits.MIB,
    Type.RECALL: limits.MIB,
    Type.UNSENT: limits.MIB,
    Type.OPEN: limits.MAX_SIGNED_BYTES,
    Type.BATCH: limits.MAX_SIGNED_BYTES,
    Type.SEAL: limits.MAX_MANIFEST_BYTES,
    Type.CONFIRM: limits.MAX_DURABLE_BYTES,
    Type.LAYOUT: limits.MAX_LAYOUT_BYTES + limits.KIB,
    Type.PIECE: limits.MAX_PIECE_BYTES,
    Type.CELL: limits.MAX_PART_BYTES + limits.KIB,
    Type.FILE: limits.MAX_SMALL_FILE_BYTES + 4 * limits.KIB,
    Type.LIVE: 4 * limits.MIB,
    Type.REPORTED: limits.MAX_INSTALL_REQUEST_BYTES + limits.KIB,
}


def integer(low: int, high: int) -> Check:
    return lambda x: type(x) is int and low <= x <= high


def binary(size: int) -> Check:
    return lambda x: type(x) is bytes and len(x) == size


def blob(most: int) -> Check:
    return lambda x: type(x) is bytes and len(x) <= most


def text(most: int) -> Check:
    return lambda x: type(x) is str and len(x) <= most


def one_of(*values: str) -> Check:
    return lambda x: type(x) is str and x in values


def optional(check: Check) -> Check:
    return lambda x: x is None or check(x)


def row(check: Check, most: int) -> Check:
    return lambda x: type(x) is list and len(x) <= most and all(check(e) for e in x)


def fields(*checks: Check) -> Check:
    return lambda x: type(x) is list and len(x) == len(checks) and all(c(e) for c, e in zip(checks, x, strict=True))


def ranges(x: Any) -> bool:
    """``[from, to, from, to, …]``, ascending, non-empty, not touching."""
    if type(x) is not list or len(x) % 2 or len(x) > limits.MAX_RANGES or not all(type(e) is int for e in x):
        return False
    return not x or (x[0] >= 0 and x[-1] <= limits.MAX_PIECES and all(a < b for a, b in pairwise(x)))


node = binary(16)
artifact = binary(16)
digest = integer(0, (1 << 64) - 1)
version = fields(integer(0, limits.MAX_BRANCH), integer(0, limits.MAX_STEP))
epoch = fields(integer(0, 1 << 62), integer(0, 1 << 62))
host: Check = lambda x: type(x) is str and is_host(x)  # noqa: E731
port = integer(0, 65535)
kind = one_of("delta", "anchor")
flag: Check = lambda x: type(x) is bool  # noqa: E731
path = row(node, limits.MAX_PEERS)
serial = integer(0, limits.MAX_STEP)
cell = integer(0, limits.MAX_STATE_BYTES)
engine = text(limits.MAX_SPAN_NAME)
ways = row(fields(host, port), limits.MAX_WAYS)
protocol = integer(0, MAX_PROTOCOL)

SCHEMA: dict[Type, dict[str, Check]] = {
    Type.HELLO: {
        "v": protocol,
        "run": binary(16),
        "node": node,
        "name": text(128),
        "nonce": binary(32),
        "token": binary(8),
        "purpose": one_of("control", "data", "publish", "engine", "enrol"),
        "role": one_of("peer", "child", "parent", "rank", "member", "trainer"),
        "link": binary(16),
        "stripe": integer(0, limits.MAX_STRIPES - 1),
        "stripes": integer(1, limits.MAX_STRIPES),
    },
    Type.CHALLENGE: {
        "v": protocol,
        "run": binary(16),
        "node": node,
        "nonce": binary(32),
        "proof": binary(32),
    },
    Type.PROOF: {"proof": binary(32)},
    Type.READY: {},
    Type.ERROR: {"code": text(32), "message": text(1024)},
    Type.PING: {"t": integer(0, (1 << 63) - 1)},
    Type.PONG: {"t": integer(0, (1 << 63) - 1)},
    Type.JOIN: {
        "name": text(128),
        "region": text(128),
        "listen": fields(host, port),
        "held": optional(version),
        "engine": optional(fields(engine, one_of("lead", "member"))),
    },
    Type.WELCOME: {
        "key": binary(32),
        "epoch": epoch,
        "commit": one_of("auto", "manual", "barrier"),
        "target": optional(version),
        "host": host,
    },
    Type.REPORT: {"parent": optional(node), "staged": optional(version), "committed": optional(version)},
    Type.PLAN: {
        "epoch": epoch,
        "parent": optional(node),
        "host": host,
        "port": port,
        "backups": row(fields(node, host, port), limits.MAX_PEERS),
    },
    Type.ENROL: {"request": blob(limits.MAX_CERTIFICATE_BYTES)},
    Type.ISSUED: {"certificate": blob(limits.MAX_CERTIFICATE_BYTES)},
    Type.EVICTED: {"nodes": row(node, limits.MAX_EVICTED)},
    Type.NEIGHBOURS: {"peers": row(fields(node, host, port), limits.MAX_PEERS)},
    Type.WAYS: {"peers": row(fields(node, flag, ways), limits.MAX_PEERS)},
    Type.CALL: {"node": node, "stripes": integer(1, limits.MAX_STRIPES)},
    Type.CALLED: {"node": node, "stripes": integer(1, limits.MAX_STRIPES), "ways": ways},
    Type.UNREACHED: {"node": node},
    Type.SEEK: {"artifact": artifact, "without": row(node, limits.MAX_SOURCES)},
    Type.SOURCES: {"artifact": artifact, "peers": row(fields(node, host, port), limits.MAX_SOURCES)},
    Type.SQUASH: {"base": version},
    Type.SQUASHING: {
        "base": version,
        "version": optional(version),
        "bytes": integer(0, limits.MAX_STATE_BYTES),
        "wait_us": integer(0, (1 << 63) - 1),
    },
    Type.CATALOG: {
        "artifacts": row(
            fields(
                artifact,
                kind,
                optional(version),
                version,
                integer(0, limits.MAX_STATE_BYTES),
                binary(32),
                digest,
                flag,
                optional(binary(32)),
                blob(limits.MAX_DURABLE_BYTES),
            ),
            limits.MAX_CATALOG,
        ),
        "dropped": row(artifact, limits.MAX_CATALOG),
    },
    Type.COMMIT: {"version": version},
    Type.HOLD: {"version": version},
    Type.LEAVE: {},
    Type.LAYOUT: {"layout": binary(32), "document": lambda x: type(x) is bytes},
    Type.ATTACH: {
        "live": flag,
        "layouts": row(binary(32), limits.MAX_LAYOUTS),
        "want": row(fields(artifact, ranges), limits.MAX_CATALOG),
    },
    Type.ATTACHED: {
        "path": path,
        "artifacts": row(fields(artifact, kind, optional(version), version, flag), limits.MAX_CATALOG),
    },
    Type.PATH: {"path": path},
    Type.WANT: {"artifact": artifact, "have": ranges},
    Type.ASK: {"artifact": artifact, "pieces": ranges, "seal": flag},
    Type.HAVE: {"artifact": artifact, "pieces": ranges, "sealed": flag},
    Type.RECALL: {"artifact": artifact, "pieces": ranges},
    Type.UNSENT: {"artifact": artifact, "pieces": ranges},
    Type.EASE: {"bytes_s": optional(integer(1, limits.MAX_STATE_BYTES))},
    Type.ABORT: {},
    Type.GONE: {"artifact": artifact},
    Type.SPARE: {"artifact": artifact},
    Type.ALIVE: {
        "high": row(fields(integer(0, 65535), integer(0, limits.MAX_PIECES)), limits.MAX_CATALOG),
    },
    Type.RANK: {
        "group": binary(16),
        "rank": integer(0, limits.MAX_RANKS - 1),
        "ranks": integer(1, limits.MAX_RANKS),
    },
    Type.RANKED: {"head": optional(version), "layout": optional(binary(32)), "state": optional(digest)},
    Type.BEGIN: {"serial": serial, "step": integer(0, limits.MAX_STEP), "layout": binary(32), "resume": flag},
    Type.BEGUN: {"serial": serial, "version": version, "base": optional(version)},
    Type.CELL: {
        "serial": serial,
        "cell": cell,
        "start": integer(0, limits.MAX_CELL_WORDS - 1),
        "words": integer(1, limits.MAX_CELL_WORDS),
        "codec": integer(1, 255),
        "before": optional(digest),
        "after": digest,
        "changed": integer(0, limits.MAX_CELL_WORDS),
        "payload": blob(limits.MAX_PART_BYTES),
    },
    Type.PASSED: {"serial": serial, "cell": cell},
    Type.FILE: {"serial": serial, "path": text(limits.MAX_PATH_BYTES), "contents": blob(limits.MAX_SMALL_FILE_BYTES)},
    Type.DONE: {"serial": serial, "parts": integer(0, limits.MAX_STATE_BYTES)},
    Type.DURABLE: {
        "serial": serial,
        "version": version,
        "bytes": integer(0, 2 * limits.MAX_STATE_BYTES),
        "changed": integer(0, limits.MAX_STATE_BYTES),
        "params": integer(0, limits.MAX_STATE_BYTES),
    },
    Type.ABORTED: {"serial": serial, "reason": text(1024)},
    Type.LIVE: {
        "engines": row(fields(text(limits.MAX_ENGINE_NAME), optional(version), flag), limits.MAX_ENGINES),
        "head": optional(version),
    },
    Type.ENGINE: {"name": engine, "lead": optional(fields(node, host, port))},
    Type.MEMBER: {"engine": engine, "incarnation": binary(16)},
    Type.HELD: {"version": optional(version), "still": flag, "round": serial},
    Type.REPORTED: {"report": blob(limits.MAX_INSTALL_REQUEST_BYTES), "age_us": integer(0, (1 << 63) - 1)},
    Type.STILL: {"version": optional(version), "round": serial},
    Type.SERVES: {"version": optional(version), "ready": flag},
}

SINCE: dict[Type, dict[str, Check]] = {
    Type.BEGUN: {"codec": text(16)},
    Type.ATTACH: {"spare": row(artifact, limits.MAX_CATALOG), "reserve": flag},
    Type.JOIN: {
        "ways": ways,
        "families": row(lambda x: type(x) is int and x in (4, 6), 2),
    },
    Type.HELLO: {"least": protocol, "greatest": protocol},
    Type.CHALLENGE: {"authority": blob(limits.MAX_CERTIFICATE_BYTES)},
    Type.READY: {"v": protocol},
    Type.WELCOME: {"bearer": text(128), "name": text(128)},
    Type.EVICTED: {"signed": row(binary(limits.STATEMENT_BYTES), limits.MAX_STATEMENTS)},
    Type.ENGINE: {"members": row(node, limits.MAX_MEMBERS)},
    Type.REPORT: {
        "evicted": row(binary(limits.STATEMENT_BYTES), limits.MAX_RETOLD),
        "durable": row(blob(limits.MAX_DURABLE_BYTES), limits.MAX_EVIDENCE),
        "opened": row(blob(limits.MAX_DURABLE_BYTES), limits.MAX_EVIDENCE),
        "held": row(artifact, limits.MAX_HELD),
        "dropped": row(artifact, limits.MAX_HELD),
        "garbled": row(fields(node, integer(1, 1 << 62)), limits.MAX_GARBLED),
        "lacking": row(fields(artifact, optional(node)), limits.MAX_LACKING),
        "spoilt": row(text(limits.MAX_OBJECT_NAME), limits.MAX_SPOILT),
    },
}
"""Keys that came later: they may be missing, and who does not know them ignores them."""


def encode(kind: Type, body: Body) -> bytes:
    """A message's body. Map keys are sorted, so equal messages are equal bytes."""
    packed: bytes = msgpack.packb(dict(sorted(body.items())))
    return packed


def decode(kind: Type, data: bytes | bytearray | memoryview) -> Body:
    """The checked map of a message that is not SIGNED or a PIECE. Memory stays within a small multiple of ``data``. Raises RemoteError."""
    return checked(kind, unpacked(kind, data))


def unpacked(kind: Type, data: bytes | bytearray | memoryview) -> Body:
    """The map of such a message, unchecked. Raises RemoteError."""
    try:
        body = _unpack(data, flat=kind in PLAIN)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteError(f"{kind.name}: not msgpack ({type(error).__name__})") from None
    if type(body) is not dict:
        raise RemoteError(f"{kind.name}: body is not a map")
    return body


def checked(kind: Type, body: Body) -> Body:
    """The same map. Raises RemoteError unless it is as the schema says."""
    for key, check in SCHEMA[kind].items():
        if key not in body:
            raise RemoteError(f"{kind.name}: {key!r} is missing")
        if not check(body[key]):
            raise RemoteError(f"{kind.name}: {key!r} is malformed or out of range")
    for key, check in SINCE.get(kind, {}).items():
        if key in body and not check(body[key]):
            raise RemoteError(f"{kind.name}: {key!r} is malformed or out of range")
    return body


def _unpack(data: bytes | bytearray | memoryview, *, flat: bool) -> Any:
    """``flat``: a map of plain values, for bodies so long that even empty containers would add up."""
    if len(data) > limits.KIB and not flat:
        # An array is allocated by the length that it claims, before its elements are there, and arrays nest. A dry run finds false claims.
        dry = msgpack.Unpacker(max_buffer_size=len(data))
        dry.feed(data)
        dry.skip()
    maps = 0

    def count(found: Body) -> Body:
        nonlocal maps
        maps += 1
        if maps > 1:
            raise ValueError("a map in a map")
        return found

    return msgpack.unpackb(
        data,
        max_ext_len=0,
        max_str_len=min(len(data), 64 * limits.KIB),
        max_map_len=min(len(data), limits.KIB),
        max_array_len=0 if flat else len(data),
        object_hook=count if flat else None,
    )
