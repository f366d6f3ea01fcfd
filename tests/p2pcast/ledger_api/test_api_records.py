"""Records of the ledger's HTTP API: both encodings give back each record, and nothing beyond its bounds is decoded."""

from __future__ import annotations

import json
import math
import tracemalloc
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.ledger_api import trainer_api, worker_api
from p2pcast.ledger_api.api_route import MAX_LIST, MSGPACK, ApiRecord, ApiRoute, HexHash, HexId

ROUTES: list[ApiRoute[Any, Any]] = [
    one for module in (worker_api, trainer_api) for one in vars(module).values() if isinstance(one, ApiRoute)
]
ID = "0" * 32
PRINTABLE = st.characters(exclude_categories=("C", "Z"), include_characters=" ")


def drawn(hint: Any, bounds: Any = None) -> st.SearchStrategy[Any]:
    """Values of an annotation."""
    origin, args = get_origin(hint), get_args(hint)
    low, high = getattr(bounds, "ge", None), getattr(bounds, "le", None)
    least, most = getattr(bounds, "min_length", None) or 0, getattr(bounds, "max_length", None)
    if origin is Annotated:
        return drawn(*args)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(drawn, args))
    if origin is not None and issubclass(origin, Sequence):
        return st.lists(drawn(args[0]), max_size=3)
    if hint is type(None):
        return st.none()
    if hint in (HexId, HexHash):
        return st.binary(min_size=hint.size, max_size=hint.size)
    if issubclass(hint, ApiRecord):
        fields = get_type_hints(hint, include_extras=True)
        return st.builds(hint, **{name: drawn(fields[name]) for name in hint.__struct_fields__})
    if hint is bytes:
        return st.binary(min_size=least, max_size=min(64, 64 if most is None else most))
    if hint is str:
        return st.text(PRINTABLE, min_size=least, max_size=min(20, 20 if most is None else most))
    if hint is float:
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    if hint is bool:
        return st.booleans()
    assert hint is int, hint
    return st.integers(-(1 << 63) if low is None else low, (1 << 63) - 1 if high is None else high)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
@given(data=st.data())
def test_each_record_of_a_route_is_decoded_unchanged(route: ApiRoute[Any, Any], data: st.DataObject) -> None:
    asked, found = data.draw(drawn(route.asks)), data.draw(drawn(route.answers))
    assert route.read_request(route.request(asked)) == asked
    assert route.read_answer(route.answer(found)) == found


def lengths(hint: Any, most: int | None = None) -> Iterator[int | None]:
    """Largest lengths of the lists in a value, None for one without a bound."""
    if get_origin(hint) is Annotated:
        inner, *stated = get_args(hint)
        yield from lengths(inner, next((one.max_length for one in stated), None))
        return
    if isinstance(hint, type) and issubclass(hint, ApiRecord):
        for field in get_type_hints(hint, include_extras=True).values():
            yield from lengths(field)
    elif get_origin(hint) is Sequence:
        yield most
    for inner in get_args(hint):
        yield from lengths(inner)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_each_list_in_msgpack_is_bounded(route: ApiRoute[Any, Any]) -> None:
    """An array of msgpack states its length before its elements."""
    for record, kind in ((route.asks, route.request_type), (route.answers, route.answer_type)):
        assert kind != MSGPACK or None not in set(lengths(record))


def test_a_claimed_length_takes_no_memory() -> None:
    claims = b"\x82\xa7session\xc4\x10" + bytes(16) + b"\xa7results\xdd\xff\xff\xff\xff"
    tracemalloc.start()
    for route in ROUTES:
        if route.request_type == MSGPACK:
            with pytest.raises(UsageError):
                route.read_request(claims)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    with pytest.raises(UsageError, match=f"field results: expected array of length <= {MAX_LIST}"):
        worker_api.RESULTS.read_request(claims)


PACKED = b"\x82\xa7session\xc4\x10" + bytes(16) + b"\xa7results\x90"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"\xdf\x00\x10\x00\x00" + PACKED[1:], "not a msgpack map of at most 15 fields"),
        (b"\x90", "not a msgpack map of at most 15 fields"),
        (b"", "not a msgpack map of at most 15 fields"),
        (b"\x83\xa5later\xdd\x00\x10\x00\x00" + PACKED[1:], "object contains unknown field later"),
    ],
)
def test_a_request_in_msgpack_has_its_own_few_fields_alone(body: bytes, said: str) -> None:
    """A field that is skipped takes the time of all that it holds."""
    assert worker_api.RESULTS.read_request(PACKED) == worker_api.ResultsRequest(bytes(16), [])
    with pytest.raises(UsageError, match=said):
        worker_api.RESULTS.read_request(body)


