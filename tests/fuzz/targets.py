"""Fuzz targets: every decoder of external bytes, and the encoders of cells. A target takes any bytes. It either refuses
them with an IntegrityError, which is ignored here, or checks properties of the result. Any other error is a fault.

Seeds come from encoders and the golden files. ``corpus/`` holds inputs found by runs with ``--coverage``, which reach
more of a decoder than the seeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import rollout_targets
from wire_targets import check_install, check_stream, check_text, install_seeds, stream_seeds, text_seeds

from p2pcast.artifact.artifact_file import FOOTER_BYTES, HEADER, P2pdFile, Tail, footer
from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.canonical import pack
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import Batch, Manifest, Open
from p2pcast.checkpoint.safetensors_file import header_for, parse_header
from p2pcast.codec.cell import CODECS, CONTEXT, DENSE, FLAT, RAW, Patch, apply, decode, digest, encode
from p2pcast.codec.digest import MASK
from p2pcast.codec.layout import Cell, Layout, Tensor
from p2pcast.codec.squash_cell import squash
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from p2pcast.state.patch_file import PatchFile, PatchWriter

TESTS = Path(__file__).parents[1]
CORPUS = Path(__file__).parent / "corpus"
WORDS = 1500
WIDTHS = [1, 2, 4, 8]
"""Bytes of the words in cells. Kernels are compiled for each width, which takes longer than a short run."""
RECORDS: tuple[Any, ...] = (Open, Batch, Manifest)
KEY = RunKey(bytes(range(32)))
"""The key of the golden delta file, for signing changed records: so fuzzing reaches the code behind the signature."""


@dataclass(frozen=True, slots=True)
class Target:
    """``seeds``: accepted inputs. ``check``: takes any input. ``memory``: allowed bytes for any input, and for each
    byte of the input.
    """

    seeds: Callable[[], list[bytes]]
    check: Callable[[bytes], None]
    memory: tuple[int, int]


# -- cells: the first byte chooses one


@cache
def cells() -> list[tuple[Cell, np.ndarray, np.ndarray]]:
    """(cell, old words, new words): with columns and without, sparse and dense changes."""
    found = []
    for number, (width, row_words) in enumerate((w, r) for w in WIDTHS for r in (0, 50)):
        draw = np.random.default_rng(number)
        values = draw.normal(0, 0.02, WORDS)
        old = {
            1: lambda v: (v.astype("<f2").view("<u2") >> 8).astype("<u1"),
            2: lambda v: (v.astype("<f4").view("<u4") >> 16).astype("<u2"),
            4: lambda v: v.astype("<f4").view("<u4"),
            8: lambda v: v.view("<u8"),
        }[width](values)
        new = old.copy()
        chosen = draw.random(WORDS) < (0.05 if row_words else 0.3)
        steps = np.where(draw.random(WORDS) < 0.9, 1, draw.integers(1, 1 << min(8 * width - 1, 40), WORDS))
        new[chosen] += (steps * draw.choice([-1, 1], WORDS)).astype(np.int64).astype(new.dtype)[chosen]
        found.append((Cell(1, 3, 1000, WORDS, width, 0, row_words), old, new))
    return found


def cell_seeds(name: str) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        made = [encode(cell, old, new, codec=name) for cell, old, new in cells()]
        return [bytes([number]) + coded.payload for number, coded in enumerate(made) if coded is not None]

    return seeds


def link_seeds() -> list[bytes]:
    """Links that lead back to the start of the first link, or elsewhere."""
    back = [coded for name in ("flat", "dense", "raw") for coded in cell_seeds(name)()]
    away = [encode(cell, old, np.roll(new, 1), codec="flat") for cell, old, new in cells()]
    return back + [bytes([number]) + one.payload for number, one in enumerate(away) if one is not None]


def check_cell(codec: int) -> Callable[[bytes], None]:
    def check(data: bytes) -> None:
        cell, old, _ = cells()[(data[0] if data else 0) % len(cells())]
        try:
            found = CODECS[codec].decode(cell, data[1:], old, audit=True)
        except IntegrityError:
            return
        before = digest(old, cell)
        if found.held is not None:
            assert found.held == before
        if found.positions is None:
            assert (found.words.size, found.words.dtype) == (cell.words, old.dtype)
            return
        places = found.positions.astype(np.int64)
        assert places.size == found.words.size > 0
        assert places.min() >= 0
        assert places.max() < cell.words
        assert (np.diff(places) > 0).all()
        new = old.copy()
        new[places] = found.words
        assert (new[places] != old[places]).all()
        assert found.delta is not None
        assert (before + found.delta) & MASK == digest(new, cell)

    return check


def encoder_seeds() -> list[bytes]:
    return [
        bytes([number, 200 - number]) + old[:50].tobytes() + new[:50].tobytes()
        for number, (_, old, new) in enumerate(cells())
    ]


def check_encoders(data: bytes) -> None:
    """Encoders are fuzzed because their kernels write into buffers of a computed size. Two bytes choose width, columns
    and number of words; the rest, repeated, is the words before and after.
    """
    kind, count = (data[0], 1 + 7 * data[1]) if len(data) > 2 else (0, 1)
    cell, *_ = cells()[kind % len(cells())]
    cell = replace(cell, words=count)
    dtype = np.dtype(f"<u{cell.word_bytes}")
    text = data[2:] or b"\0"
    both = np.frombuffer((text * (2 * count * dtype.itemsize // len(text) + 1))[: 2 * count * dtype.itemsize], dtype)
    old, new = both[:count].copy(), both[count:].copy()
    if kind >= 128:  # near each other, as in training
        new = old + (new % 3 - 1 if kind < 192 else new % 2).astype(dtype)
    for name in ("auto", "flat", "dense", "context"):
        coded = encode(cell, old, new, codec=name)
        if coded is None:
            assert (old == new).all()
            return
        patch = decode(cell, coded.codec, coded.payload, old, coded.before, coded.after)
        target = old.copy()
        apply(patch, target)
        assert (target == new).all()


def check_squash(data: bytes) -> None:
    """Two links without their base, the second as fuzzed."""
    cell, old, new = cells()[(data[0] if data else 0) % len(cells())]
    first = encode(cell, new, old, codec="flat")
    assert first is not None
    for codec in (FLAT, DENSE, RAW):
        try:
            found = squash(
                cell, [(FLAT, first.payload, first.before, first.after), (codec, data[1:], first.after, first.before)]
            )
        except IntegrityError:
            continue
        if found is not None:
            CODECS[found.codec].decode(cell, found.payload, new, audit=False)


# -- documents and files


@cache
def golden() -> tuple[bytes, Tail]:
    """The golden delta file's log and tail."""
    whole = (TESTS / "p2pcast" / "artifact" / "golden" / "tiny.p2pd").read_bytes()
    size = int.from_bytes(whole[-FOOTER_BYTES:][:8], "little")
    begin = len(whole) - FOOTER_BYTES - size
    return whole[len(HEADER) : begin], Tail.from_bytes(whole[begin:-FOOTER_BYTES], "golden")


