"""Small artifacts of either kind, made by the real packer and received into a store."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Sequence
from pathlib import Path

import blake3

from p2pcast.artifact import Assembly, Open, Packer, RunKey, run_id
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.version import Version
from p2pcast.store.artifact_journal import JournalKind
from p2pcast.store.artifact_store import ArtifactStore, Stored

KEY = RunKey(bytes([5]) * 32)
LAYOUT = Layout([Tensor("a", "BF16", (20, 100)), Tensor("b", "F32", ())], cell_words=500)
PIECE = 1024


def made(
    kind: str, step: int, *, files=(("conf.json", 300), ("sub/tok", 0), ("tok.model", 2000)), base: int | None = None
):
    """(open record, signed batches, manifest, log)."""
    draw = random.Random(f"{kind} {step}")
    record = Open(
        draw.randbytes(16),
        None if kind == "anchor" else Version(0, step - 1 if base is None else base),
        kind,
        LAYOUT.layout_id,
        PIECE,
        run_id(KEY.public),
        Version(0, step),
    )
    packer, log, state = Packer(KEY, record, LAYOUT), b"", 0
    for cell in LAYOUT.cells:
        payload = draw.randbytes(cell.nbytes if kind == "anchor" else draw.randrange(1, 90))
        log += payload
        after = draw.getrandbits(60)
        state += after
        packer.add_cell(cell.index, 1 if kind == "anchor" else 3, payload, 0 if kind == "anchor" else 1, after)
    for path, size in files:
        contents = draw.randbytes(size)
        packer.add_file(path, contents, size, blake3.blake3(contents).digest())
        log += contents
    *batches, manifest = packer.seal(state % 2**64)
    return packer.open_signed, batches, manifest, log


def assembled(open_signed, batches, manifest) -> Assembly:
    assembly = Assembly(open_signed, KEY.public, LAYOUT)
    for batch in batches:
        assembly.add_batch(batch)
    assembly.add_manifest(manifest)
    return assembly


def put(
    store: ArtifactStore, kind: str, step: int, *, order: random.Random | None = None, **more
) -> tuple[Stored, bytes]:
    """Receive an artifact piece by piece, in any order, and seal it."""
    *signed, log = made(kind, step, **more)
    assembly = assembled(*signed)
    pieces = list(range(assembly.pieces))
    if order is not None:
        order.shuffle(pieces)
    out = store.begin(assembly.open, LAYOUT)
    for piece in pieces:
        out.write(piece * PIECE, [memoryview(log)[piece * PIECE : (piece + 1) * PIECE]])
    assert out.read(0, len(log)) == log
    stored = store.seal(out, assembly)
    assert out.read(0, len(log)) == log, "still readable"
    out.close()
    return stored, log


def begun(store: ArtifactStore, kind: str, pieces: Sequence[int]) -> tuple[Assembly, bytes]:
    """A receiver that stored all records and these pieces, and whose process died. (Assembly, log.)"""
    open_signed, batches, manifest, log = made(kind, 1)
    assembly = assembled(open_signed, batches, manifest)
    part = store.begin(assembly.open, LAYOUT, resumable=True)
    part.note([(JournalKind.OPEN, open_signed), *((JournalKind.BATCH, b) for b in batches)])
    part.note([(JournalKind.MANIFEST, manifest)])
    for index in pieces:
        part.write(index * PIECE, [log[index * PIECE : (index + 1) * PIECE]])
    part.close()
    return assembly, log


def again(store: ArtifactStore) -> ArtifactStore:
    return ArtifactStore(store.root, KEY.public)


def open_files(folder: Path) -> list[str]:
    """This process's open files in a folder."""
    links = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(entry.path))
    return [link for link in links if link.startswith(str(folder))]
