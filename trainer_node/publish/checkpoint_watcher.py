"""Watches a folder of checkpoints and reports the versions that can be published.

Promise: a step folder is reported once it is complete, in step order, and again each time its content changes. A
folder is complete when it validates and either holds its marker (``STABLE``), written last, or has not changed for
SETTLE_S (it was renamed into place). A folder without a marker that is required is never complete. The same holds for a
marker that is learned, while the folder that was reported last has it; such a folder is reported as damaged after
UNMARKED_S without a change. Of two folders of one step, as ``step_060`` next to ``step_60``, the shorter name counts,
and the other one is reported as damaged. A half-written folder waits in silence. A folder that claims to be complete
and is damaged is reported once, then skipped until it changes. A folder that is deleted while it is read is forgotten.
The hub decides by the bytes whether a step that comes back opens a branch.

Names and markers: ``p2pcast.checkpoint.folder_form``.

``FolderWatch`` decides; it has no clock, and touches files only through the ``open_`` that it is given. ``scan`` reads
names, sizes and times. ``watch`` runs both, at each change that the file system reports and by the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import blake3

from p2pcast.checkpoint import Checkpoint
from p2pcast.checkpoint.folder_form import DEFAULT, MARKERS, STABLE, FolderForm, FolderMarkers, StepNames
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, UsageError
from p2pcast.process.shortages import scarce
from trainer_node.publish.folder_events import folder_events

T = TypeVar("T")

SETTLE_S = 1.0
"""A folder without a trustworthy marker must not change for so many seconds."""
UNMARKED_S = 30.0
"""A folder that still has no marker after so many seconds without a change, unlike the one before, is named."""
POLL_S = 0.2
"""Interval between two scans, in seconds, without an event of the file system (``folder_events``)."""
MAX_POLL_S = 2.0
SCAN_SHARE = 0.1
"""Largest share of one core that scans may take: with thousands of folders, or a slow file system, polls are rarer."""
RETRY_S = 5.0
"""Delay after a local error (too many open files, no permission) before a folder is tried again, in seconds."""
_SHOWN = 3
"""Names in one message."""
KEPT_GONE = 4096
"""Deleted folders that are remembered, so that no version is published twice after a hiccup of a network file system.
"""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint(Generic[T]):
    """A complete checkpoint. ``fingerprint`` changes whenever a file of it does. ``checkpoint``: the result of the
    ``open_`` that validated the folder.
    """

    step: int
    path: Path
    fingerprint: str
    checkpoint: T


@dataclass(frozen=True, slots=True)
class Damaged:
    """A folder that claims to be complete but cannot be read; it is skipped until it changes."""

    step: int
    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Folder:
    """One step folder in a scan.

    ``fingerprint`` covers names, sizes, times and inodes of all files but markers, which say nothing about the content;
    see ``same_fingerprint``. ``marked``: its last marker is there. ``marked_last``: and no file is newer, so the marker
    belongs to this content.
    ``error``: why the folder could not be listed.
    """

    step: int
    path: Path
    fingerprint: str
    marked: bool
    marked_last: bool
    error: str | None = None


def scan(path: Path, form: FolderForm = DEFAULT) -> list[Folder]:
    """Every step folder under ``path``, by step; none while ``path`` is missing. Raises LocalError when it cannot be
    listed, or when this machine is too short of something to list a folder in it.
    """
    found = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                step = form.names.step_of(entry.name)
                if step is not None and entry.is_dir():
                    folder = _scan_folder(step, path / entry.name, form.marker)
                    if folder is not None:
                        found.append(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LocalError(f"{path}: can't list the checkpoints folder: {error.strerror}") from None
    return sorted(found, key=_order)


def _order(folder: Folder) -> tuple[int, int, str]:
    """By step; of two spellings of one step, the shorter one first."""
    return folder.step, len(folder.path.name), folder.path.name


def same_fingerprint(known: str | None, found: str) -> bool:
    """Whether a recorded fingerprint is of the content found. Records of release 0.1 lack the part after the '-', the
    times at which inodes changed.
    """
    return known is not None and f"{found}-".startswith(f"{known}-")


def steps_there(path: Path, names: StepNames) -> set[int]:
    """The steps that have a folder under ``path``, whatever its content. Raises LocalError."""
    try:
        with os.scandir(path) as entries:
            found = {names.step_of(entry.name) for entry in entries if entry.is_dir()}
            return {step for step in found if step is not None}
    except OSError as error:
        raise LocalError(f"{path}: can't list the checkpoints folder: {error.strerror}") from None


def check_folder(path: Path, names: StepNames) -> None:
    """Raises UsageError unless ``path`` is a folder in which step folders may appear, LocalError where it cannot be
    listed.
    """
    expected = f"the trainer's checkpoints ({names}/) are expected in it"
    if path.is_symlink() and not os.path.exists(path):
        raise UsageError(f"{path}: this link leads to {os.readlink(path)}, which is missing; {expected}")
    if not os.path.lexists(path):
        raise UsageError(f"{path}: there is no such folder; {expected}")
    if not path.is_dir():
        raise UsageError(f"{path}: this is a file and not a folder; {expected}")
    own = path.resolve()
    if names.step_of(own.name) is not None and not steps_there(path, names) and any(path.glob("*.safetensors")):
        raise UsageError(f"{path}: this is one checkpoint; give the folder that the checkpoints are in: {own.parent}")


def waits_for(path: Path, names: StepNames) -> str | None:
    """A sentence that says what a hub waits for while no step folder is there. Blocks."""
    with contextlib.suppress(LocalError, OSError):
        if not steps_there(path, names):
            others = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
            held = f"; it holds {', '.join(others[:_SHOWN])}{', …' if others[_SHOWN:] else ''}" if others else ""
            return f"{path} has no folder {names}/ yet: the hub publishes the first that appears{held}"
    return None


def fingerprint_of(step: int, path: Path, marker: FolderMarkers) -> str | None:
    """The fingerprint of one step folder at this moment; None when the folder is gone."""
    folder = _scan_folder(step, path, marker)
    return None if folder is None else folder.fingerprint


def _scan_folder(step: int, path: Path, marker: FolderMarkers) -> Folder | None:
    """One step folder; None when it is gone."""
    digest, changes = blake3.blake3(), blake3.blake3()
    marked_ns, newest_ns = None, 0
    try:
        for name, info in sorted(_files(path, "")):
            # A rewrite in place may restore the old mtime, and a copy brings it along; no program sets the ctime.
            changed_ns = max(info.st_mtime_ns, info.st_ctime_ns)
            if name == marker.last:
                marked_ns = changed_ns
            elif name not in marker:
                newest_ns = max(newest_ns, changed_ns)
                digest.update(f"{name!r} {info.st_size} {info.st_mtime_ns} {info.st_ino}\n".encode())
                changes.update(f"{info.st_ctime_ns}\n".encode())
    except FileNotFoundError:
        return None
    except OSError as error:
        why = f"{path}: can't list it: {error.strerror}"
        if scarce(error):
            raise LocalError(why) from error  # no fault of the folder
        return Folder(step, path, f"unreadable: {error.errno}", False, False, why)
    last = marked_ns is not None and marked_ns >= newest_ns
    fingerprint = f"{digest.hexdigest()[:32]}-{changes.hexdigest()[:16]}"
    return Folder(step, path, fingerprint, marked_ns is not None, last)


def _files(folder: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """All files below ``folder``. Links to files are followed; links to folders are not, as they may loop."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(folder / entry.name, f"{prefix}{entry.name}/")
                continue
            try:
                info = entry.stat()
            except FileNotFoundError:
                info = entry.stat(follow_symlinks=False)  # a broken link: its name may change too
            if not stat.S_ISDIR(info.st_mode):
                yield prefix + entry.name, info