def layouts() -> list[Layout]:
    several = [
        Tensor("a.weight", "BF16", (30, 100)),
        Tensor("b", "F32", ()),
        Tensor("ß", "F8_E4M3", (7, 0, 3)),
        Tensor("m", "F4", (9,)),
    ]
    return [Layout([]), Layout(several, cell_words=500, cuts={1: [3, 1000]}), Layout.from_document(golden()[1].layout)]


def check_layout(data: bytes) -> None:
    try:
        layout = Layout.from_document(data)
    except IntegrityError:
        return
    assert layout.document == data
    words = sum(tensor.words for tensor in layout.tensors)
    if words <= 1000 * layout.cell_words and words <= 1 << 20:
        assert sum(cell.words for cell in layout.cells) == words
        assert all(cell.words > 0 for cell in layout.cells)


def file_seeds() -> list[bytes]:
    log, tail = golden()
    return [len(log).to_bytes(2, "little") + log + tail.to_bytes()]


def check_file(data: bytes) -> None:
    """Two bytes give the end of the log; header and footer are correct, so that the bytes in between are decoded."""
    size = int.from_bytes(data[:2], "little")
    log, tail = data[2 : 2 + size], data[2 + size :]
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, HEADER + log + tail + footer(tail))
        try:
            with P2pdFile.open(f"/proc/self/fd/{fd}") as file:
                file.verify_pieces()
                for placed in file.assembly.directory:
                    assert len(file.read_cell(placed)) == placed.bytes
        except IntegrityError:
            return
    finally:
        os.close(fd)


def record_seeds() -> list[bytes]:
    tail = golden()[1]
    opened = Open.from_signed(tail.open, KEY.public).body
    batches = [Batch.from_signed(one, KEY.public).body for one in tail.batches]
    manifest = Manifest.from_signed(tail.manifest, KEY.public).body
    rows = [(1, body) for body in batches] + [(2, manifest), (0, opened)]
    return [b"".join(_framed(*row) for row in order) for order in (rows, rows[::-1], rows[:1])]


