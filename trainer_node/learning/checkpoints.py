"""A learner's checkpoints: folders that hold all that an exact continuation needs, and their place in the ledger.

    FOLDER/EPOCH-STEP/    state/        tensors, sharded, in the format of torch.distributed.checkpoint
                          learner.json  position, batches, hashes of all files, the resolved configuration

Guarantees: a folder appears under its name only when every byte of it is durable. A damaged one is refused by the name
of its file. Learners of two epochs never write the same folder. The digest of ``learner.json`` names the checkpoint at
the ledger.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import blake3
import torch

from p2pcast.files import disk
from p2pcast.files.atomic_files import explained, fsync_dir, part_path
from p2pcast.ground.errors import IntegrityError, LocalError
from trainer_node.learning.trainer_ranks import TrainerRanks

FORMAT: Final = 1
DOCUMENT: Final = "learner.json"
STATE: Final = "state"
_NAME: Final = re.compile(r"(\d{6})-(\d{9})")
_READ_BYTES: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class CheckpointPosition:
    """``step``: optimiser steps in the checkpoint. ``batches``: ids of all batches since the checkpoint before."""

    epoch: int
    branch: int
    step: int
    batches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """``digest``: 32 bytes, which the ledger is told."""

    folder: Path
    position: CheckpointPosition
    config: Mapping[str, Any]
    files: Mapping[str, str]
    digest: bytes

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def write(
    folder: Path,
    position: CheckpointPosition,
    state: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    ranks: TrainerRanks,
) -> StoredCheckpoint:
    """Write a checkpoint; all ranks call. ``state``: this rank's share. Raises LocalError on every rank if a rank
    fails; then no folder has appeared.
    """
    import torch.distributed.checkpoint as dcp

    final = folder / f"{position.epoch:06d}-{position.step:09d}"
    part = Path(ranks.share(str(part_path(final))))
    error: str | None = None
    try:
        if ranks.first:
            with explained("create", part):
                disk.make_folder(final.parent, disk.USERS.folder)
                disk.mkdir(part)
        ranks.share(None)
        with _one_process_is_fine():
            dcp.save(
                dict(state),
                storage_writer=dcp.FileSystemWriter(part / STATE, sync_files=True),
                no_dist=ranks.count == 1,
            )
    except LocalError as failed:
        error = str(failed)
    except Exception as failed:  # noqa: BLE001 - storage writers raise errors of many kinds
        error = f"cannot write the checkpoint {final}: {type(failed).__name__}: {str(failed)[:300]}"
    failures = [found for found in ranks.gathered(error) if found is not None]
    try:
        if failures:
            raise LocalError(failures[0])
        sealed = ranks.share(_seal(part, final, position, config) if ranks.first else None)
    except LocalError:
        if ranks.first:
            with suppress(OSError):
                disk.remove_tree(part)
        raise
    assert sealed is not None
    return sealed


def _seal(part: Path, final: Path, position: CheckpointPosition, config: Mapping[str, Any]) -> StoredCheckpoint:
    """Hash all files, write the document, and rename the folder."""
    with explained("write", final):
        files = {str(p.relative_to(part)): _hash(p) for p in sorted((part / STATE).rglob("*")) if p.is_file()}
        body = {"format": FORMAT, **asdict(position), "files": files, "config": dict(config)}
        text = json.dumps(body, indent=1, sort_keys=True).encode()
        document = part / DOCUMENT
        fd = disk.create(document, os.O_WRONLY | os.O_EXCL, disk.USERS.file)
        try:
            disk.write(fd, document, text)
            disk.sync(fd, document)
        finally:
            os.close(fd)
        fsync_dir(part / STATE)
        fsync_dir(part)
        if final.exists():
            disk.remove_tree(final)  # of this epoch: an attempt whose answer was lost
        disk.rename(part, final)
        fsync_dir(final.parent)
    return StoredCheckpoint(final, position, config, files, blake3.blake3(text).digest())


def newest(folder: Path) -> StoredCheckpoint | None:
    """Return the checkpoint of the highest epoch, then the highest step. Raises LocalError, IntegrityError."""
    found = _names(folder)
    return None if not found else opened(found[-1])


def opened(folder: Path) -> StoredCheckpoint:
    """Open a checkpoint. Raises LocalError, and IntegrityError for a document that is not a checkpoint's."""
    document = folder / DOCUMENT
    with explained("read", document):
        text = document.read_bytes()
    try:
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise LocalError(
                f"{document} has format {body['format']!r}, and this release reads {FORMAT}: continue with the release"
                " that wrote it"
            )
        position = CheckpointPosition(
            int(body["epoch"]), int(body["branch"]), int(body["step"]), tuple(body["batches"])
        )
        files = {str(name): str(digest) for name, digest in body["files"].items()}
        config = dict(body["config"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(folder, DOCUMENT) from None
    return StoredCheckpoint(folder, position, config, files, blake3.blake3(text).digest())


def read(stored: StoredCheckpoint, rooms: Any, ranks: TrainerRanks) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint; all ranks call. ``rooms``: function from name → (shape, dtype) to the tensors that
    are read into, sharded as this rank needs them. Raises IntegrityError for a damaged file.
    """
    import torch.distributed.checkpoint as dcp

    error = _first_damage(stored) if ranks.first else None
    if (damage := ranks.share(error)) is not None:
        raise _damaged(stored.folder, damage)
    reader = dcp.FileSystemReader(stored.folder / STATE)
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, torch.Tensor] = rooms(
        {name: (tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}
    )
    with _one_process_is_fine():
        dcp.load(state, storage_reader=reader, no_dist=ranks.count == 1)
    return state


def prune(folder: Path, keep: int) -> list[Path]:
    """Delete all but the newest ``keep`` checkpoints, and unfinished ones. Returns what was deleted."""
    removed = _names(folder)[:-keep]
    removed += [path for path in folder.glob(".*.part-*") if path.is_dir()] if folder.is_dir() else []
    for path in removed:
        with suppress(OSError):
            disk.remove_tree(path)
    return removed


def _names(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def _first_damage(stored: StoredCheckpoint) -> str | None:
    for name, digest in stored.files.items():
        try:
            if _hash(stored.folder / name) != digest:
                return name
        except OSError:
            return name
    return None


def _damaged(folder: Path, name: str) -> IntegrityError:
    return IntegrityError(
        f"the checkpoint {folder} is damaged: {name}. Restore the file, or move the folder away to continue from the"
        " checkpoint before; the ledger then gives its batches again"
    )


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Suppress the warning that a single-process learner has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _hash(path: Path) -> str:
    hasher = blake3.blake3()
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def batches_of(position: CheckpointPosition) -> Sequence[bytes]:
    return [bytes.fromhex(batch) for batch in position.batches]
