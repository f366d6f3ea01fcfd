"""Message bodies: fields are checked, other keys are ignored, and memory stays in proportion to the bytes."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError
from p2pcast.wire.constraints import InvalidError
from p2pcast.wire.messages import MAX_BODY, PLAIN, RECORDS, SIGNED, Type, decode, encode, encode_map
from tests.p2pcast.wire.plain_records import as_tuples, plain

V = st.tuples(st.integers(0, limits.MAX_BRANCH), st.integers(0, limits.MAX_STEP)).map(list)
B16, B32 = st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32)
HOST, PORT, NAME = (
    st.sampled_from(["", "h", "peer-1.example", "10.0.0.1", "2001:db8::7", ".".join(["a" * 63] * 3)]),
    st.integers(0, 65535),
    st.text(max_size=128),
)
EPOCH = st.tuples(st.integers(0, 1 << 62), st.integers(0, 1 << 62)).map(list)
OPT_V, OPT_NODE, KIND = st.none() | V, st.none() | B16, st.sampled_from(["delta", "anchor"])
U64 = st.integers(0, (1 << 64) - 1)
RANGES = (
    st.lists(st.integers(0, limits.MAX_PIECES), max_size=12, unique=True)
    .map(sorted)
    .map(lambda x: x[: len(x) // 2 * 2])
)
SPAN = st.text(max_size=limits.MAX_SPAN_NAME)
T63 = st.integers(0, (1 << 63) - 1)
BYTES = st.integers(0, limits.MAX_STATE_BYTES)


def rows(*columns):
    return st.lists(st.tuples(*columns).map(list), max_size=4)


VALUES: dict[Type, dict[str, Any]] = {
    Type.HELLO: {
        "v": st.integers(0, 1 << 31),
        "run": B16,
        "node": B16,
        "name": NAME,
        "nonce": B32,
        "token": st.binary(min_size=8, max_size=8),
        "purpose": st.sampled_from(["control", "data", "publish", "engine"]),
        "role": st.sampled_from(["peer", "child", "parent", "rank", "member"]),
        "link": B16,
        "stripe": st.integers(0, limits.MAX_STRIPES - 1),
        "stripes": st.integers(1, limits.MAX_STRIPES),
    },
    Type.CHALLENGE: {"v": st.integers(0, 1 << 31), "run": B16, "node": B16, "nonce": B32, "proof": B32},
    Type.PROOF: {"proof": B32},
    Type.READY: {},
    Type.ERROR: {"code": st.text(max_size=32), "message": st.text(max_size=1024)},
    Type.PING: {"t": T63},
    Type.PONG: {"t": T63},
    Type.JOIN: {
        "name": NAME,
        "region": NAME,
        "listen": st.tuples(HOST, PORT).map(list),
        "held": OPT_V,
        "engine": st.none() | st.tuples(SPAN, st.sampled_from(["lead", "member"])).map(list),
    },
    Type.WELCOME: {
        "key": B32,
        "epoch": EPOCH,
        "commit": st.sampled_from(["auto", "manual", "barrier"]),
        "target": OPT_V,
        "host": HOST,
    },
    Type.REPORT: {"parent": OPT_NODE, "staged": OPT_V, "committed": OPT_V},
    Type.PLAN: {"epoch": EPOCH, "parent": OPT_NODE, "host": HOST, "port": PORT, "backups": rows(B16, HOST, PORT)},
    Type.CATALOG: {
        "artifacts": rows(
            B16,
            KIND,
            OPT_V,
            V,
            st.integers(0, limits.MAX_STATE_BYTES),
            B32,
            U64,
            st.booleans(),
            st.none() | B32,
            st.binary(max_size=8),
        ),
        "dropped": st.lists(B16, max_size=4),
    },
    Type.COMMIT: {"version": V},
    Type.HOLD: {"version": V},
    Type.LEAVE: {},
    Type.LAYOUT: {"layout": B32, "document": st.binary(max_size=3000)},
    Type.ATTACH: {"live": st.booleans(), "layouts": st.lists(B32, max_size=4), "want": rows(B16, RANGES)},
    Type.ATTACHED: {"path": st.lists(B16, max_size=4), "artifacts": rows(B16, KIND, OPT_V, V, st.booleans())},
    Type.PATH: {"path": st.lists(B16, max_size=4)},
    Type.WANT: {"artifact": B16, "have": RANGES},
    Type.ABORT: {},
    Type.GONE: {"artifact": B16},
    Type.SKIP: {"artifact": B16},
    Type.ALIVE: {"high": rows(PORT, st.integers(0, limits.MAX_PIECES))},
    Type.REQUEST: {"artifact": B16, "pieces": RANGES, "seal": st.booleans()},
    Type.HAVE: {"artifact": B16, "pieces": RANGES, "sealed": st.booleans()},
    Type.CANCEL: {"artifact": B16, "pieces": RANGES},
    Type.CANCELLED: {"artifact": B16, "pieces": RANGES},
    Type.SET_RATE: {"bytes_s": st.none() | st.integers(1, limits.MAX_STATE_BYTES)},
    Type.FIND_SOURCES: {"artifact": B16, "without": st.lists(B16, max_size=4)},
    Type.SOURCES: {"artifact": B16, "peers": rows(B16, HOST, PORT)},
    Type.RANK: {"group": B16, "rank": st.integers(0, limits.MAX_RANKS - 1), "ranks": st.integers(1, limits.MAX_RANKS)},
    Type.RANKED: {"head": OPT_V, "layout": st.none() | B32, "state": st.none() | U64},
    Type.BEGIN: {"serial": T63, "step": T63, "layout": B32, "resume": st.booleans()},
    Type.BEGUN: {"serial": T63, "version": V, "base": OPT_V},
    Type.CELL: {
        "serial": T63,
        "cell": BYTES,
        "start": st.integers(0, limits.MAX_CELL_WORDS - 1),
        "words": st.integers(1, limits.MAX_CELL_WORDS),
        "codec": st.integers(1, 255),
        "before": st.none() | U64,
        "after": U64,
        "changed": st.integers(0, limits.MAX_CELL_WORDS),
        "payload": st.binary(max_size=3000),
    },
    Type.PASSED: {"serial": T63, "cell": BYTES},
    Type.FILE: {"serial": T63, "path": st.text(max_size=limits.MAX_PATH_BYTES), "contents": st.binary(max_size=3000)},
    Type.DONE: {"serial": T63, "parts": BYTES},
    Type.DURABLE: {
        "serial": T63,
        "version": V,
        "bytes": st.integers(0, 2 * limits.MAX_STATE_BYTES),
        "changed": BYTES,
        "params": BYTES,
    },
    Type.ABORTED: {"serial": T63, "reason": st.text(max_size=1024)},
    Type.LIVE: {"engines": rows(st.text(max_size=limits.MAX_ENGINE_NAME), OPT_V, st.booleans()), "head": OPT_V},
    Type.NEIGHBOURS: {"peers": st.lists(st.tuples(B16, HOST, PORT).map(list), max_size=5)},
    Type.ADDRESSES: {"peers": rows(B16, st.booleans(), rows(HOST, PORT))},
    Type.CALL: {"node": B16, "stripes": st.integers(1, limits.MAX_STRIPES)},
    Type.CALLED: {"node": B16, "stripes": st.integers(1, limits.MAX_STRIPES), "ways": rows(HOST, PORT)},
    Type.UNREACHABLE: {"node": B16},
    Type.SQUASH: {"base": V},
    Type.SQUASHING: {"base": V, "version": OPT_V, "bytes": BYTES, "wait_us": T63},
    Type.ENROL: {"request": st.binary(max_size=3000)},
    Type.ISSUED: {"certificate": st.binary(max_size=3000)},
    Type.EVICTED: {"nodes": st.lists(B16, max_size=5)},
    Type.ENGINE: {"name": SPAN, "lead": st.none() | st.tuples(B16, HOST, PORT).map(list)},
    Type.MEMBER: {"engine": SPAN, "incarnation": B16},
    Type.HELD: {"version": OPT_V, "still": st.booleans(), "round": T63},
    Type.WORKER_REPORT: {"report": st.binary(max_size=3000), "age_us": T63},
    Type.FREEZE: {"version": OPT_V, "round": T63},
    Type.SERVING: {"version": OPT_V, "ready": st.booleans()},
}
MESSAGES = st.sampled_from(sorted(VALUES)).flatmap(lambda t: st.tuples(st.just(t), st.fixed_dictionaries(VALUES[t])))


def required(kind) -> set[str]:
    return {field.key for field in RECORDS[kind].fields if field.required}


def test_every_message_is_tried():
    assert set(VALUES) == set(RECORDS) == set(Type) - SIGNED - {Type.PIECE}
    for kind, fields in VALUES.items():
        assert set(fields) == required(kind)


@given(MESSAGES)
def test_round_trip(message):
    kind, body = message
    data = encode(RECORDS[kind](**as_tuples(body)))
    assert data == msgpack.packb(dict(sorted(body.items())))
    assert plain(decode(kind, data)) == body


@given(MESSAGES)
def test_any_order_of_keys_is_read_and_unknown_keys_are_ignored(message):
    kind, body = message
    later = 1 if kind in PLAIN else [1, {"x": 2}]
    shuffled = msgpack.packb({"later": later, **dict(reversed(body.items()))})
    assert decode(kind, shuffled) == decode(kind, encode_map(body))


@given(MESSAGES, st.data())
def test_a_missing_field_is_named(message, data):
    kind, body = message
    if body:
        key = data.draw(st.sampled_from(sorted(body)))
        with pytest.raises(RemoteError, match=f"{kind.name}: '{key}' is missing"):
            decode(kind, encode_map({k: v for k, v in body.items() if k != key}))


WRONG = [
    None,
    True,
    False,
    -1,
    1 << 63,
    (1 << 64) - 1,
    1.5,
    "",
    "x" * 2000,
    b"",
    b"x" * 15,
    b"x" * 17,
    [],
    [[]],
    [0],
    [0, 0],
    [-1, 1],
    [1, 2, 3],
    [True, 2],
    [None, None],
    {},
    {"a": 1},
    [1 << 32, 0],
    [0, 1 << 63],
    ["", 65536],
    ["h", -1],
    [b"x" * 16, [3, 2]],
    [[b"x" * 16, [3, 3]]],
    [[b"x" * 16, [0, 1, 1, 2]]],
    [[b"x" * 16, [0, (1 << 30) + 1]]],
    [[b"x" * 16, [0]]],
    [[b"x" * 16, [False, True]]],
    [[70000, 1]],
]


def takes_flags(kind, key) -> bool:
    (constraint,) = (field.constraint for field in RECORDS[kind].fields if field.key == key)
    try:
        return constraint.reader()(True) is True
    except InvalidError:
        return False


@pytest.mark.parametrize("kind", sorted(VALUES), ids=lambda k: k.name)
def test_a_wrong_value_is_refused_or_right(kind):
    """Of many odd values for each field, accepted values must be of the field's own kind."""
    for key in VALUES[kind]:
        passed = []
        for wrong in WRONG:
            body = _sample(kind) | {key: wrong}
            try:
                decode(kind, encode_map(body))
            except RemoteError as error:
                assert f"'{key}'" in str(error) or kind in PLAIN  # noqa: PT017
            else:
                passed.append(wrong)
        assert len({type(x) for x in passed}) <= 2, (key, passed)
        assert all(p is None or type(p) is not bool or takes_flags(kind, key) for p in passed)
        assert 1.5 not in passed
        assert {} not in passed


