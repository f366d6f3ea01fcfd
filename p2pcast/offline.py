"""Deltas between folders and files, without a network: diff, apply, squash, verify.

Guarantees: results are bit-exact, and appear whole or not at all. A wrong base, a damaged file, or deltas that are not
consecutive are refused before the result gets its name. Memory is bounded by a few cells per core. Files are signed
with a throw-away key, which detects damage but does not prove who made the file. To check that, pass the run's key
(``P2pdFile.open(…, public=…)``).
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import blake3
import numpy.typing as npt

from p2pcast.artifact.artifact_file import P2pdFile, P2pdWriter
from p2pcast.artifact.assembly import Placed
from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import DELTA, ID_BYTES, FileEntry, Open, run_id
from p2pcast.checkpoint import Checkpoint, write_folder
from p2pcast.codec.cell import CODEC_NAMES, RAW, Encoded, apply, decode, encode, encode_whole
from p2pcast.codec.digest import MASK, digest
from p2pcast.codec.layout import Cell, Layout, cell_bytes
from p2pcast.codec.squash_cell import needs_base, squash
from p2pcast.files import disk
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError, UsageError
from p2pcast.ground.ordered_map import cores, ordered_map
from p2pcast.ground.version import Version

_STEP = re.compile(r"step_(\d{1,18})", re.ASCII)
_SHOWN = 10


Progress = Callable[[int, int], None]
"""Called with (bytes of the state processed since the last call, bytes in all), from several threads."""


@dataclass(frozen=True, slots=True)
class DeltaSummary:
    """The result of ``diff`` or ``squash_files``. ``seconds`` is wall time.

    ``changed`` counts words (values, except for complex and packed dtypes).
    """

    path: Path
    base: Version
    version: Version
    nbytes: int
    dense_bytes: int
    params: int
    changed: int
    codecs: dict[str, int]
    """Codec name → cells in that codec; unchanged cells are ``none``."""
    state: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Verified:
    """A folder's digest, and the result of comparing the folder. ``faults`` is empty if everything matches."""

    state: int
    version: Version | None
    faults: list[str]


def folder_versions(old: Path, new: Path) -> tuple[Version, Version]:
    """Return the versions of two folders: ``step_N`` is 0.N; any other name gives 0.0, or one step after ``old``.

    If the step does not increase, the new version starts a new branch.
    """
    was, now = (_STEP.fullmatch(p.resolve().name) for p in (old, new))
    base = Version(0, int(was[1]) if was else 0)
    version = Version(0, int(now[1]) if now else base.step + 1)
    return base, version if version > base else Version(base.branch + 1, version.step)


def cell_name(layout: Layout, cell: Cell) -> str:
    """Return the cell's tensor and range of words, for messages."""
    last = cell.start + cell.words - 1
    return f"tensor {layout.tensors[cell.tensor].name!r}, words {cell.start} to {last} (cell {cell.index})"


def require_same(expected: Layout, found: Layout, what: str) -> None:
    """Raise IntegrityError, listing the differences, if the tensors differ. Cell boundaries may differ."""
    if expected.tensors == found.tensors:
        return
    lines = expected.difference(found)
    more = f"\n  … and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    listed = "\n  ".join(lines[:_SHOWN])
    raise IntegrityError(
        f"{what}: the tensors differ, so a delta is impossible (use a whole anchor):\n  {listed}{more}"
    )


def _no_progress(done: int, total: int) -> None: ...


def diff(
    old: Path | str,
    new: Path | str,
    out: Path | str,
    *,
    progress: Progress = _no_progress,
    codec: str = "auto",
    cell_words: int = limits.CELL_WORDS,
    workers: int | None = None,
) -> DeltaSummary:
    """Write the delta from folder ``old`` to folder ``new`` to the file ``out``. Raises LocalError, IntegrityError."""
    old, new, out = Path(old), Path(new), Path(out)
    was, now = Checkpoint.open(old), Checkpoint.open(new)
    layout = was.layout(cell_words=cell_words)
    require_same(layout, now.layout(), f"{new} against {old}")
    base, version = folder_versions(old, new)
    old_files, new_files = was.small_files(), now.small_files()
    key, started = RunKey.generate(), time.perf_counter()
    tally: Counter[str] = Counter()
    state = changed = 0

    def code_one(cell: Cell) -> tuple[int, Encoded | None]:
        words = was.lent(cell)
        progress(cell.nbytes, layout.nbytes)
        before = digest(words, cell)
        coded = encode_smallest(cell, words, now.lent(cell), before, codec)
        return before if coded is None else coded.after, coded

    with P2pdWriter(out, key, _open(key, layout, base, version), layout) as writer:
        for after, coded in ordered_map(
            code_one, layout.cells, workers=workers or cores(), name="encode", nbytes=cell_bytes
        ):
            state = (state + after) & MASK
            changed += _add(writer, coded, tally)
        for path, contents in sorted(new_files.items()):
            writer.add_file(path, contents, in_base=old_files.get(path) == contents)
        size = writer.seal(state)
    seconds = time.perf_counter() - started
    return DeltaSummary(out, base, version, size, layout.nbytes, layout.params, changed, dict(tally), state, seconds)