@dataclass(slots=True)
class _State(Generic[T]):
    """Known facts of a folder's present content."""

    fingerprint: str
    since: float
    """When this content was first seen."""
    opened: T | None = None
    """The result of ``open_``: the content is valid, and has not been reported yet."""
    ready_since: float = 0.0
    reason: str | None = None
    reported: bool = False
    named: bool = False
    """The folder was reported though its files may be sound: its marker is missing, or another folder has its step."""
    retry_at: float = field(default=float("inf"))


class FolderWatch(Generic[T]):
    """Decides which folders to report. Call ``observe`` with each new scan."""

    def __init__(
        self,
        open_: Callable[[Path], T],
        known: Callable[[int, str], bool] = lambda step, fingerprint: False,
        *,
        marker_required: bool = False,
        marker_learned: str | None = None,
    ) -> None:
        """``open_(path)`` validates and opens a folder. It raises IntegrityError when the folder is damaged, LocalError
        or OSError when the folder could not be read. ``known(step, fingerprint)``: content that is neither opened nor
        reported. ``marker_learned``: a marker that later folders need once a folder has had it.
        """
        self._open = open_
        self._known = known
        self._marker_required = marker_required
        self._marker_learned = marker_learned
        self._last: tuple[str, bool] = ("", False)
        """Name of the folder that was reported last, and whether it has its marker."""
        self._states: dict[str, _State[T]] = {}
        self._reported: dict[str, str] = {}
        """Folder name → fingerprint of its last Found, also for deleted folders."""

    def observe(self, now: float, listing: Iterable[Folder]) -> Iterator[FoundCheckpoint[T] | Damaged]:
        """Events by ascending step. ``now`` in seconds, of any steady clock; ``listing`` from ``scan``.

        A folder is opened only when its event is asked for, so that few folders are open at one time. Take all events
        before the next call.
        """
        folders = sorted(listing, key=_order)
        states: dict[str, _State[T]] = {}
        names: dict[int, str] = {}
        settling = False
        for folder in folders:
            name = folder.path.name
            if name == self._last[0] and folder.marked:
                self._last = name, True
            state = self._states.get(name)
            if state is None or state.fingerprint != folder.fingerprint:
                state = _State(folder.fingerprint, now)
            states[name] = state
            if (twin := names.setdefault(folder.step, name)) != name:
                if not state.named:
                    state.named = True
                    yield Damaged(folder.step, folder.path, f"{twin} is the same step: remove or rename one of the two")
                continue
            if self._reported.get(name) == folder.fingerprint:
                continue
            if self._known(folder.step, folder.fingerprint):
                self._note_reported(folder)
                continue
            event = self._judge(now, folder, state, settling)
            if event is not None:
                yield event
            elif state.opened is None and not state.reason:
                settling |= now - state.since < SETTLE_S
        self._states = states
        self._forget()

    def _judge(
        self, now: float, folder: Folder, state: _State[T], settling: bool
    ) -> FoundCheckpoint[T] | Damaged | None:
        """``settling``: a lower step may be complete in a moment. It is waited for, but no longer than SETTLE_S."""
        if state.reason is not None and not state.reported and (folder.marked or folder.error):
            # Only in a second scan: a folder that was deleted during the first is gone by now.
            state.reported = True
            return Damaged(folder.step, folder.path, state.reason)
        still_s = now - state.since
        due = self._marker_learned is not None and self._last[1] and not folder.marked
        if due and still_s >= UNMARKED_S and not state.named:
            state.named = True
            why = f"it has no {self._marker_learned}, unlike {self._last[0]}: write {self._marker_learned} last"
            return Damaged(folder.step, folder.path, f"{why}, or start the hub with --step-marker none")
        settled = still_s >= SETTLE_S and not due and (folder.marked or not self._marker_required)
        complete = folder.marked_last or settled
        if state.opened is None and (complete or folder.error) and (state.reason is None or now >= state.retry_at):
            self._validate(now, folder, state)
        if state.opened is None or (settling and now - state.ready_since < SETTLE_S):
            return None
        self._note_reported(folder)
        opened, state.opened = state.opened, None
        return FoundCheckpoint(folder.step, folder.path, folder.fingerprint, opened)

    def _note_reported(self, folder: Folder) -> None:
        self._last = folder.path.name, folder.marked
        # Removed first, so that the order is that of noting.
        self._reported.pop(folder.path.name, None)
        self._reported[folder.path.name] = folder.fingerprint

    def _validate(self, now: float, folder: Folder, state: _State[T]) -> None:
        state.retry_at = float("inf")
        if folder.error is not None:
            state.reason = folder.error
            return
        try:
            state.opened = self._open(folder.path)
        except IntegrityError as error:
            state.reason = str(error)
        except (P2PCastError, OSError) as error:
            if scarce(error):
                raise  # no fault of the folder
            state.reason = str(error)
            state.retry_at = now + RETRY_S
        else:
            state.ready_since, state.reason = now, None

    def forget(self, name: str) -> None:
        """Report this folder once more."""
        self._reported.pop(name, None)

    def _forget(self) -> None:
        gone = [name for name in self._reported if name not in self._states]
        for name in gone[: max(0, len(gone) - KEPT_GONE)]:
            del self._reported[name]