def _sample(kind):
    zero = {
        "name": "n",
        "purpose": "data",
        "role": "child",
        "code": "c",
        "message": "m",
        "region": "",
        "host": "",
        "commit": "auto",
        "reason": "",
    }
    sizes = {
        "run": 16,
        "node": 16,
        "nonce": 32,
        "token": 8,
        "link": 16,
        "proof": 32,
        "key": 32,
        "artifact": 16,
        "layout": 32,
        "document": 4,
        "request": 4,
        "certificate": 4,
        "group": 16,
        "payload": 4,
        "contents": 4,
        "report": 4,
        "incarnation": 16,
    }
    plain = {"stripes": 1, "listen": ["", 1], "epoch": [0, 0], "version": [0, 0], "live": True}
    lists = {
        key: []
        for key in (
            "want",
            "layouts",
            "have",
            "path",
            "artifacts",
            "high",
            "backups",
            "dropped",
            "engines",
            "peers",
            "ways",
            "nodes",
            "without",
            "pieces",
        )
    }
    nils = dict.fromkeys(("held", "target", "parent", "staged", "committed", "head", "state", "base", "before", "lead"))
    counts = dict.fromkeys(
        (
            "serial",
            "step",
            "cell",
            "start",
            "after",
            "changed",
            "parts",
            "bytes",
            "params",
            "rank",
            "stripe",
            "t",
            "port",
            "round",
            "age_us",
            "wait_us",
        ),
        0,
    )
    known = lists | zero | {k: bytes(n) for k, n in sizes.items()} | plain | nils | counts
    known |= {"v": 1, "ranks": 1, "words": 1, "codec": 1, "resume": True}
    known |= {"seal": True, "sealed": True, "bytes_s": None}
    known |= {"still": True, "ready": True, "engine": None if kind is Type.JOIN else "e"}
    if kind in (Type.SQUASH, Type.SQUASHING):
        known["base"] = [0, 0]
    if kind is Type.FILE:
        known["path"] = "p"
    return {k: known[k] for k in required(kind)}


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (Type.HELLO, "stripe", 64),
        (Type.HELLO, "stripes", 0),
        (Type.HELLO, "stripes", 65),
        (Type.HELLO, "name", "n" * 129),
        (Type.WANT, "have", [1, 2, 2, 3]),
        (Type.WANT, "have", [0, limits.MAX_PIECES + 1]),
        (Type.WANT, "have", list(range(limits.MAX_RANGES + 2))),
        (Type.PATH, "path", [bytes(16)] * 2 + [bytes(15)]),
        (Type.COMMIT, "version", [0, 1 << 63]),
        (Type.COMMIT, "version", [1 << 32, 0]),
        (Type.WELCOME, "commit", "barrier!"),
        (Type.ALIVE, "high", [[65536, 1]]),
        (Type.RANK, "rank", limits.MAX_RANKS),
        (Type.RANK, "ranks", 0),
        (Type.RANK, "ranks", limits.MAX_RANKS + 1),
        (Type.CELL, "words", 0),
        (Type.CELL, "words", limits.MAX_CELL_WORDS + 1),
        (Type.CELL, "start", limits.MAX_CELL_WORDS),
        (Type.CELL, "codec", 0),
        (Type.CELL, "payload", bytes(limits.MAX_PART_BYTES + 1)),
        (Type.CELL, "payload", "text"),
        (Type.FILE, "path", "p" * (limits.MAX_PATH_BYTES + 1)),
        (Type.BEGIN, "resume", None),
        (Type.BEGUN, "base", [1, 2, 3]),
        (Type.BEGUN, "codec", None),
        (Type.BEGUN, "codec", "c" * 17),
        (Type.ABORTED, "reason", "r" * 1025),
        (Type.LIVE, "engines", [["n" * (limits.MAX_ENGINE_NAME + 1), None, True]]),
        (Type.LIVE, "engines", [["n", None, True]] * (limits.MAX_ENGINES + 1)),
        (Type.JOIN, "engine", ["e", "leader"]),
        (Type.JOIN, "engine", ["e" * (limits.MAX_SPAN_NAME + 1), "lead"]),
        (Type.NEIGHBOURS, "peers", [[bytes(16), "h"]]),
        (Type.ADDRESSES, "peers", [[bytes(16), True, [["h", 1]] * (limits.MAX_NODE_ADDRESSES + 1)]]),
        (Type.CALL, "stripes", 0),
        (Type.CALLED, "ways", [["h", 1 << 16]]),
        (Type.JOIN, "ways", [["h", 1, 2]]),
        (Type.JOIN, "families", [5]),
        (Type.ENROL, "request", bytes(limits.MAX_CERTIFICATE_BYTES + 1)),
        (Type.EVICTED, "nodes", [b"short"]),
        (Type.EVICTED, "signed", [bytes(limits.STATEMENT_BYTES - 1)]),
        (Type.EVICTED, "signed", [bytes(limits.STATEMENT_BYTES)] * (limits.MAX_STATEMENTS + 1)),
        (Type.REPORT, "evicted", [bytes(limits.STATEMENT_BYTES + 1)]),
        (Type.REPORT, "evicted", [bytes(limits.STATEMENT_BYTES)] * (limits.MAX_RELAYED + 1)),
        (Type.WELCOME, "name", "n" * 129),
        (Type.CHALLENGE, "authority", "text"),
        (Type.HELLO, "least", (1 << 31) + 1),
        (Type.HELLO, "greatest", "2"),
        (Type.READY, "v", None),
        (Type.ATTACH, "reserve", 1),
        (Type.WELCOME, "bearer", "b" * 129),
        (Type.JOIN, "families", [True]),
        (Type.ENGINE, "lead", [bytes(16), "h"]),
        (Type.MEMBER, "incarnation", bytes(15)),
        (Type.HELD, "still", None),
        (Type.WORKER_REPORT, "report", bytes(limits.MAX_INSTALL_REQUEST_BYTES + 1)),
        (Type.WORKER_REPORT, "age_us", -1),
    ],
)
def test_one_beyond_the_range(kind, key, value):
    good = _sample(kind)
    decode(kind, encode_map(good))
    with pytest.raises(RemoteError, match=f"'{key}' is malformed or out of range"):
        decode(kind, encode_map(good | {key: value}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80\x00",
        b"\x90",
        b"\xc0",
        b"\x01",
        b"\x81\x01\x02",
        b"\x81\xa1a",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\xa1\xff\x00",
        b"\x81\xa1a\xc7\x00\x05",
        b"\x81\xa1a\xd6\xff\x00\x00\x00\x00",
        b"\x81\xc0\xc0",
        b"\x81\x90\x90",
        b"\x91" * 2000,
        b"\x81\xa1a" * 2000,
    ],
    ids=lambda d: d[:8].hex(),
)
def test_payloads_other_than_msgpack_maps_are_refused(data):
    for kind in RECORDS:
        if required(kind) or data[3:] != b"\xc7\x00\x05":  # an empty extension under an unknown key is ignored with it
            with pytest.raises(RemoteError):
                decode(kind, data)