def _framed(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + len(body).to_bytes(2, "little") + body


def check_records(data: bytes) -> None:
    """Records of any kind in any order, all signed. (Kind, u16 length, body)*"""
    tail = golden()[1]
    assembly = Assembly(tail.open, KEY.public, Layout.from_document(tail.layout))
    at = 0
    while at + 3 <= len(data):
        kind, size = RECORDS[data[at] % 3], int.from_bytes(data[at + 1 : at + 3], "little")
        body = data[at + 3 : at + 3 + size]
        at += 3 + size
        signed = pack([body, KEY.sign(kind.domain + body)])
        try:
            record = kind.from_signed(signed, KEY.public)
        except IntegrityError:
            continue
        assert record.body == body
        try:
            if kind is Batch:
                assembly.add_batch(signed)
            elif kind is Manifest:
                assembly.add_manifest(signed)
        except IntegrityError:
            continue
    held = assembly.directory
    assert len({placed.cell for placed in held}) == len(held)
    assert all(one.offset + one.bytes == other.offset for one, other in pairwise(held))


def header_seeds() -> list[bytes]:
    return [layout.nbytes.to_bytes(2, "little") + header_for(layout)[8:] for layout in layouts()]


def check_header(data: bytes) -> None:
    """Two bytes: length of the data section."""
    size, text = int.from_bytes(data[:2], "little"), data[2:]
    try:
        header = parse_header(text, 8 + len(text) + size, "fuzz")
    except IntegrityError:
        return
    assert sum(tensor.nbytes for tensor, _ in header.tensors) == size
    assert all(0 <= begin <= size - tensor.nbytes for tensor, begin in header.tensors)


@cache
def patch_layout() -> Layout:
    return Layout([Tensor("a", "BF16", (30, 100)), Tensor("b", "F32", (40,)), Tensor("c", "U8", (9,))], cell_words=1000)


def patch_seeds() -> list[bytes]:
    path = Path(f"/dev/shm/p2pcast-fuzz-{os.getpid()}.p2pp")
    writer = PatchWriter(path, patch_layout(), Version(0, 1), Version(0, 2))
    draw = np.random.default_rng(0)
    for cell in patch_layout().cells[:-1]:
        words = draw.integers(0, 256, cell.words).astype(f"<u{cell.word_bytes}")
        positions = np.flatnonzero(draw.random(cell.words) < 0.02).astype(np.uint32)
        dense = cell.index == 1 or not positions.size
        writer.add(
            Patch(
                cell.index,
                None if dense else positions,
                words if dense else words[positions],
                1,
                2,
                positions.size or 1,
            )
        )
    writer.finish(7)
    try:
        return [path.read_bytes()]
    finally:
        path.unlink()


def check_patch(data: bytes) -> None:
    fd = os.memfd_create("fuzz")
    try:
        os.write(fd, data)
        try:
            patch = PatchFile.open_fd(fd, patch_layout())
        except IntegrityError:
            return
        for change in patch.cells:
            cell = patch_layout().cells[change.cell]
            if change.positions is None:
                assert change.words.size == cell.words
            else:
                assert change.words.size == change.positions.size
                assert (np.diff(change.positions.astype(np.int64)) > 0).all()
                assert int(change.positions.max(initial=0)) < cell.words
    finally:
        os.close(fd)


CELL_MEMORY = (1 << 20, 200)
DOCUMENT_MEMORY = (2 << 20, 400)
FRAME_MEMORY = (40 << 20, 400)
"""A frame of a rollout record may unpack to 16 MiB, which are then read."""
"""A tensor takes some ten bytes in a document, and some hundreds as objects."""
TARGETS: dict[str, Target] = {
    "context": Target(cell_seeds("context"), check_cell(CONTEXT), CELL_MEMORY),
    "flat": Target(cell_seeds("flat"), check_cell(FLAT), CELL_MEMORY),
    "dense": Target(cell_seeds("dense"), check_cell(DENSE), CELL_MEMORY),
    "encoders": Target(encoder_seeds, check_encoders, CELL_MEMORY),
    "squash": Target(link_seeds, check_squash, CELL_MEMORY),
    "layout": Target(lambda: [layout.document for layout in layouts()], check_layout, DOCUMENT_MEMORY),
    "p2pd": Target(file_seeds, check_file, DOCUMENT_MEMORY),
    "records": Target(record_seeds, check_records, DOCUMENT_MEMORY),
    "safetensors": Target(header_seeds, check_header, DOCUMENT_MEMORY),
    "patch": Target(patch_seeds, check_patch, DOCUMENT_MEMORY),
    "stream": Target(stream_seeds, check_stream, DOCUMENT_MEMORY),
    "install": Target(install_seeds, check_install, DOCUMENT_MEMORY),
    "text": Target(text_seeds, check_text, DOCUMENT_MEMORY),
    "rollouts": Target(rollout_targets.record_seeds, rollout_targets.check_record, FRAME_MEMORY),
    "request": Target(rollout_targets.request_seeds, rollout_targets.check_request, DOCUMENT_MEMORY),
    "api": Target(rollout_targets.api_seeds, rollout_targets.check_api, DOCUMENT_MEMORY),
}


def corpus(name: str) -> list[bytes]:
    """The seeds, and the stored inputs of that name: one a line, in hex."""
    kept = CORPUS / f"{name}.hex"
    lines = kept.read_text().split() if kept.exists() else []
    return TARGETS[name].seeds() + [bytes.fromhex(line) for line in lines]
