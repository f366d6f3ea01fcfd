from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.artifact.canonical import pack
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import (
    Batch,
    CellEntry,
    FileEntry,
    Manifest,
    Open,
    path_fault,
    run_id,
)
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version

KEY = RunKey(bytes(range(32)))
U64 = st.integers(0, 2**64 - 1)
HASH = st.binary(min_size=32, max_size=32)
ID = st.binary(min_size=16, max_size=16)
PART = st.text(
    st.characters(min_codepoint=33, blacklist_characters="/\\\x7f", blacklist_categories=["Cs", "Cc"]),
    min_size=1,
    max_size=9,
)


@st.composite
def versions(draw: st.DrawFn) -> tuple[str, Version | None, Version]:
    base = Version(draw(st.integers(0, 3)), draw(st.integers(0, 2**40)))
    version = Version(base.branch + draw(st.integers(0, 2)), base.step + 1 + draw(st.integers(0, 9)))
    return ("delta", base, version) if draw(st.booleans()) else ("anchor", None, version)


@st.composite
def opens(draw: st.DrawFn) -> Open:
    kind, base, version = draw(versions())
    return Open(draw(ID), base, kind, draw(HASH), 1 << draw(st.integers(10, 22)), draw(ID), version)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    entry = st.builds(CellEntry, st.integers(0, 2**40), st.integers(1, 4), st.integers(1, 2**40), U64, U64)
    cells = draw(st.lists(entry, max_size=5))
    hashes = b"".join(draw(st.lists(HASH, min_size=0 if cells else 1, max_size=limits.BATCH_PIECES)))
    return Batch(draw(ID), tuple(cells), draw(st.integers(0, 2**40)), hashes, draw(HASH), draw(st.integers(0, 2**40)))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    kind, base, version = draw(versions())
    paths = draw(st.sets(PART.map(lambda p: f"x{p}.json"), max_size=4))
    files = tuple(
        FileEntry(p, draw(st.integers(0, 10**6)), draw(HASH), draw(st.none() | st.integers(0, 2**40)))
        for p in sorted(paths)
    )
    number = st.integers(0, 2**40)
    return Manifest(
        draw(ID), base, draw(number), draw(number), files, kind, draw(HASH), draw(HASH),
        draw(number), draw(number), draw(ID), draw(U64), version,
    )  # fmt: skip


@given(st.one_of(opens(), batches(), manifests()))
def test_round_trip(record: Open | Batch | Manifest) -> None:
    signed = record.to_signed(KEY)
    read = type(record).from_signed(signed, KEY.public)
    assert read == record
    assert read.body == record.body
    assert read.body_hash == record.body_hash


