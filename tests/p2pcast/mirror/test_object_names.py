"""Names of a mirror's objects: one canonical form each; other forms are not parsed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from p2pcast.mirror.object_names import (
    SLICE_BYTES,
    ReadyMarker,
    most_tail_bytes,
    run_folder,
    slice_bytes,
    slice_name,
    slice_of,
    slices,
    tail_name,
    tail_of,
)

versions = st.builds(Version, st.integers(0, limits.MAX_BRANCH), st.integers(0, limits.MAX_STEP))
ids = st.binary(min_size=16, max_size=16)


@given(versions, versions, ids, st.booleans())
def test_a_marker_survives_a_round_trip(one: Version, other: Version, artifact: bytes, anchor: bool) -> None:
    low, high = sorted((one, other))
    base = None if anchor or low == high else low
    marker = ReadyMarker(high, base, artifact)
    assert ReadyMarker.parse(str(marker)) == marker


@given(versions, versions, ids)
def test_markers_sort_as_versions_do(one: Version, other: Version, artifact: bytes) -> None:
    assert (str(ReadyMarker(one, None, artifact)) < str(ReadyMarker(other, None, artifact))) == (one < other)


@pytest.mark.parametrize(
    "name",
    [
        "ready/0000000000.0000000000000000002-0000000000.0000000000000000002-" + "0" * 32,  # no base of itself
        "ready/0000000000.0000000000000000002-0000000000.0000000000000000003-" + "0" * 32,
        "ready/9999999999.0000000000000000002-anchor-" + "0" * 32,  # no such branch
        "ready/0000000000.9999999999999999999-anchor-" + "0" * 32,
        "ready/0000000000.0000000000000000002-anchor-" + "A" * 32,
        "ready/0000000000.0000000000000000002-anchor-" + "0" * 32 + "\n",
        "ready/0.2-anchor-" + "0" * 32,
        "ready/0000000000.000000000000000000٢-anchor-" + "0" * 32,
        "ready/../key",
        "key",
        "",
    ],
)
def test_other_names_are_not_markers(name: str) -> None:
    assert ReadyMarker.parse(name) is None


@given(ids, st.integers(0, 99_999_999))
def test_slices_and_tails(artifact: bytes, number: int) -> None:
    assert slice_of(slice_name(artifact, number)) == (artifact, number)
    assert tail_of(tail_name(artifact)) == artifact
    assert slice_of(tail_name(artifact)) is None
    assert tail_of(slice_name(artifact, number)) is None


@given(st.integers(0, 1 << 40))
def test_slices_make_the_log(log_bytes: int) -> None:
    count = slices(log_bytes)
    assert count == 0 or 0 < slice_bytes(log_bytes, count - 1) <= SLICE_BYTES
    assert count == 0 or (count - 1) * SLICE_BYTES + slice_bytes(log_bytes, count - 1) == log_bytes


def test_every_piece_lies_in_one_slice() -> None:
    assert SLICE_BYTES % limits.MAX_PIECE_BYTES == 0


def test_a_tail_above_the_limit_is_refused() -> None:
    assert most_tail_bytes(16_000, 300, 2000) < limits.MAX_TAIL_BYTES
    with pytest.raises(IntegrityError, match="larger than any may be"):
        most_tail_bytes(limits.MAX_PIECES, 0, 0)


def test_golden() -> None:
    marker = ReadyMarker(Version(1, 42), Version(0, 40), bytes(range(16)))
    assert run_folder(bytes(range(16))) == "p2pcast-1/000102030405060708090a0b0c0d0e0f/"
    assert (
        str(marker)
        == "ready/0000000001.0000000000000000042-0000000000.0000000000000000040-000102030405060708090a0b0c0d0e0f"
    )
    assert (
        str(ReadyMarker(Version(0, 40), None, bytes(16))) == f"ready/0000000000.0000000000000000040-anchor-{'0' * 32}"
    )
    assert slice_name(bytes(16), 7) == f"log/{'0' * 32}/00000007"
    assert tail_name(bytes(16)) == f"tail/{'0' * 32}"
