from __future__ import annotations

import os
import random
from pathlib import Path

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.artifact import Open, RunKey, run_id
from p2pcast.artifact.artifact_file import FOOTER_BYTES, HEADER, P2pdFile, P2pdWriter, Tail, footer
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version

GOLDEN = Path(__file__).parent / "golden" / "tiny.p2pd"
KEY = RunKey(bytes(range(32)))
LAYOUT = Layout([Tensor("a", "BF16", (30, 100)), Tensor("b", "F32", ())], cell_words=500)
FILES = {"config.json": b'{"a": 1}', "sub/vocab.txt": b"word\n" * 300}


def _write(path: Path, *, seed: int = 0, cells: int = 6) -> Path:
    """Six cells over five pieces of 1 KiB, two files in the log and one in the base."""
    draw = random.Random(seed)
    opened = Open(
        b"artifact-id-0001", Version(0, 1), "delta", LAYOUT.layout_id, 1024, run_id(KEY.public), Version(0, 2)
    )
    with P2pdWriter(path, KEY, opened, LAYOUT) as writer:
        for cell in range(1, cells + 1):
            writer.add_cell(cell, 3, draw.randbytes(500 + cell), cell, 2 * cell)
        for name, contents in FILES.items():
            writer.add_file(name, contents)
        writer.add_file("held.json", b"{}", in_base=True)
        assert writer.seal(77) == os.path.getsize(path)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _write(tmp_path_factory.mktemp("p2pd") / "a.p2pd").read_bytes()


def _open_all(path: Path) -> None:
    with P2pdFile.open(path) as file:
        file.verify_pieces()


def test_round_trip(tmp_path: Path) -> None:
    draw = random.Random(0)
    path = _write(tmp_path / "a.p2pd")
    assert os.listdir(tmp_path) == ["a.p2pd"]
    with P2pdFile.open(path, KEY.public) as file:
        assert file.layout == LAYOUT
        assert file.public == KEY.public
        assert file.manifest.state == 77
        assert file.nbytes == path.stat().st_size
        for placed in file.assembly.directory:
            assert file.read_cell(placed) == draw.randbytes(500 + placed.cell)
        assert {f.path: file.read_file(f) for f in file.manifest.files if f.offset is not None} == FILES
        assert [f.path for f in file.manifest.files if f.offset is None] == ["held.json"]
        assert file.read(0, 0) == b""
        file.verify_pieces()


def test_golden_file_is_read_and_rewritten(tmp_path: Path) -> None:
    """The bytes are pinned: reading gives the written values, and writing these again gives the same file."""
    _open_all(GOLDEN)
    assert _write(tmp_path / "again.p2pd").read_bytes() == GOLDEN.read_bytes()


def test_artifact_without_pieces(tmp_path: Path) -> None:
    opened = Open(bytes(16), Version(0, 1), "delta", LAYOUT.layout_id, 1024, run_id(KEY.public), Version(0, 2))
    with P2pdWriter(tmp_path / "a.p2pd", KEY, opened, LAYOUT) as writer:
        writer.seal(5)
    with P2pdFile.open(tmp_path / "a.p2pd") as file:
        assert file.assembly.pieces == 0
        file.verify_pieces()


def test_unsealed_file_is_removed(tmp_path: Path) -> None:
    opened = Open(bytes(16), Version(0, 1), "delta", LAYOUT.layout_id, 1024, run_id(KEY.public), Version(0, 2))
    with P2pdWriter(tmp_path / "a.p2pd", KEY, opened, LAYOUT) as writer:
        writer.add_cell(0, 3, b"x", 0, 0)
    assert os.listdir(tmp_path) == []
    with pytest.raises(LocalError, match="cannot write"):
        P2pdWriter(tmp_path / "none" / "a.p2pd", KEY, opened, LAYOUT)


def test_another_key_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.p2pd")
    with pytest.raises(IntegrityError, match="signed by another key"):
        P2pdFile.open(path, RunKey.generate().public)


