"""An anchor's folder: a whole state as a Hugging Face checkpoint, and the record of its signatures
(docs/formats/delta-format.md, section 4).

Guarantees: the record is written last, so a folder without one is incomplete. A file is read only if its signatures and
its sealed size match. The store chooses a folder's name, and when the folder gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy.typing as npt

from p2pcast.artifact.artifact_file import Tail
from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import OWN, RAW, Manifest, Open
from p2pcast.checkpoint.folder import SINGLE, write_folder
from p2pcast.checkpoint.safetensors_file import header_for
from p2pcast.codec.digest import digest
from p2pcast.codec.layout import Cell, Layout
from p2pcast.files import disk
from p2pcast.files.atomic_files import atomic_write, explained
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError
from p2pcast.store.anchor_log import FILES_NAME, AnchorLog

RECORD = "p2pcast-anchor"
SYNC_BYTES = 16 * limits.MIB
"""Bytes between two syncs of an anchor that is written during live traffic. A delta that is sealed meanwhile waits at
most until this much is on disk.
"""


def write(
    folder: Path,
    key: RunKey,
    record: Open,
    layout: Layout,
    words_of: Callable[[Cell], npt.NDArray[Any]],
    digests: npt.NDArray[Any],
    files: Mapping[str, bytes],
    version_hash: bytes | None,
) -> Tail:
    """Write everything except the record, and return the tail for it.

    ``digests``: one u64 per cell; ``version_hash``: as in ``Manifest``. The tail of an anchor that seals its version
    also confirms it, since the folder is invisible before it is durable. Raises LocalError, and IntegrityError if the
    words from ``words_of`` do not match their digest.
    """
    packer = Packer(key, record, layout)
    batches: list[bytes] = []

    def fed(cell: Cell) -> npt.NDArray[Any]:
        # This runs on one thread, cell by cell: the packer hashes the bytes as they are written.
        words = words_of(cell)
        if digest(words, cell) != int(digests[cell.index]):
            raise IntegrityError(f"{folder}: cell {cell.index} of version {record.version} does not match its digest")
        packer.add_cell(cell.index, RAW, words.data.cast("B"), 0, int(digests[cell.index]))
        while (batch := packer.take_batch()) is not None:
            batches.append(batch)
        return words

    write_folder(folder, layout, fed, files, sync_bytes=SYNC_BYTES)
    for path, contents in files.items():
        packer.add_file(path, contents, len(contents), blake3.blake3(contents).digest())
    *rest, manifest = packer.seal(int(digests.sum(dtype="u8")), version_hash=version_hash)
    durable = packer.durable() if version_hash == OWN else b""
    return Tail([*batches, *rest], key.public, layout.document, manifest, packer.open_signed, durable)


def finish(folder: Path, log: AnchorLog, manifest: Manifest) -> None:
    """Complete a folder received through ``log``, except for the record. Raises LocalError and IntegrityError."""
    for file in manifest.files:
        target = folder / file.path
        with explained("write", target):
            disk.make_folder(target.parent)
        atomic_write(target, log.read(file.offset or 0, file.size))
    log.sync()
    with explained("write", folder):
        disk.unlink(folder / FILES_NAME, missing_ok=True)


def write_record(folder: Path, tail: bytes) -> None:
    atomic_write(folder / RECORD, tail)


def read_record(folder: Path, run_key: bytes | None) -> Assembly:
    """Return the signed records. ``run_key``: None accepts any run's. Raises LocalError and IntegrityError."""
    where = folder / RECORD
    with explained("read", where):
        tail = Tail.from_bytes(where.read_bytes(), str(where))
    if run_key is not None and tail.key != run_key:
        raise IntegrityError(f"{folder}: signed by another run's key")
    return tail.assembly(Layout.from_document(tail.layout))


def read(folder: Path, run_key: bytes) -> Assembly:
    """Like ``read_record``, but also check that every file exists and has its sealed size."""
    assembly = read_record(folder, run_key)
    assert assembly.manifest is not None
    weights = SINGLE, len(header_for(assembly.layout)) + assembly.layout.nbytes
    for name, size in (weights, *((file.path, file.size) for file in assembly.manifest.files)):
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise IntegrityError(
                f"{path}: missing, or not of its sealed size; remove {folder}, and the anchor is fetched again"
            )
    return assembly