@given(opens(), st.data())
def test_any_flipped_bit_is_refused(record: Open, data: st.DataObject) -> None:
    signed = bytearray(record.to_signed(KEY))
    at = data.draw(st.integers(0, len(signed) * 8 - 1))
    signed[at // 8] ^= 1 << at % 8
    with pytest.raises(IntegrityError):
        Open.from_signed(bytes(signed), KEY.public)


@given(batches())
def test_any_truncation_or_addition_is_refused(record: Batch) -> None:
    signed = record.to_signed(KEY)
    for cut in {*range(0, len(signed), 17), 1, 2, 3, len(signed) - 1}:
        with pytest.raises(IntegrityError):
            Batch.from_signed(signed[:cut], KEY.public)
    with pytest.raises(IntegrityError):
        Batch.from_signed(signed + b"\0", KEY.public)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(noise: bytes) -> None:
    for kind in (Open, Batch, Manifest):
        with pytest.raises(IntegrityError):
            kind.from_signed(noise, KEY.public)


def test_record_of_another_kind_or_key_is_refused() -> None:
    record = Open(bytes(16), None, "anchor", bytes(32), 1024, bytes(16), Version(0, 0))
    with pytest.raises(IntegrityError, match="manifest: signature"):
        Manifest.from_signed(record.to_signed(KEY), KEY.public)
    with pytest.raises(IntegrityError, match="open record: signature"):
        Open.from_signed(record.to_signed(KEY), RunKey.generate().public)
    with pytest.raises(IntegrityError, match="over the limit"):
        Open.from_signed(bytes(limits.MAX_SIGNED_BYTES + 1), KEY.public)


def test_open_record_matches_its_specified_bytes() -> None:
    """The bytes of docs/formats/delta-format.md, section 5, spelled out."""
    record = Open(b"A" * 16, Version(0, 1), "delta", b"L" * 32, 65536, b"R" * 16, Version(2, 300))
    assert record.body == (
        b"\x89"
        b"\xa8artifact\xc4\x10" + b"A" * 16 + b"\xa4base\x92\x00\x01"
        b"\xa6branch\x02"
        b"\xa4kind\xa5delta"
        b"\xa6layout\xc4\x20" + b"L" * 32 + b"\xa5piece\xce\x00\x01\x00\x00"
        b"\xa3run\xc4\x10" + b"R" * 16 + b"\xa4step\xcd\x01\x2c"
        b"\xa1v\x01"
    )
    signed = record.to_signed(KEY)
    assert signed == b"\x92\xc4" + bytes([len(record.body)]) + record.body + b"\xc4\x40" + KEY.sign(
        b"p2pcast open 1\0" + record.body
    )


def _sign(kind: type[Open | Batch | Manifest], body: bytes) -> bytes:
    return pack([body, KEY.sign(kind.domain + body)])


OPEN = msgpack.unpackb(Open(bytes(16), Version(0, 1), "delta", bytes(32), 1024, bytes(16), Version(0, 2)).body)
BATCH = msgpack.unpackb(Batch(bytes(16), (CellEntry(0, 3, 9, 1, 2),), 0, bytes(32), bytes(32), 0).body)
MANIFEST = msgpack.unpackb(
    Manifest(
        bytes(16), Version(0, 1), 1, 1, (), "delta", bytes(32), bytes(32), 9, 1, bytes(16), 0, Version(0, 2)
    ).body
)  # fmt: skip
FILE = ["a", 1, bytes(32), 9]

BAD: list[tuple[type[Open | Batch | Manifest], dict[str, Any], str, Any, str]] = [
    (Open, OPEN, "artifact", bytes(15), "artifact"),
    (Open, OPEN, "artifact", "x" * 16, "artifact"),
    (Open, OPEN, "base", None, "base"),
    (Open, OPEN, "base", [0, 2], "base"),
    (Open, OPEN, "base", [0, -1], "base"),
    (Open, OPEN, "base", [True, 1], "base"),
    (Open, OPEN, "branch", -1, "branch"),
    (Open, OPEN, "branch", 2**32, "branch"),
    (Open, OPEN, "branch", 0.0, "branch"),
    (Open, OPEN, "branch", False, "branch"),
    (Open, OPEN, "step", 2**63, "step"),
    (Open, OPEN, "kind", "patch", "kind"),
    (Open, OPEN, "kind", "anchor", "base"),
    (Open, OPEN, "kind", b"delta", "kind"),
    (Open, OPEN, "layout", bytes(33), "layout"),
    (Open, OPEN, "piece", 1000, "piece"),
    (Open, OPEN, "piece", 512, "piece"),
    (Open, OPEN, "piece", 1 << 23, "piece"),
    (Open, OPEN, "run", None, "run"),
    (Open, OPEN, "v", 3, "v: formats up to 2 can be read: a newer release"),
    (Open, OPEN, "v", True, "v: formats up to 2 can be read: not a format"),
    (Open, OPEN, "more", 1, "more"),
    (Batch, BATCH, "cells", 3, "cells"),
    (Batch, BATCH, "cells", [[0, 3, 9, 1]], r"cells\[0\]"),
    (Batch, BATCH, "cells", [[0, 0, 9, 1, 2]], "codec 0"),
    (Batch, BATCH, "cells", [[0, 5, 9, 1, 2]], "codec 5"),
    (Batch, BATCH, "cells", [[0, 3, 0, 1, 2]], "payload of 0"),
    (Batch, BATCH, "cells", [[0, 3, 2**50, 1, 2]], "payload"),
    (Batch, BATCH, "cells", [[-1, 3, 9, 1, 2]], r"cells\[0\]"),
    (Batch, BATCH, "cells", [[0, 3, 9, 1, 2.5]], r"cells\[0\]"),
    (Batch, BATCH, "cells", [[0, 3, 9, 1, 2]] * (limits.BATCH_CELLS + 1), "msgpack within its limits"),
    (Batch, BATCH, "hashes", bytes(33), "hashes"),
    (Batch, BATCH, "hashes", bytes(32 * (limits.BATCH_PIECES + 1)), "hashes"),
    (Batch, BATCH, "first", 2**60, "first"),
    (Batch, BATCH, "prev", b"", "prev"),
    (Batch, BATCH, "seq", None, "seq"),
    (Manifest, MANIFEST, "files", [["/etc/passwd", 1, bytes(32), 9]], "path"),
    (Manifest, MANIFEST, "files", [["a", limits.MAX_SMALL_FILE_BYTES + 1, bytes(32), 9]], "bytes"),
    (Manifest, MANIFEST, "files", [["a", 1, bytes(31), 9]], "hash"),
    (Manifest, MANIFEST, "files", [["a", 1, bytes(32), -9]], "offset"),
    (Manifest, MANIFEST, "files", [FILE, FILE], "twice"),
    (Manifest, MANIFEST, "files", [["b", 1, bytes(32), 9], FILE], "sorted"),
    (Manifest, MANIFEST, "files", [FILE, ["a/b", 1, bytes(32), 9]], "below another file"),
    (
        Manifest,
        MANIFEST,
        "files",
        [[f"a{k:02}", limits.MAX_SMALL_FILE_BYTES, bytes(32), None] for k in range(17)],
        "together",
    ),
    (Manifest, MANIFEST, "state", 2**64 - 1 + 0.5, "state"),
    (Manifest, MANIFEST, "log", 2**60, "log"),
    (Manifest, MANIFEST, "last", bytes(31), "last"),
    (Manifest, MANIFEST, "batches", -1, "batches"),
]


@pytest.mark.parametrize(("kind", "good", "field", "value", "words"), BAD)
def test_each_invalid_field_is_named(kind: Any, good: dict[str, Any], field: str, value: Any, words: str) -> None:
    kind.from_signed(_sign(kind, pack(good)), KEY.public)  # valid without the change
    with pytest.raises(IntegrityError, match=words):
        kind.from_signed(_sign(kind, pack({**good, field: value})), KEY.public)


def test_empty_batch_is_refused() -> None:
    with pytest.raises(IntegrityError, match="without pieces and without cells"):
        Batch.from_signed(_sign(Batch, pack({**BATCH, "cells": [], "hashes": b""})), KEY.public)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x80",
        b"\x93\x01\x02\x03",
        b"\xdf\xff\xff\xff\xff",  # a map of 4 G entries
        b"\xdd\xff\xff\xff\xff",  # a list of 4 G entries
        b"\x91" * 2000,  # deeply nested lists
        b"\xc7\x01\x05x",  # an extension type
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\x81\xa1v\xa2\xff\xff",  # text that is not UTF-8
        msgpack.packb(dict(reversed(OPEN.items()))),  # keys out of order
        pack(OPEN) + b"\0",
        pack(OPEN)[:-1],
        pack(OPEN).replace(b"\xa1v\x01", b"\xa1v\xcc\x01"),  # an integer in a longer encoding than necessary
        b"\x8a" + pack(OPEN)[1:] + b"\xa1v\x01",  # a repeated key
    ],
)
def test_bodies_that_are_not_canonical_are_refused(body: bytes) -> None:
    with pytest.raises(IntegrityError, match="open record"):
        Open.from_signed(_sign(Open, body), KEY.public)


