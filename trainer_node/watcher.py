"""Watches a folder of checkpoints and says which versions are there to be published.

Promise: a folder ``step_<digits>`` is told of once it is complete, in step order, and again each time it comes back with other content.
Complete means that it validates and either holds ``STABLE``, written last, or nothing in it has changed for SETTLE_S (it was renamed into
place). What is half written waits in silence; what claims to be complete and is not is reported once and skipped until it changes; what
is deleted while it is read is forgotten. Whether a step that comes back opens a branch is for the hub to decide, by the bytes.

``Watch`` decides; it has no clock, and touches files only through the ``check`` that it is given. ``scan`` reads names, sizes and times.
``watch`` runs both.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import blake3

from p2pcast import limits
from p2pcast.checkpoint import Checkpoint
from p2pcast.errors import IntegrityError, LocalError, P2PCastError

STABLE = "STABLE"
"""The file that a trainer writes last into a folder."""
SETTLE_S = 1.0
"""A folder without a trustworthy STABLE must stay as it is for this long."""
POLL_S = 0.2
"""Between two looks. Polling and not inotify: checkpoints often lie on network file systems, which tell no events."""
MAX_POLL_S = 2.0
SCAN_SHARE = 0.1
"""Share of one core that looking may take: with thousands of folders, or a slow file system, polls are further apart."""
RETRY_S = 5.0
"""After an error of this machine (too many open files, no permission) a folder is tried again this often."""
KEPT_GONE = 4096
"""Folders that are remembered after they were deleted, so that a network file system's hiccup publishes nothing twice."""

