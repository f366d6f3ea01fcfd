"""Formats of signed records: fields that this release accepts, ignores and refuses; bytes that later releases must
read.
"""

from __future__ import annotations

import pytest

from p2pcast.artifact import Open, RunKey
from p2pcast.artifact.artifact_file import Tail
from p2pcast.artifact.canonical import pack
from p2pcast.artifact.signed_records import OWN, Durable, Manifest, PartEntry
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version

KEY = RunKey(bytes([3]) * 32)
BASE_HASH = bytes(range(32))
OPEN = Open(b"a" * 16, Version(0, 1), "delta", b"l" * 32, 1024, b"r" * 16, Version(0, 2), BASE_HASH)
MANIFEST = Manifest(
    b"a" * 16, Version(0, 1), 1, 1, (), "delta", b"h" * 32, b"l" * 32, 9, 1, b"r" * 16, 7, Version(0, 2), OWN,
    (PartEntry("adapter", b"b" * 16, b"m" * 32),),
)  # fmt: skip
DURABLE = Durable(b"a" * 16, b"m" * 32, b"r" * 16, Version(0, 2))


def signed(record, **changes) -> bytes:
    body = pack({**record._values(), **changes})
    return pack([body, KEY.sign(record.domain + body)])


@pytest.mark.parametrize("record", [OPEN, MANIFEST, DURABLE], ids=lambda r: r.where)
def test_ignorable_field_is_ignored_and_stays_in_the_hash(record) -> None:
    read = type(record).from_signed(signed(record, **{"+later": [1, b"x"]}), KEY.public)
    assert read == record
    assert read.body_hash != record.body_hash, "the hash covers every signed byte"


@pytest.mark.parametrize("record", [OPEN, MANIFEST, DURABLE], ids=lambda r: r.where)
def test_other_unknown_field_is_refused(record) -> None:
    with pytest.raises(IntegrityError, match="fields missing or unknown: later"):
        type(record).from_signed(signed(record, later=1), KEY.public)


@pytest.mark.parametrize("record", [OPEN, MANIFEST, DURABLE], ids=lambda r: r.where)
def test_later_format_is_refused_with_a_remedy(record) -> None:
    with pytest.raises(IntegrityError, match="a newer release of p2pcast made this record; update p2pcast here"):
        type(record).from_signed(signed(record, v=3), KEY.public)


def test_format_1_allows_no_ignorable_fields() -> None:
    plain = Open(b"a" * 16, Version(0, 1), "delta", b"l" * 32, 1024, b"r" * 16, Version(0, 2))
    assert Open.from_signed(signed(plain), KEY.public) == plain
    with pytest.raises(IntegrityError, match="unknown"):
        Open.from_signed(signed(plain, **{"+later": 1}), KEY.public)


def test_format_2_matches_its_golden_bytes() -> None:
    assert OPEN.body.hex() == (
        "8ba861727469666163 74c41061616161616161616161616161616161 a462617365920001 a9626173655f68617368c420"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f a66272616e636800 a46b696e64a564656c7461"
        "a66c61796f7574c4206c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c6c a470617274a57374617465"
        "a57069656365cd0400 a372756ec41072727272727272727272727272727272 a47374657002 a17602"
    ).replace(" ", "")
    assert DURABLE.body.hex() == (
        "86a86172746966616374c41061616161616161616161616161616161a66272616e636800a86d616e6966657374c420"
        "6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6d6da372756ec41072727272727272727272727272727272"
        "a47374657002a17602"
    )


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("base_hash", b"short", "not 32 bytes"),
        ("part", "", "not printable"),
        ("part", "x" * 65, "not printable"),
        ("part", "a\nb", "not printable"),
    ],
)
def test_each_new_field_of_an_open_record_is_validated(field, value, why) -> None:
    with pytest.raises(IntegrityError, match=f"{field}: {why}"):
        Open.from_signed(signed(OPEN, **{field: value}), KEY.public)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("version_hash", b"x", "version_hash: neither"),
        ("version_hash", bytes(33), "version_hash: neither"),
        ("parts", [["state", bytes(16), bytes(32)]], "parts: .*'state'"),
        ("parts", [["b", bytes(16), bytes(32)], ["a", bytes(16), bytes(32)]], "parts: not sorted"),
        ("parts", [["a", bytes(16), bytes(32)]] * 2, "parts: not sorted"),
        ("parts", [["a", bytes(15), bytes(32)]], "artifact: not 16 bytes"),
        ("parts", [[f"p{n:02}", bytes(16), bytes(32)] for n in range(65)], "at most 64"),
    ],
)
def test_each_new_field_of_a_manifest_is_validated(field, value, why) -> None:
    with pytest.raises(IntegrityError, match=why):
        Manifest.from_signed(signed(MANIFEST, **{field: value}), KEY.public)


def test_anchor_with_a_base_hash_is_refused() -> None:
    record = Open(b"a" * 16, None, "anchor", b"l" * 32, 1024, b"r" * 16, Version(0, 2), None, "adapter")
    with pytest.raises(IntegrityError, match="an anchor has no base"):
        Open.from_signed(signed(record, base_hash=BASE_HASH), KEY.public)


def test_version_hash_is_that_of_its_first_manifest() -> None:
    assert MANIFEST.identity == MANIFEST.body_hash
    assert Manifest(*_with(BASE_HASH)).identity == BASE_HASH
    assert Manifest(*_with(None)).identity is None


def _with(version_hash: bytes | None) -> list:
    values = [getattr(MANIFEST, name) for name in MANIFEST.__dataclass_fields__]
    values[13:] = [version_hash, ()]
    return values


def test_tail_with_and_without_a_durable_record() -> None:
    with_, without = Tail([], b"k" * 32, b"l", b"m", b"o", b"d"), Tail([], b"k" * 32, b"l", b"m", b"o")
    for tail in (with_, without):
        assert Tail.from_bytes(tail.to_bytes(), "here") == tail
    with pytest.raises(IntegrityError, match="durable: empty"):
        Tail.from_bytes(pack({**without._asdict(), "durable": b""}), "here")
