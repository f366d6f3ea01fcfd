"""Resuming an earlier process's reception."""

from __future__ import annotations

import pytest
from artifacts_at_hand import KEY, PIECE, again, begun

from p2pcast.artifact import RunKey
from p2pcast.artifact.artifact_file import HEADER
from p2pcast.store.artifact_journal import SUFFIX, JournalKind
from p2pcast.store.artifact_store import ArtifactStore


def resumed(store):
    reopened = ArtifactStore(store.root, KEY.public, keep_partial=True)
    return reopened, reopened.resume()


@pytest.mark.parametrize("kind", ["delta", "anchor"])
def test_partial_artifact_is_resumed(store, kind):
    assembly, log = begun(store, kind, [0, 2])
    reopened, [part] = resumed(store)
    assert [i for i in range(assembly.pieces) if i in part.held] == [0, 2]
    assert part.assembly.complete_directory
    for index in range(assembly.pieces):
        if index not in part.held:
            part.log.write(index * PIECE, [log[index * PIECE : (index + 1) * PIECE]])
    stored = reopened.seal(part.log, part.assembly)
    part.log.close()
    assert list((store.root / "partial").iterdir()) == []
    assert stored.id in again(store).artifacts
    found = again(store).open_log(stored)
    assert found.read(0, len(log)) == log
    found.close()


@pytest.mark.parametrize("kind", ["delta", "anchor"])
def test_complete_log_is_resumed(store, kind):
    assembly, _ = begun(store, kind, range(9))
    reopened, [part] = resumed(store)
    assert part.held.count == assembly.pieces
    reopened.seal(part.log, part.assembly)
    part.log.close()
    assert again(store).damaged == []


def test_damaged_piece_is_not_held(store):
    assembly, _ = begun(store, "delta", range(9))
    path = store.root / "partial" / assembly.open.artifact.hex()
    with path.open("r+b") as file:
        file.seek(len(HEADER) + PIECE + 5)
        file.write(b"x")
    _, [part] = resumed(store)
    assert [i for i in range(assembly.pieces) if i not in part.held] == [1]
    part.log.close()


def test_records_cut_anywhere_are_resumable(store):
    """Records cut at any byte give a valid prefix, and reception can be resumed."""
    assembly, _ = begun(store, "delta", range(9))
    path = store.root / "partial" / f"{assembly.open.artifact.hex()}{SUFFIX}"
    part_path, records = path.with_suffix(""), path.read_bytes()
    contents = part_path.read_bytes()
    held = []
    for cut in [*range(0, len(records), 97), len(records)]:
        path.write_bytes(records[:cut])
        part_path.write_bytes(contents)
        _, found = resumed(store)
        for part in found:
            held.append(part.held.count)
            part.log.note(
                [(JournalKind.BATCH, b) for b in assembly.signed_batches()]
                + [(JournalKind.MANIFEST, assembly.manifest_signed)]
            )
            part.log.close()
            _, [whole] = resumed(store)
            assert whole.assembly.complete_directory
            assert whole.held.count == assembly.pieces
            whole.log.close()
        if not found:
            assert list((store.root / "partial").iterdir()) == []
    assert held == sorted(held)
    assert held[0] == 0
    assert held[-1] == assembly.pieces


def test_records_of_another_run_are_refused(store):
    begun(store, "delta", range(9))
    other = ArtifactStore(store.root, RunKey(bytes([6]) * 32).public, keep_partial=True)
    assert other.resume() == []
    assert list((store.root / "partial").iterdir()) == []


def test_log_without_records_or_records_without_log_are_removed(store):
    assembly, _ = begun(store, "delta", range(9))
    part = store.root / "partial" / assembly.open.artifact.hex()
    part.unlink()
    _, found = resumed(store)
    assert found == []
    assert list((store.root / "partial").iterdir()) == []
