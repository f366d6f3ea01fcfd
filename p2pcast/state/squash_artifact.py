"""Squashes as artifacts: turns consecutive deltas of a store into one signed delta.

The squash leads from the first delta's base to the last delta's version. Guarantee: it decodes to exactly the result of
its parts, and is invisible until it is sealed. Synchronous, on one thread, with memory for a few cells.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from p2pcast.artifact.artifact_file import Tail
from p2pcast.artifact.packer import Packer
from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import DELTA, FileEntry, Open, run_id
from p2pcast.codec.squash_cell import needs_base, squash
from p2pcast.ground.errors import IntegrityError, UsageError
from p2pcast.state.version_reader import DeltaChain, VersionReader, WholeArtifact
from p2pcast.store.artifact_store import ArtifactStore, Stored


def make_squash(
    store: ArtifactStore,
    key: RunKey,
    parts: Sequence[WholeArtifact],
    before: VersionReader | None,
    still_wanted: Callable[[], None],
) -> Stored:
    """Make and store the squash of ``parts``, oldest first.

    ``before``: reads the words of the first part's base; None is allowed if all parts are ``flat``. ``still_wanted`` is
    called for every cell, and may raise to cancel. Raises UsageError (base needed), IntegrityError, LocalError.
    """
    first, last = parts[0].assembly.open, parts[-1].assembly
    manifest, layout = last.manifest, last.layout
    assert manifest is not None
    assert first.base is not None
    piece = piece_bytes(sum(part.assembly.manifest.log for part in parts if part.assembly.manifest is not None))
    record = Open(
        secrets.token_bytes(16),
        first.base,
        DELTA,
        layout.layout_id,
        piece,
        run_id(key.public),
        manifest.version,
        first.base_hash,
    )
    links, packer, batches = DeltaChain(parts), Packer(key, record, layout), []
    log = store.begin(record, layout)
    try:
        log.write(0, [])
        for cell in layout.cells:
            still_wanted()
            row = links.of(cell)
            if not row:
                continue
            base = None
            if needs_base(codec for codec, *_ in row):
                if before is None:
                    raise UsageError(f"deltas from {first.base} are coded in context, and no stored state leads there")
                base = before.words(cell)
            coded = squash(cell, row, base=base)
            if coded is not None:
                log.write(packer.log_bytes, [coded.payload])
                packer.add_cell(coded.cell, coded.codec, coded.payload, coded.before, coded.after)
            while (batch := packer.take_batch()) is not None:
                batches.append(batch)
        for file in manifest.files:
            contents = _contents(parts, file)
            if contents:
                log.write(packer.log_bytes, [contents])
            packer.add_file(file.path, contents, file.size, file.hash)
        *rest, sealed = packer.seal(manifest.state, version_hash=manifest.identity)
        tail = Tail([*batches, *rest], key.public, layout.document, sealed, packer.open_signed)
        return store.seal(log, tail.assembly(layout))
    except BaseException:
        store.abandon(log, record.artifact)
        raise
    finally:
        log.close()


def _contents(parts: Sequence[WholeArtifact], file: FileEntry) -> bytes | None:
    """Return the contents of the last version's small file from the newest part that has them; None if it is in the
    base.

    Raises IntegrityError.
    """
    for part in reversed(parts):
        manifest = part.assembly.manifest
        for held in () if manifest is None else manifest.files:
            if held.path == file.path and held.hash != file.hash:
                # The file changed in this part, so it is unknown whether the base had the same contents.
                raise IntegrityError(
                    f"small file {file.path!r} of {part.assembly.open.version} is in no delta behind it"
                )
            if held.path == file.path and held.offset is not None:
                return part.log.read(held.offset, held.size)
    return None