def encode_smallest(
    cell: Cell, old: npt.NDArray[Any], new: npt.NDArray[Any], before: int, codec: str
) -> Encoded | None:
    """Like ``codec.cell.encode``, but the payload is never larger than the cell, and ``auto`` tries every codec."""
    coded = encode(cell, old, new, before=before, codec=codec)
    if coded is not None and codec == "auto":
        other = encode(cell, old, new, before=before, codec="context")
        coded = other if other is not None and len(other.payload) < len(coded.payload) else coded
        whole, payload = encode_whole(new, at_most=len(coded.payload))
        return coded if payload is None else replace(coded, codec=whole, payload=payload)
    if coded is not None and coded.codec != RAW and len(coded.payload) > cell.nbytes:
        coded = encode(cell, old, new, before=before, codec="raw")
    return coded


def _open(key: RunKey, layout: Layout, base: Version, version: Version) -> Open:
    return Open(os.urandom(ID_BYTES), base, DELTA, layout.layout_id, limits.PIECE_BYTES, run_id(key.public), version)


def _add(writer: P2pdWriter, coded: Encoded | None, tally: Counter[str]) -> int:
    """Append an encoded cell and return the number of its changed words."""
    tally["none" if coded is None else CODEC_NAMES[coded.codec]] += 1
    if coded is None:
        return 0
    writer.add_cell(coded.cell, coded.codec, coded.payload, coded.before, coded.after)
    return coded.changed


def apply_file(
    base: Path | str,
    delta: Path | str,
    out: Path | str,
    *,
    progress: Progress = _no_progress,
    workers: int | None = None,
) -> Version:
    """Apply the delta in a file to folder ``base`` and write the result to folder ``out``. Returns its version.

    Raises IntegrityError if the base is wrong or the file is damaged, and LocalError.
    """
    checkpoint = Checkpoint.open(base)
    with P2pdFile.open(delta) as file:
        require_same(file.layout, checkpoint.layout(), f"wrong base: {base} against {delta}")
        table = {placed.cell: placed for placed in file.assembly.directory}
        files = _small_files(checkpoint, file)
        reached = [0] * len(file.layout.cells)

        def words_of(cell: Cell) -> npt.NDArray[Any]:
            words = checkpoint.words(cell)
            progress(cell.nbytes, file.layout.nbytes)
            placed = table.get(cell.index)
            if placed is None:
                reached[cell.index] = digest(words, cell)
                return words
            reached[cell.index] = placed.after
            return _changed_words(checkpoint, file, cell, placed, words)

        def check_state() -> None:
            if sum(reached) & MASK != file.manifest.state:
                raise IntegrityError(
                    f"wrong base: {base}: the cells that {delta} changes match, but another cell differs; "
                    "nothing was written"
                )

        write_folder(
            out, file.layout, words_of, files, workers=workers or cores(), before_rename=check_state, modes=disk.USERS
        )
        return file.manifest.version


