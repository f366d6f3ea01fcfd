"""An anchor's folder: a whole state as a Hugging Face checkpoint, and beside it the record of what was signed (docs/delta-format.md, section 4).

Promises: the record is written last, so a folder without one is nobody's; nothing is read whose signatures have not matched, or that is not of the size that
was sealed. Which name a folder has, and when, is the store's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import blake3
import numpy.typing as npt

from p2pcast import limits
from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.p2pd import Tail
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.records import OWN, RAW, Manifest, Open
from p2pcast.artifact.run_key import RunKey
from p2pcast.checkpoint.folder import SINGLE, write_folder
from p2pcast.checkpoint.safetensors_file import header_for
from p2pcast.codec.digest import digest
from p2pcast.codec.layout import Cell, Layout
from p2pcast.errors import IntegrityError
from p2pcast.store import disk
from p2pcast.store.anchor_log import FILES_NAME, AnchorLog
from p2pcast.store.files import atomic_write, explained

RECORD = "p2pcast-anchor"
SYNC_BYTES = 16 * limits.MIB
"""Of an anchor that is written beside live traffic: a delta that is sealed meanwhile waits for no more to reach the disk."""


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
    """All but the record, which the tail is. ``digests``: u64 a cell; ``version_hash``: as in ``Manifest``; of an anchor that seals its version the tail confirms it, since
    nobody sees the folder before it is durable. Raises LocalError, and IntegrityError if ``words_of`` lies."""
    packer = Packer(key, record, layout)
    batches: list[bytes] = []

    def fed(cell: Cell) -> npt.NDArray[Any]:
        # One thread, cells in order: the packer hashes what is written.
        words = words_of(cell)
        if digest(words, cell) != int(digests[cell.index]):
            raise IntegrityError(f"{folder}: cell {cell.index} of version {record.version} is not what its digest says")
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
    """Of one that came in through ``log``: all but the record. Raises LocalError, IntegrityError."""
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
    """What was signed; ``run_key`` None: by whichever run. Raises LocalError, IntegrityError."""
    where = folder / RECORD
    with explained("read", where):
        tail = Tail.from_bytes(where.read_bytes(), str(where))
    if run_key is not None and tail.key != run_key:
        raise IntegrityError(f"{folder}: signed by another run's key")
    return tail.assembly(Layout.from_document(tail.layout))


def read(folder: Path, run_key: bytes) -> Assembly:
    """As ``read_record``, and every file is there in its size."""
    assembly = read_record(folder, run_key)
    assert assembly.manifest is not None
    weights = SINGLE, len(header_for(assembly.layout)) + assembly.layout.nbytes
    for name, size in (weights, *((file.path, file.size) for file in assembly.manifest.files)):
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise IntegrityError(f"{path}: missing, or not of the size that was sealed; remove {folder} to have it fetched again")
    return assembly
