"""Watches a folder of checkpoints and reports those that can be published.

Guarantee: a step folder is reported once it is complete, in step order, and again each time its content changes. A
folder is complete when it validates and either contains its marker (``STABLE``), written last, or has not changed for
SETTLE_S (it was renamed into place). If a marker is required, a folder without it is never complete. The same holds if
markers are learned and the folder that was reported last has one; the folder without it is then reported as damaged
after UNMARKED_S without a change. Of two folders of one step, such as ``step_060`` and ``step_60``, the shorter name
counts, and the other folder is reported as damaged. An incomplete folder is not reported. A folder that claims to be
complete but is damaged is reported once, then skipped until it changes. A folder deleted during the scan is forgotten.
The hub compares the bytes to decide whether a repeated step opens a branch.

Names and markers: ``p2pcast.checkpoint.folder_form``.

``FolderWatch`` decides; it has no clock, and reads files only through its ``open_`` argument. ``scan`` reads names,
sizes and times. ``watch`` runs both whenever the file system reports a change, and at intervals.
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
"""How long a folder without a trustworthy marker must not change, in seconds."""
UNMARKED_S = 30.0
"""A folder without the marker that the previous folder had is reported after this many seconds without a change."""
POLL_S = 0.2
"""Interval between two scans, in seconds, if the file system reports no change (``folder_events``)."""
MAX_POLL_S = 2.0
SCAN_SHARE = 0.1
"""Largest share of one core for scans: with thousands of folders, or a slow file system, scans are less frequent."""
RETRY_S = 5.0
"""How long to wait before a folder is retried after a local error (too many open files, no permission), in seconds."""
_SHOWN = 3
"""Most names in one message."""
KEPT_GONE = 4096
"""Number of deleted folders to remember, so that a brief fault of a network file system republishes nothing.
"""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint(Generic[T]):
    """A complete checkpoint. ``fingerprint`` changes whenever one of its files does. ``checkpoint``: what ``open_``
    returned when it validated the folder.
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

    ``fingerprint`` covers names, sizes, times and inodes of all files except markers, which are not content; see
    ``same_fingerprint``. ``marked``: its last marker exists. ``marked_last``: the marker exists and no file is newer,
    so the marker belongs to this content. ``error``: why the folder could not be listed.
    """

    step: int
    path: Path
    fingerprint: str
    marked: bool
    marked_last: bool
    error: str | None = None


def scan(path: Path, form: FolderForm = DEFAULT) -> list[Folder]:
    """Return every step folder under ``path``, by step; none if ``path`` is missing. Raises LocalError if ``path``
    cannot be listed, or if this machine is too short of something to list a folder in it.
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
    """Sort key: by step; of two spellings of one step, the shorter one first."""
    return folder.step, len(folder.path.name), folder.path.name


def same_fingerprint(known: str | None, found: str) -> bool:
    """Whether a recorded fingerprint matches the content found. Records of release 0.1 do not have the part after the
    '-', which covers the ctimes.
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
    """Raises UsageError unless ``path`` is a folder in which step folders may appear, and LocalError if it cannot be
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
    """Return a message that explains what the hub is waiting for, or None if there is a step folder. Blocks."""
    with contextlib.suppress(LocalError, OSError):
        if not steps_there(path, names):
            others = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
            held = f"; it holds {', '.join(others[:_SHOWN])}{', …' if others[_SHOWN:] else ''}" if others else ""
            return f"{path} has no folder {names}/ yet: the hub publishes the first that appears{held}"
    return None


def fingerprint_of(step: int, path: Path, marker: FolderMarkers) -> str | None:
    """Return the current fingerprint of one step folder, or None if the folder is gone."""
    folder = _scan_folder(step, path, marker)
    return None if folder is None else folder.fingerprint


def _scan_folder(step: int, path: Path, marker: FolderMarkers) -> Folder | None:
    """Scan one step folder. Returns None if it is gone."""
    digest, changes = blake3.blake3(), blake3.blake3()
    marked_ns, newest_ns = None, 0
    try:
        for name, info in sorted(_files(path, "")):
            # A rewrite in place may restore the old mtime, and a copy may preserve it; no program can set the ctime.
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
    """Yield all files below ``folder``. Links to files are followed; links to folders are not, as they may loop."""
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
    """What is known of a folder's current content."""

    fingerprint: str
    since: float
    """When this content was first seen."""
    opened: T | None = None
    """What ``open_`` returned: the content is valid, but has not been reported yet."""
    ready_since: float = 0.0
    reason: str | None = None
    reported: bool = False
    named: bool = False
    """The folder was reported although its files may be sound: its marker is missing, or its step is a duplicate."""
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
        """``open_(path)`` validates and opens a folder. It raises IntegrityError if the folder is damaged, and
        LocalError or OSError if the folder could not be read. ``known(step, fingerprint)``: whether to neither open nor
        report this content. ``marker_learned``: a marker that later folders need once a folder has had it.
        """
        self._open = open_
        self._known = known
        self._marker_required = marker_required
        self._marker_learned = marker_learned
        self._last: tuple[str, bool] = ("", False)
        """Name of the folder that was reported last, and whether it has its marker."""
        self._states: dict[str, _State[T]] = {}
        self._reported: dict[str, str] = {}
        """Folder name → fingerprint last reported as found, including deleted folders."""

    def observe(self, now: float, listing: Iterable[Folder]) -> Iterator[FoundCheckpoint[T] | Damaged]:
        """Yield events by ascending step. ``now``: seconds of any steady clock. ``listing``: the result of ``scan``.

        A folder is opened only when its event is asked for, so that few folders are open at a time. Consume all events
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
        """``settling``: a lower step may soon be complete. It is waited for, but no longer than SETTLE_S."""
        if state.reason is not None and not state.reported and (folder.marked or folder.error):
            # Only in a second scan: a folder that was being deleted during the first is gone by then.
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
        # Removed first, so that the folder moves to the end of the order.
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
        """Let this folder be reported once more."""
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
    """Yield events forever; existing folders come first, ascending. Close it (``contextlib.aclosing``) to stop.

    ``path`` may be created later. Raises LocalError if it cannot be listed. Disk work runs in a separate thread, and so
    do ``known`` and ``again``, which returns the name of a folder to report once more.
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