def _changed_words(
    checkpoint: Checkpoint, file: P2pdFile, cell: Cell, placed: Placed, words: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    payload = file.read_cell(placed)
    if digest(words, cell) != placed.before:
        raise IntegrityError(
            f"wrong base: {checkpoint.folder}: {cell_name(file.layout, cell)} differs from the base of {file.path}; "
            "nothing was written"
        )
    patch = decode(cell, placed.codec, payload, words, placed.before, placed.after, check_before=False)
    if patch.positions is None:
        return patch.words
    target = words.copy()
    apply(patch, target)
    return target


def _small_files(base: Checkpoint, file: P2pdFile) -> dict[str, bytes]:
    """Return the version's small files. Those that the delta names only by hash come from the base."""
    held = base.small_files() if any(f.offset is None for f in file.manifest.files) else {}
    out: dict[str, bytes] = {}
    for entry in file.manifest.files:
        if entry.offset is not None:
            out[entry.path] = file.read_file(entry)
            continue
        contents = held.get(entry.path)
        if contents is None or blake3.blake3(contents).digest() != entry.hash:
            fault = "is missing" if contents is None else "differs"
            raise IntegrityError(f"wrong base: {base.folder}: small file {entry.path!r} {fault}; nothing was written")
        out[entry.path] = contents
    return out


def squash_files(
    paths: Sequence[Path | str],
    out: Path | str,
    *,
    base: Path | str | None = None,
    codec: str = "auto",
    progress: Progress = _no_progress,
    workers: int | None = None,
) -> DeltaSummary:
    """Write one delta equal to the given deltas, oldest first.

    ``base``: the first delta's base folder, needed if a cell's first delta is coded as ``context``, or if ``codec`` is
    not ``auto`` (``codec.squash_cell``). Raises IntegrityError if the deltas are not consecutive or the base is wrong,
    and UsageError if a base is needed but not given.
    """
    if not paths:
        raise UsageError("nothing to squash: name at least one .p2pd file")
    out = Path(out)
    held = None if base is None else Checkpoint.open(base)
    with ExitStack() as stack:
        files = [stack.enter_context(P2pdFile.open(p)) for p in paths]
        layout, last = files[0].layout, files[-1].manifest
        tables = [{placed.cell: placed for placed in f.assembly.directory} for f in files]
        _check_chain(files)
        start = files[0].manifest.base
        if start is None:
            raise UsageError(f"{files[0].path} is an anchor; only deltas can be squashed")
        if held is None:
            _check_without_base(files, tables, codec)
        else:
            require_same(layout, held.layout(), f"wrong base: {base} against {files[0].path}")
        version = last.version if last.version > start else Version(start.branch + 1, last.version.step)
        key, started = RunKey.generate(), time.perf_counter()
        tally: Counter[str] = Counter()
        changed = 0

        def join(cell: Cell) -> Encoded | None:
            progress(cell.nbytes, layout.nbytes)
            links = [
                (p.codec, f.read_cell(p), p.before, p.after)
                for f, table in zip(files, tables, strict=True)
                if (p := table.get(cell.index)) is not None
            ]
            if not links:
                return None
            return squash(cell, links, base=None if held is None else held.lent(cell), codec=codec)

        with P2pdWriter(out, key, _open(key, layout, start, version), layout) as writer:
            for coded in ordered_map(join, layout.cells, workers=workers or cores(), name="squash", nbytes=cell_bytes):
                changed += _add(writer, coded, tally)
            for entry in last.files:
                source = _file_source(files, entry)
                if source is None:
                    writer.packer.add_file(entry.path, None, entry.size, entry.hash)
                else:
                    writer.add_file(entry.path, source)
            size = writer.seal(last.state)
        seconds = time.perf_counter() - started
    return DeltaSummary(
        out, start, version, size, layout.nbytes, layout.params, changed, dict(tally), last.state, seconds
    )


def _check_without_base(files: Sequence[P2pdFile], tables: Sequence[dict[int, Placed]], codec: str) -> None:
    """Raise UsageError, before any cell is read, if the squash needs the first delta's base."""
    if codec != "auto":
        raise UsageError(
            f"coding a squash as {codec} needs its base: give the base folder of {files[0].path} (--base DIR)"
        )
    for cell in files[0].layout.cells:
        if needs_base(table[cell.index].codec for table in tables if cell.index in table):
            raise UsageError(
                f"{cell_name(files[0].layout, cell)} is coded in context, which can't be decoded without its base: "
                f"give the base folder of {files[0].path} (--base DIR)"
            )


def base_state(file: P2pdFile) -> int:
    """Return the digest of a delta's base state. Digests are sums, so each cell's change is subtracted."""
    return (file.manifest.state - sum(p.after - p.before for p in file.assembly.directory)) & MASK


def _check_chain(files: Sequence[P2pdFile]) -> None:
    for one, two in pairwise(files):
        require_same(one.layout, two.layout, f"{two.path} after {one.path}")
        if one.layout != two.layout:
            raise IntegrityError(
                f"{two.path} cuts its tensors into other cells than {one.path}: make both with the same settings"
            )
        if base_state(two) != one.manifest.state:
            raise IntegrityError(
                f"{two.path} does not follow {one.path}: its base is state {base_state(two):016x}, "
                f"the delta before it ends at {one.manifest.state:016x}; give deltas oldest first, without gaps"
            )


def _file_source(files: Sequence[P2pdFile], entry: FileEntry) -> bytes | None:
    """Return the contents of a small file of the last version, from the newest delta that contains it; None if only
    the first base has it.
    """
    for file in reversed(files):
        for held in file.manifest.files:
            if held.offset is not None and held.path == entry.path and held.hash == entry.hash:
                return file.read_file(held)
    return None


def cell_digests(
    checkpoint: Checkpoint, layout: Layout, *, progress: Progress = _no_progress, workers: int | None = None
) -> Iterable[int]:
    """Yield the digest of every cell of a folder, in order."""

    def one(cell: Cell) -> int:
        progress(cell.nbytes, layout.nbytes)
        return digest(checkpoint.lent(cell), cell)

    return ordered_map(one, layout.cells, workers=workers or cores(), name="digest", nbytes=cell_bytes)


def state_digest(
    checkpoint: Checkpoint,
    layout: Layout | None = None,
    *,
    progress: Progress = _no_progress,
    workers: int | None = None,
) -> int:
    """Digest of a folder's whole state; independent of the layout's cells."""
    return sum(cell_digests(checkpoint, layout or checkpoint.layout(), progress=progress, workers=workers)) & MASK


def verify_folder(
    folder: Path | str, delta: Path | str, *, progress: Progress = _no_progress, workers: int | None = None
) -> Verified:
    """Compare a folder's tensors, digest and small files with the state after the delta in a file. Raises
    IntegrityError, LocalError.
    """
    checkpoint = Checkpoint.open(folder)
    with P2pdFile.open(delta) as file:
        require_same(file.layout, checkpoint.layout(), f"{folder} against {delta}")
        expected = {p.cell: p.after for p in file.assembly.directory}
        state, wrong = 0, []
        for cell, found in zip(
            file.layout.cells, cell_digests(checkpoint, file.layout, progress=progress, workers=workers), strict=True
        ):
            state = (state + found) & MASK
            if expected.get(cell.index, found) != found:
                wrong.append(f"{cell_name(file.layout, cell)} differs")
        if state != file.manifest.state and not wrong:
            wrong.append("a cell that this delta does not change differs")
        faults = wrong[:_SHOWN] + ([f"… and {len(wrong) - _SHOWN} more cells"] if len(wrong) > _SHOWN else [])
        held = {path: blake3.blake3(contents).hexdigest() for path, contents in checkpoint.small_files().items()}
        faults += _file_faults(held, {entry.path: entry.hash.hex() for entry in file.manifest.files})
        return Verified(state, file.manifest.version, faults)


def _file_faults(held: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return messages for small files that are missing or differ. Both maps: path → BLAKE3 in hex. Extra files pass."""
    other = [path for path in wanted if held.get(path) != wanted[path]]
    return [f"small file {path!r} {'differs' if path in held else 'is missing'}" for path in other]


def verify_digests(
    folder: Path | str,
    status: Any,
    files: Any = None,
    *,
    version: Version | None = None,
    progress: Progress = _no_progress,
    workers: int | None = None,
) -> Verified:
    """Compare a folder with a hub's ``/status``: ``digests`` maps ``branch.step`` to the state's digest in hex.

    ``files``: the same hub's ``/files``, by version; if None, only weights are compared. ``version``: the expected
    version; by default, any version that the hub knows, newest first. Raises LocalError if the status has no digests.
    """
    known = status.get("digests") if isinstance(status, dict) else None
    if not isinstance(known, dict) or not known:
        raise LocalError(
            "the hub's status has no digests: no version is published yet, or the address is not a p2pcast hub"
        )
    digests: dict[Version, int] = {}
    for text, value in known.items():
        try:
            digests[Version.parse(text)] = int(value, 16)
        except (UsageError, TypeError, ValueError):
            raise IntegrityError(
                f"the hub's status: digests: {str(text)[:40]!r} is not a version with a digest in hex"
            ) from None
    checkpoint = Checkpoint.open(folder)
    state = state_digest(checkpoint, progress=progress, workers=workers)
    wanted = sorted(digests, reverse=True) if version is None else [version]
    same = [candidate for candidate in wanted if digests.get(candidate) == state]
    held = {path: blake3.blake3(contents).hexdigest() for path, contents in checkpoint.small_files().items()}
    wanted_files = {one: (files or {}).get(str(one), {}) for one in same}
    if not all(isinstance(entries, dict) for entries in wanted_files.values()):
        raise IntegrityError("the hub's files: an entry is not a map from path to BLAKE3")
    if found := [Verified(state, one, _file_faults(held, entries)) for one, entries in wanted_files.items()]:
        # Versions that differ only in small files share a digest. If several match, the newest one counts.
        return min(found, key=lambda one: bool(one.faults))
    if version is not None and version not in digests:
        return Verified(state, None, [f"the hub does not know version {version}"])
    which = str(version) if version is not None else f"any of the hub's {len(digests)} versions"
    cut = status.get("layout_id") in (None, checkpoint.layout().layout_id.hex())
    hint = "" if cut else "; the layouts differ too (other tensors, or other cells)"
    return Verified(state, None, [f"digest {state:016x} is not that of {which}{hint}"])
