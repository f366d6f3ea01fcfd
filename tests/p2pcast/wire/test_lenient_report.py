"""Reports are read leniently: valid values are kept beside invalid ones, and all kept values fit into JSON."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground import limits
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire.connection import Connection, Identity, Message
from p2pcast.wire.connection_state import ConnectionState, Side
from p2pcast.wire.messages import Report, Type, decode, encode_map
from p2pcast.wire.records import read, unpacked
from tests.p2pcast.wire.plain_records import plain

MUST = {"parent": None, "staged": [0, 1], "committed": None}
ENGINE = {
    "name": "vllm:http://h:1",
    "started": True,
    "ready": True,
    "staged": "1.7",
    "committed": None,
    "pause_s": 0.25,
    "recomputed_tokens": 12,
    "detail": {"worker_s": 0.1, "folder": "/x"},
    "waits_for": "turn",
    "error": None,
}
MAY = {
    "epoch": [3, 4],
    "transfer": [1 << 20, 1000],
    "inflow": [1, 250_000, 0],
    "cores": 8,
    "http": ["0.0.0.0", 7079],
    "link": {"dialled_by": "parent", "address": "10.0.0.1:7"},
    "state": "staging",
    "progress": {"version": "0.2", "pieces": 3, "of": 9},
    "bytes_received": 10,
    "bytes_duplicate": 0,
    "engines": [ENGINE],
    "unready": [{"level": "watch", "words": "why"}],
    "error": "why",
}


def received(body) -> tuple[dict, tuple[str, ...]]:
    """The values that a hub keeps of a report, and the keys whose values it drops."""
    record, dropped = read(Type.REPORT, unpacked(Type.REPORT, encode_map(body)))
    return plain(record), dropped


def test_a_valid_report_is_kept_whole():
    assert received(MUST | MAY) == (MUST | MAY, ())
    assert set(MAY) == {field.key for field in Report.fields if field.lenient}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epoch", [1 << 63, 0]),
        ("epoch", "now"),
        ("transfer", [1, 0]),
        ("transfer", [1, 1.5]),
        ("transfer", [-1, 1]),
        ("inflow", [1, 0, 1]),
        ("inflow", [1, 2]),
        ("cores", 0),
        ("cores", True),
        ("http", ["::1%" + "a" * 100, 1]),
        ("http", ["h", 0]),
        ("link", ["parent"]),
        ("state", {"x": 1}),
        ("progress", {"version": "0.2", "pieces": 3}),
        ("progress", {"version": "newest", "pieces": 3, "of": 4}),
        ("bytes_received", "many"),
        ("bytes_duplicate", math.nan),
        ("engines", {"name": "x"}),
        ("error", 7),
    ],
)
def test_an_invalid_value_is_dropped_and_named(key, value):
    assert received(MUST | MAY | {key: value}) == (MUST | {k: v for k, v in MAY.items() if k != key}, (key,))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("started", 1),
        ("ready", "yes"),
        ("staged", [1, 7]),
        ("staged", "newest"),
        ("staged", "7"),
        ("committed", f"{limits.MAX_BRANCH + 1}.0"),
        ("pause_s", math.nan),
        ("pause_s", 1e30),
        ("pause_s", -0.5),
        ("pause_s", "long"),
        ("recomputed_tokens", -1),
        ("recomputed_tokens", True),
        ("error", b"7"),
        ("detail", [1]),
        ("waits_for", 1),
    ],
)
def test_valid_values_of_an_engine_are_kept(key, value):
    body, dropped = received(MUST | {"engines": [ENGINE | {key: value}, 3, ENGINE | {"name": ""}]})
    assert dropped == ("engines",)
    assert body["engines"] == [{k: v for k, v in ENGINE.items() if k != key}]


def test_engines_and_their_errors_are_bounded():
    body, _ = received(MUST | {"engines": [ENGINE | {"name": f"e{n}", "error": "x" * 9000} for n in range(100)]})
    assert len(body["engines"]) == limits.MAX_PEER_ENGINES
    assert {len(row["error"]) for row in body["engines"]} == {limits.MAX_EVENT_TEXT}


def test_unknown_keys_are_dropped_and_not_named():
    assert received(MUST | {"of a later release": [1], "x": b"x"}) == (MUST, ())


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*ENGINE, *MAY, "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)
ENGINES = st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(ENGINE, ANY) | {"name": st.just("e")}), max_size=3)


@given(st.fixed_dictionaries({}, optional={key: ANY | st.just(MAY[key]) for key in MAY} | {"engines": ENGINES | ANY}))
def test_any_report_is_kept_as_valid_json(said):
    connection = Connection(Side.LISTENER, Identity(bytes(16), "hub", JoinToken(bytes(16), bytes(20))), bytes(32))
    connection.state = ConnectionState.CONTROL
    body = encode_map(MUST | said)
    (event,) = connection.feed(
        len(body).to_bytes(4, "little") + int(Type.REPORT).to_bytes(2, "little") + bytes(6) + body
    )
    assert isinstance(event, Message)
    kept = plain(event.body)
    json.dumps({key: kept[key] for key in MAY if key in kept}, allow_nan=False)
    assert event.body == decode(Type.REPORT, body)
    for key in MAY:
        assert key in event.invalid_keys or kept.get(key) == said.get(key)