@pytest.mark.parametrize(
    "path",
    [
        "", "/a", "a/", "a//b", ".", "..", "a/../b", "./a", ".hidden", "a/.git/config", "a\\b", "a\0b", "a\nb",
        "a\x1b[2J", "\ud800", "a" * 256, "b/" * 300 + "b", "model.safetensors", "x/Y.SafeTensors",
        "model.safetensors.index.json", "STABLE", "latest", "p2pcast-anchor", 7, None,
    ],
)  # fmt: skip
def test_unsafe_paths_are_refused(path: Any) -> None:
    assert path_fault(path) is not None


@pytest.mark.parametrize("path", ["config.json", "a/b/c.txt", "ünï.json", "a b", "stable", "x/STABLE"])
def test_safe_paths_are_accepted(path: str) -> None:
    assert path_fault(path) is None


def test_key_file_is_created_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = RunKey.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert RunKey.load_or_create(path).public == key.public
    assert len(run_id(key.public)) == 16
    assert path.read_bytes().hex() not in repr(key)
    path.chmod(0o640)
    with pytest.raises(LocalError, match="chmod 600"):
        RunKey.load_or_create(path)
    path.chmod(0o600)
    for wrong in (b"", b"x" * 31, b"x" * 33):
        path.write_bytes(wrong)
        with pytest.raises(LocalError, match="not 32 bytes"):
            RunKey.load_or_create(path)
    with pytest.raises(LocalError, match="no such file or folder"):
        RunKey.load_or_create(tmp_path / "none" / "key")


def test_racing_creators_agree_on_one_key(tmp_path: Path) -> None:
    found: list[bytes] = []
    gate = threading.Barrier(8)

    def create() -> None:
        gate.wait()
        found.append(RunKey.load_or_create(tmp_path / "key").public)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert os.listdir(tmp_path) == ["key"]
