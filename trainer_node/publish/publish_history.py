"""The hub's record of published steps: the fingerprint of each step's folder, its version, and marks of its content.

Guarantees: a folder that still exists is never forgotten, so no restart publishes it again. A step whose folder is gone
is remembered until there are KEPT_GONE newer steps. A version costs one record and one fsync, however many there are:
the file is rewritten only after GROWTH records, plus as many as folders exist.

``settled`` decides what stays and is pure; ``PublishHistory`` wraps it around an ``AppendLog``, one record per line:

{"step": 7, "folder": "<fingerprint>", "version": "0.7", "mark": "<layout and state>", "files": "<digest>",
"gone": true}

All but ``step`` are optional.

A later record of a step adds to an earlier one. ``gone``: the folder was missing at the last rewrite.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from p2pcast.files.append_log import AppendLog
from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.ground.version import Version
from p2pcast.process.daemon_process import StateFile

FILE = "published.log"
KEPT_GONE = 4096
"""Number of steps to remember without a folder: as many as the watcher remembers, far more than the store keeps."""
GROWTH = 4096
"""Least number of records, about half a MiB, between two rewrites of the file."""
_MOVED = ("published", "marks")
"""Keys of the same facts in ``hub.json`` of version 0.1.0, by step."""


@dataclass(frozen=True, slots=True)
class KnownStep:
    """``folder``: the folder's fingerprint, or None for a step from ranks. ``version``: the version of that folder's
    content; None in earlier releases' records. ``mark``: layout and state, as from ``Pipeline.mark_of``. ``files``:
    digest of the small files that were published with a folder; None in earlier releases' records, empty for a version
    from ranks.
    """

    folder: str | None = None
    version: Version | None = None
    mark: str | None = None
    files: str | None = None
    gone: bool = False


def settled(known: Mapping[int, KnownStep], there: Container[int] | None, kept_gone: int) -> dict[int, KnownStep]:
    """Return the part of ``known`` that stays; ``known`` is in the order of noting. ``there``: the steps that have a
    folder now, or None if the folders could not be listed.

    A folder is forgotten only if it was also gone at the last rewrite, because a network file system may briefly show
    an empty folder.
    """
    newest = set(list(known)[-kept_gone:])
    out: dict[int, KnownStep] = {}
    for step, one in known.items():
        absent = one.folder is None or (there is not None and step not in there)
        if step in newest or not absent or not (one.folder is None or one.gone):
            out[step] = replace(one, gone=one.gone if there is None else one.folder is not None and absent)
    return out


class PublishHistory:
    """``there`` returns the steps that have a folder now, and may raise LocalError. Thread-safe. ``note`` blocks."""

    def __init__(self, path: Path, there: Callable[[], Container[int]]) -> None:
        """Raises LocalError if the file is damaged or unreadable."""
        self._log = AppendLog(path)
        self._there = there
        self._changing = threading.Lock()
        self._known: dict[int, KnownStep] = {}
        self._full_at = GROWTH
        """Number of records at which the file is rewritten."""
        for record in self._log.records:
            self._take(record)

    def move_from(self, memory: StateFile) -> None:
        """Move the facts that version 0.1.0 kept in ``hub.json`` to this file. Raises LocalError."""
        if not any(memory.facts.get(name) for name in _MOVED):
            return
        folders, marks = (memory.facts.get(name) or {} for name in _MOVED)
        try:
            found = [
                _record(int(step), KnownStep(folders.get(step), None, marks.get(step))) for step in {**marks, **folders}
            ]
        except (AttributeError, TypeError, ValueError):
            raise LocalError(
                f"{memory.path}: the list of published steps is damaged; restore the file from a copy"
            ) from None
        with self._changing:
            self._log.append(*found)
            for record in found:
                self._take(record)
        memory.forget(*_MOVED)

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, step: int) -> KnownStep:
        """Return what is known of a step; an empty record if nothing is."""
        return self._known.get(step, KnownStep())

    def mark_of(self, version: Version) -> str | None:
        """The layout and state of a published version, or None if they are not remembered."""
        known = self[version.step]
        return known.mark if known.version == version else None

    def note(
        self,
        step: int,
        *,
        folder: str | None = None,
        version: Version | None = None,
        mark: str | None = None,
        files: str | None = None,
    ) -> None:
        """Record facts durably; None leaves a fact unchanged. Raises LocalError."""
        record = _record(step, KnownStep(folder, version, mark, files))
        with self._changing:
            self._log.append(record)
            self._take(record)
            if len(self._log.records) >= self._full_at:
                self._write_anew()

    def close(self) -> None:
        self._log.close()

    def _take(self, record: Mapping[str, Any]) -> None:
        match record:
            case {"step": int(step)}:
                folder, version, mark, files = (record.get(name) for name in ("folder", "version", "mark", "files"))
            case _:
                raise LocalError(f"{self._log.path}: a record has no step; restore the file from a copy")
        # Removed first, so that the step moves to the end of the order.
        before = self._known.pop(step, KnownStep())
        try:
            self._known[step] = KnownStep(
                before.folder if folder is None else str(folder),
                before.version if version is None else Version.parse(str(version)),
                before.mark if mark is None else str(mark),
                before.files if files is None else str(files),
                bool(record.get("gone")),
            )
        except UsageError:
            raise LocalError(
                f"{self._log.path}: the version of step {step} is damaged; restore the file from a copy"
            ) from None

    def _write_anew(self) -> None:
        try:
            there = self._there()
        except LocalError:
            there = None
        kept = settled(self._known, there, KEPT_GONE)
        self._log.rewrite(_record(step, one) | ({"gone": True} if one.gone else {}) for step, one in kept.items())
        self._known = kept
        self._full_at = len(kept) + GROWTH + sum(one.folder is not None and not one.gone for one in kept.values())


def _record(step: int, known: KnownStep) -> dict[str, Any]:
    version = known.version and str(known.version)
    facts = {"folder": known.folder, "version": version, "mark": known.mark, "files": known.files}
    return {"step": step} | {name: fact for name, fact in facts.items() if fact is not None}