_NAME = re.compile(r"step_(\d{1,19})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint. ``fingerprint`` changes whenever a file of it does."""

    step: int
    path: Path
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Damaged:
    """A folder that claims to be complete but can't be read; it is skipped until it changes."""

    step: int
    path: Path
    reason: str


Event = Found | Damaged


@dataclass(frozen=True, slots=True)
class Folder:
    """One step folder as a scan saw it.

    ``fingerprint`` is over names, sizes, times and inodes of all files but STABLE, which says nothing about content. ``stable``: STABLE is
    there; ``stable_last``: and no file is newer, so it speaks of this content and not of one that is being overwritten.
    ``error``: why the folder could not be listed.
    """

    step: int
    path: Path
    fingerprint: str
    stable: bool
    stable_last: bool
    error: str | None = None


def scan(path: Path) -> list[Folder]:
    """Every step folder under ``path``, by step; none when ``path`` does not exist yet. Raises LocalError when it can't be listed."""
    found = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match and int(match[1]) <= limits.MAX_STEP and entry.is_dir():
                    folder = _look(int(match[1]), path / entry.name)
                    if folder is not None:
                        found.append(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LocalError(f"{path}: can't list the checkpoints folder: {error.strerror}") from None
    return sorted(found, key=lambda folder: (folder.step, folder.path.name))


def steps_there(path: Path) -> set[int]:
    """The steps that have a folder under ``path``, whatever is in it. Raises LocalError when ``path`` can't be listed."""
    try:
        with os.scandir(path) as entries:
            return {int(match[1]) for entry in entries if (match := _NAME.fullmatch(entry.name)) and entry.is_dir()}
    except OSError as error:
        raise LocalError(f"{path}: can't list the checkpoints folder: {error.strerror}") from None


def _look(step: int, path: Path) -> Folder | None:
    """One step folder; None when it vanished meanwhile."""
    digest = blake3.blake3()
    stable_ns, newest_ns = None, 0
    try:
        for name, info in sorted(_files(path, "")):
            if name == STABLE:
                stable_ns = info.st_mtime_ns
            else:
                newest_ns = max(newest_ns, info.st_mtime_ns)
                digest.update(f"{name!r} {info.st_size} {info.st_mtime_ns} {info.st_ino}\n".encode())
    except FileNotFoundError:
        return None
    except OSError as error:
        return Folder(step, path, f"unreadable: {error.errno}", False, False, f"{path}: can't list it: {error.strerror}")
    last = stable_ns is not None and stable_ns >= newest_ns
    return Folder(step, path, digest.hexdigest()[:32], stable_ns is not None, last)


def _files(folder: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """All files below ``folder``; links to files are followed, links to folders inside it are not, as they may loop."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(folder / entry.name, f"{prefix}{entry.name}/")
                continue
            try:
                info = entry.stat()
            except FileNotFoundError:
                info = entry.stat(follow_symlinks=False)  # a link to nothing: still a name that may change
            if not stat.S_ISDIR(info.st_mode):
                yield prefix + entry.name, info


def check_checkpoint(path: Path) -> None:
    """Raise IntegrityError or LocalError unless ``path`` is a whole Hugging Face folder: headers, sizes and every shard of the index."""
    Checkpoint.open(path)


@dataclass(slots=True)
class _State:
    """What is known of a folder's present content."""

    fingerprint: str
    since: float
    """When it was first seen like this."""
    valid: bool = False
    ready_since: float = 0.0
    reason: str | None = None
    reported: bool = False
    retry_at: float = field(default=float("inf"))


class Watch:
    """Decides which folders to tell of. Call ``observe`` with each new scan."""

    def __init__(self, check: Callable[[Path], None]) -> None:
        """``check(path)`` raises IntegrityError when the folder is damaged, LocalError or OSError when it could not be read."""
        self._check = check
        self._states: dict[str, _State] = {}
        self._told: dict[str, str] = {}
        """Folder name -> fingerprint of the last Found, also for folders that are gone."""

    def observe(self, now: float, listing: Iterable[Folder]) -> list[Event]:
        """Events by ascending step. ``now`` in seconds, of any steady clock; ``listing`` from ``scan``."""
        folders = sorted(listing, key=lambda folder: (folder.step, folder.path.name))
        states: dict[str, _State] = {}
        events: list[Event] = []
        settling = False
        for folder in folders:
            name = folder.path.name
            state = self._states.get(name)
            if state is None or state.fingerprint != folder.fingerprint:
                state = _State(folder.fingerprint, now)
            states[name] = state
            if self._told.get(name) == folder.fingerprint:
                continue
            event = self._judge(now, folder, state, settling)
            if event is not None:
                events.append(event)
            if not state.valid and not state.reason:
                settling |= now - state.since < SETTLE_S
        self._states = states
        self._forget()
        return events

    def _judge(self, now: float, folder: Folder, state: _State, settling: bool) -> Event | None:
        """``settling``: a lower step may be complete in a moment. It is waited for, but no longer than SETTLE_S."""
        if state.reason is not None and not state.reported and (folder.stable or folder.error):
            # Only on a second look: when the first was spoilt by a deletion, the folder is gone by now.
            state.reported = True
            return Damaged(folder.step, folder.path, state.reason)
        complete = folder.stable_last or now - state.since >= SETTLE_S
        if not state.valid and (complete or folder.error) and (state.reason is None or now >= state.retry_at):
            self._validate(now, folder, state)
        if not state.valid or (settling and now - state.ready_since < SETTLE_S):
            return None
        self._told.pop(folder.path.name, None)
        self._told[folder.path.name] = folder.fingerprint
        return Found(folder.step, folder.path, folder.fingerprint)

    def _validate(self, now: float, folder: Folder, state: _State) -> None:
        state.retry_at = float("inf")
        if folder.error is not None:
            state.reason = folder.error
            return
        try:
            self._check(folder.path)
        except IntegrityError as error:
            state.reason = str(error)
        except (P2PCastError, OSError) as error:
            state.reason = str(error)
            state.retry_at = now + RETRY_S
        else:
            state.valid, state.ready_since, state.reason = True, now, None

    def _forget(self) -> None:
        gone = [name for name in self._told if name not in self._states]
        for name in gone[: max(0, len(gone) - KEPT_GONE)]:
            del self._told[name]


async def watch(
    path: Path, *, poll_s: float = POLL_S, check: Callable[[Path], None] = check_checkpoint
) -> AsyncGenerator[Event, None]:
    """Events for ever; the folders that exist come first, ascending. Close it (``contextlib.aclosing``) to stop.

    ``path`` may be made later. Raises LocalError when it can't be listed. Disk work runs in a thread of its own.
    """
    loop = asyncio.get_running_loop()
    core = Watch(check)
    pool = ThreadPoolExecutor(1, thread_name_prefix="p2pcast-watch")
    try:
        while True:
            begun = loop.time()
            listing = await loop.run_in_executor(pool, scan, path)
            scan_s = loop.time() - begun
            for event in await loop.run_in_executor(pool, core.observe, loop.time(), listing):
                yield event
            await asyncio.sleep(max(poll_s, min(scan_s / SCAN_SHARE, MAX_POLL_S)))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