def test_every_truncation_is_reported_as_one(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "a.p2pd"
    for cut in {*range(0, len(whole), 97), *range(60), *range(len(whole) - 60, len(whole))}:
        path.write_bytes(whole[:cut])
        with pytest.raises(IntegrityError, match="cut short" if cut else "not a"):
            P2pdFile.open(path)


def test_any_flipped_bit_is_detected(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "a.p2pd"
    path.write_bytes(whole)
    with path.open("r+b", buffering=0) as file:
        for at in {*range(24), *range(0, len(whole), 3), *range(len(whole) - FOOTER_BYTES, len(whole))}:
            byte = whole[at]
            os.pwrite(file.fileno(), bytes([byte ^ (1 << at % 8)]), at)
            with pytest.raises(IntegrityError, match=r"damaged|not a \.p2pd|cut short|version"):
                _open_all(path)
            os.pwrite(file.fileno(), bytes([byte]), at)
    _open_all(path)


def test_damaged_piece_is_named_and_other_pieces_are_readable(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "a.p2pd"
    hurt = bytearray(whole)
    hurt[16 + 1024 + 5] ^= 8
    path.write_bytes(hurt)
    with P2pdFile.open(path) as file:
        assert len(file.read_cell(file.assembly.directory[0])) == 501
        with pytest.raises(IntegrityError, match=r"damaged: piece 1 \(bytes 1040 and on\)"):
            file.read_cell(file.assembly.directory[2])
        with pytest.raises(IntegrityError, match="piece 1"):
            file.verify_pieces()


def test_file_cut_short_during_reading_is_an_error(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "a.p2pd"
    path.write_bytes(whole)
    with P2pdFile.open(path) as file:
        os.truncate(path, 700)
        with pytest.raises(IntegrityError, match="piece 0"):
            file.read_cell(file.assembly.directory[0])


@pytest.mark.parametrize("contents", [b"", b"\0" * 100, b"PK\x03\x04" + bytes(200), b"{}", b"p2pX" + bytes(100)])
def test_other_file_types_are_reported_as_such(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "a").write_bytes(contents)
    with pytest.raises(IntegrityError, match=r"not a \.p2pd file"):
        P2pdFile.open(tmp_path / "a")


def test_later_version_is_reported_as_such(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "a").write_bytes(b"p2pd\x02" + whole[5:])
    with pytest.raises(IntegrityError, match="version 2"):
        P2pdFile.open(tmp_path / "a")
    with pytest.raises(LocalError, match="no such file"):
        P2pdFile.open(tmp_path / "none")
    with pytest.raises(LocalError, match="it is a folder"):
        P2pdFile.open(tmp_path)


def _tail(whole: bytes) -> Tail:
    size = int.from_bytes(whole[-FOOTER_BYTES : -FOOTER_BYTES + 8], "little")
    return Tail.from_bytes(whole[-FOOTER_BYTES - size : -FOOTER_BYTES], "t")


def _with_tail(whole: bytes, tail: bytes) -> bytes:
    size = int.from_bytes(whole[-FOOTER_BYTES : -FOOTER_BYTES + 8], "little")
    return whole[: -FOOTER_BYTES - size] + tail + footer(tail)


def test_tail_with_false_contents_and_right_hash_is_refused(tmp_path: Path, whole: bytes) -> None:
    """An attacker can compute the tail's hash, but not the run's signatures."""
    tail, path = _tail(whole), tmp_path / "a.p2pd"
    other = RunKey.generate()
    bad = [
        (tail._replace(batches=[]), "batches"),
        (tail._replace(batches=tail.batches * 2), "twice"),
        (tail._replace(key=other.public), "signature"),
        (tail._replace(key=bytes(31)), "key"),
        (tail._replace(layout=tail.layout[:-1]), "layout"),
        (tail._replace(layout=Layout(LAYOUT.tensors).document), "layout"),
        (tail._replace(open=tail.manifest), "open record: signature"),
        (tail._replace(manifest=b""), "manifest"),
    ]
    for lie, words in bad:
        path.write_bytes(_with_tail(whole, lie.to_bytes()))
        with pytest.raises(IntegrityError, match=words):
            P2pdFile.open(path)
    path.write_bytes(whole[:20] + whole[21:])
    with pytest.raises(IntegrityError, match="its log has"):
        P2pdFile.open(path)


@given(st.binary(max_size=200))
def test_tail_parser_refuses_random_bytes(noise: bytes) -> None:
    for data in (noise, b"\x85\xa7batches" + noise, b"\x85\xa7batches\x90\xa3key" + noise):
        with pytest.raises(IntegrityError):
            Tail.from_bytes(data, "t")


@pytest.mark.parametrize(
    "lie",
    [
        b"\x85\xa7batches\xdd\xff\xff\xff\xff",
        b"\x85\xa7batches\xdc\xff\xff",
        b"\x85\xa7batches\x91\xc6\xff\xff\xff\xff",
        b"\x85\xa7batches\x90\xa3key\xc4\x20" + bytes(32) + b"\xa6layout\xc6\x7f\xff\xff\xff",
    ],
)
def test_lengths_in_a_tail_are_not_trusted(lie: bytes) -> None:
    with pytest.raises(IntegrityError):
        Tail.from_bytes(lie, "t")


@given(st.integers(0, 2**32))
def test_truncated_tail_is_refused(seed: int) -> None:
    draw = random.Random(seed)
    tail = Tail(
        [draw.randbytes(draw.randrange(64, 400)) for _ in range(draw.randrange(20))], bytes(32), b"l" * 300, b"m", b"o"
    ).to_bytes()
    assert Tail.from_bytes(tail, "t").to_bytes() == tail
    with pytest.raises(IntegrityError):
        Tail.from_bytes(tail[: draw.randrange(len(tail))], "t")
    with pytest.raises(IntegrityError, match="left over"):
        Tail.from_bytes(tail + b"x", "t")


def test_huge_tail_is_not_read(tmp_path: Path) -> None:
    """A sparse file of 3 GiB that claims to be all tail."""
    path = tmp_path / "a.p2pd"
    with path.open("wb") as file:
        file.write(HEADER)
        file.truncate(3 * limits.GIB)
        file.seek(0, os.SEEK_END)
        size = 3 * limits.GIB - len(HEADER)
        file.write(size.to_bytes(8, "little") + blake3.blake3(b"").digest()[:8] + b"p2pd\x01\0\0\0")
    with pytest.raises(IntegrityError, match="does not fit"):
        P2pdFile.open(path)