def test_numbers_and_bytes_of_other_types_are_written_as_their_own() -> None:
    report = trainer_api.ReportAuditRequest(bytes(16), bytes(16), 0.5, 2.0, agrees=True)
    for gap, largest in ((np.float64(0.5), np.int64(2)), (np.float32(0.5), np.float16(2))):
        other: Sequence[Any] = (bytearray(16), memoryview(bytes(16)), gap, largest)
        written = trainer_api.ReportAuditRequest(*other, agrees=True)
        assert trainer_api.REPORT_AUDIT.read_request(trainer_api.REPORT_AUDIT.request(written)) == report
    packed: Any = worker_api.ResultsRequest(bytearray(16), [memoryview(b"a")])
    assert worker_api.RESULTS.read_request(worker_api.RESULTS.request(packed)).results == [b"a"]


@pytest.mark.parametrize("gap", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_refused_on_both_sides(gap: float) -> None:
    report = trainer_api.ReportAuditRequest(bytes(16), bytes(16), 0.5, gap, agrees=True)
    with pytest.raises(UsageError, match="a number of this ReportAuditRequest is not finite"):
        trainer_api.REPORT_AUDIT.request(report)
    body = {"job": ID, "lease": ID, "mean_gap": 0.5, "largest_gap": gap, "agrees": True}
    with pytest.raises(UsageError, match="JSON, whose numbers are finite"):
        trainer_api.REPORT_AUDIT.read_request(json.dumps(body).encode())


BEAT = {"lease": ID, "tokens": 1}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([BEAT | {"tokens": True}], "field leases[0].tokens: expected int, got bool"),
        ([BEAT, BEAT | {"tokens": -1}], "field leases[1].tokens: expected int >= 0"),
        ([BEAT | {"tokens": 1.0}], "field leases[0].tokens: expected int, got float"),
        ([BEAT | {"lease": ID[1:]}], "field leases[0].lease: not 32 hexadecimal digits"),
        ([BEAT | {"lease": ID[1:] + " "}], "field leases[0].lease: not 32 hexadecimal digits"),
        ([BEAT | {"lease": None}], "field leases[0].lease: not 32 hexadecimal digits"),
        ([{"lease": ID}], "field leases[0]: object missing required field tokens"),
        ([3], "field leases[0]: expected object, got int"),
        ({}, "field leases: expected array, got object"),
        ([BEAT] * 4097, "field leases: expected array of length <= 4096"),
    ],
)
def test_a_fault_is_named_with_its_place(rows: Any, said: str) -> None:
    with pytest.raises(UsageError) as found:
        worker_api.HEARTBEAT.read_request(json.dumps({"session": ID, "leases": rows}).encode())
    assert str(found.value) == said


def test_unknown_fields_of_json_are_ignored_and_null_is_left_out() -> None:
    asked = {"session": ID, "slots": 1, "served": "0.1", "manifest": "0" * 64, "staged": None, "of_later": [{}]}
    found = worker_api.LEASE.read_request(json.dumps(asked).encode())
    assert found == worker_api.LeaseRequest(bytes(16), "0.1", bytes(32), 1)
    assert json.loads(worker_api.LEASE.request(found)).keys() == {"session", "slots", "served", "manifest"}


@pytest.mark.parametrize("text", ["two\nlines", "\0", "\u2028", "\ud800", "\x7f", "\u200b"])
def test_a_text_that_is_not_printable_is_refused_on_both_sides(text: str) -> None:
    with pytest.raises(UsageError, match="detail has characters that are not printable"):
        worker_api.LeaseReason(bytes(16), "engine", text)
    body = {"session": ID, "leases": [], "reasons": [{"lease": ID, "reason": "engine", "detail": text}]}
    with pytest.raises(UsageError):
        worker_api.RETURN.read_request(json.dumps(body).encode())


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, True, "1"])
def test_times_of_an_answer_are_finite_numbers(value: Any) -> None:
    rows = [{"lease": bytes(16), "job": b"", "expires_in_s": value, "latest_in_s": 1.0}]
    packed = msgpack.packb({"leases": rows, "finished": False, "retry_s": 0.2})
    with pytest.raises(RemoteError, match=r"v1/lease is malformed: field leases\[0\].expires_in_s"):
        worker_api.LEASE.read_answer(packed)