async def watch(
    path: Path,
    form: FolderForm = DEFAULT,
    *,
    poll_s: float = POLL_S,
    open_: Callable[[Path], Checkpoint] = Checkpoint.open,
    known: Callable[[int, str], bool] = lambda step, fingerprint: False,
    again: Callable[[], str | None] = lambda: None,
) -> AsyncGenerator[FoundCheckpoint[Checkpoint] | Damaged, None]:
    """Events for ever; existing folders come first, ascending. Close it (``contextlib.aclosing``) to stop.

    ``path`` may be made later. Raises LocalError when it cannot be listed. Disk work runs in a thread of its own, and
    so do ``known`` and ``again``, which names a folder to report once more.
    """
    loop = asyncio.get_running_loop()
    learned = STABLE if form.marker == MARKERS[STABLE] else None
    core = FolderWatch(open_, known, marker_required=form.marker.required, marker_learned=learned)
    pool = ThreadPoolExecutor(1, thread_name_prefix="p2pcast-watch")
    try:
        async with folder_events(path, form.marker.last) as changes:
            while True:
                begun = loop.time()
                if (name := await loop.run_in_executor(pool, again)) is not None:
                    core.forget(name)
                listing = await loop.run_in_executor(pool, scan, path, form)
                scan_s = loop.time() - begun
                events = core.observe(loop.time(), listing)
                while (event := await loop.run_in_executor(pool, next, events, None)) is not None:
                    yield event
                    del event  # closes the files of a checkpoint that was published
                pause_s = min(scan_s / SCAN_SHARE, MAX_POLL_S)
                await asyncio.sleep(pause_s)
                await changes.wait(max(0.0, poll_s - pause_s))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