def peak(kind, data):
    tracemalloc.start()
    try:
        with pytest.raises(RemoteError):
            decode(kind, data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_arrays_that_claim_more_than_is_there_cost_nothing():
    """Each header would be given room for 15 728 640 pointers before the next is read."""
    claim = b"\xdd\x00\x0f\x00\x00"
    data = b"\x81\xa1a" + claim * 400 + bytes(limits.MIB - 4000)
    assert peak(Type.CATALOG, data) < 4 * limits.MIB
    assert peak(Type.HELLO, b"\x81\xa1a" + b"\xdc\x0f\xf0" * 300 + bytes(3000)) < 8 * limits.MIB


@pytest.mark.parametrize("kind", PLAIN, ids=lambda k: k.name)
@pytest.mark.parametrize("junk", [b"\x80", b"\x90", b"\xa1a\x80"], ids=["maps", "arrays", "maps in a map"])
def test_a_long_message_is_not_a_swarm_of_containers(kind, junk):
    """A million empty containers would take 64 times the message; these may be 64 MiB long."""
    key = {Type.LAYOUT: "document", Type.CELL: "payload", Type.FILE: "contents", Type.WORKER_REPORT: "report"}[kind]
    body = junk * (4 * limits.MIB // len(junk))
    head = b"\xde\xff\xff" if junk[0] == 0xA1 else b"\x81" + msgpack.packb(key) + b"\xdd" + len(body).to_bytes(4, "big")
    assert peak(kind, head + body) < 2 * limits.MIB
    nested = msgpack.packb({"layout": bytes(32), key: {"a": {}}})
    assert peak(kind, nested) < limits.MIB


def test_every_list_of_engines_that_the_schema_takes_can_be_sent():
    widest = ["\N{GRINNING FACE}" * limits.MAX_ENGINE_NAME, [limits.MAX_BRANCH, limits.MAX_STEP], True]
    body = encode_map({"engines": [widest] * limits.MAX_ENGINES, "head": None})
    assert len(body) <= MAX_BODY[Type.LIVE]
