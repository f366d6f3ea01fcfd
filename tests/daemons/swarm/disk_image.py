"""The possible contents of a disk after a crash: a small file system model that tracks what has been made durable.
Pure, except ``materialise``.

Two kinds of crash are modelled. A *killed* process leaves the effects of all completed system calls; the interrupted
call may be half done (``torn``). After a *machine* failure, only synced data is certain: contents by fsync of the file,
names by fsync of the folder. Unsynced data may survive in part and in any order; ``Left`` names the extremes that are
tried. Memory (tmpfs) is lost in a machine failure. A mirror's store is another machine: its objects survive a failure
of this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import numpy as np
from blake3 import blake3


class Left(Enum):
    """The part of all unsynced data that survives a machine failure."""

    NOTHING = "neither contents nor names"
    NAMES = "names, and files as they were last synced"
    HALVES = "names, and the first halves of the bytes written since"
    CONTENTS = "contents, under the names that were synced"


@dataclass(slots=True, eq=False)
class File:
    now: bytearray = field(default_factory=bytearray)
    kept: bytes = b""


@dataclass(slots=True, eq=False)
class Folder:
    now: dict[str, Node] = field(default_factory=dict)
    kept: dict[str, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    target: str


Node = File | Folder | Link


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One recorded step (``p2pcast.files.disk.DiskStep``). ``file``: number of the file, ``data``: bytes written.
    ``put`` and ``remove``: requests to a mirror (``p2pcast.mirror.requests``), in the form in which the mirror's folder
    holds the object.
    """

    what: str
    path: str
    to: str = ""
    file: int = -1
    at: int = 0
    size: int = 0
    data: bytes = b""


class Image:
    """One file system, initially an empty folder. Paths are relative to that folder."""

    def __init__(self) -> None:
        self.root = Folder()
        self._files: dict[int, File] = {}

    def apply(self, done: RecordedStep) -> None:
        what = done.what
        if what == "create":
            folder, name = self._place(done.path)
            found = folder.now.get(name)
            file = found if isinstance(found, File) else File()
            if done.size & os.O_TRUNC:
                file.now = bytearray()
            folder.now[name] = self._files[done.file] = file
        elif what in ("write", "store"):
            file = self._file(done)
            if len(file.now) < done.at:
                file.now.extend(bytes(done.at - len(file.now)))
            file.now[done.at : done.at + len(done.data)] = done.data
        elif what == "allocate":
            file = self._file(done)
            file.now.extend(bytes(max(0, done.at + done.size - len(file.now))))
        elif what == "resize":
            file = self._file(done)
            file.now = file.now[: done.size] + bytes(max(0, done.size - len(file.now)))
        elif what == "sync":
            file = self._file(done)
            file.kept = bytes(file.now)
        elif what == "sync folder":
            folder = self._folder(done.path)
            folder.kept = dict(folder.now)
        elif what == "put":
            self._elsewhere(done.path, File(bytearray(done.data), done.data))
        elif what == "remove":
            self._elsewhere(done.path, None)
        else:
            self._names(done)

    @contextmanager
    def torn(self, done: RecordedStep) -> Iterator[bool]:
        """Apply half of the step while the block runs; yields False if the step is atomic."""
        if done.what == "put":
            # A mirror in a folder keeps an unfinished object under another name, which no listing shows.
            part, half = f"{done.path}#1", done.data[: len(done.data) // 2]
            self._elsewhere(part, File(bytearray(half), half))
            yield True
            self._elsewhere(part, None)
            return
        if done.what not in ("write", "store"):
            yield False
            return
        file = self._file(done)
        saved = bytearray(file.now)
        before = bytes(saved[done.at : done.at + len(done.data)]).ljust(len(done.data), b"\0")
        half = _half(before, done.data)
        self.apply(replace(done, data=half if done.what == "store" else done.data[: len(done.data) // 2]))
        yield half != done.data
        file.now = saved

    def _names(self, done: RecordedStep) -> None:
        what, (folder, name) = done.what, self._place(done.path)
        if what == "mkdir":
            folder.now[name] = Folder()
        elif what == "symlink":
            folder.now[name] = Link(done.to)
        elif what in ("unlink", "rmdir"):
            folder.now.pop(name, None)
        elif what == "link":
            to, other = self._place(done.to)
            to.now[other] = folder.now[name]
        elif what == "rename":
            to, other = self._place(done.to)
            to.now[other] = folder.now.pop(name)
        elif what == "exchange":
            to, other = self._place(done.to)
            folder.now[name], to.now[other] = to.now[other], folder.now[name]
        else:
            raise ValueError(f"a step that no disk does: {what}")

    def _file(self, done: RecordedStep) -> File:
        if done.what != "store":
            return self._files[done.file]
        folder, name = self._place(done.path)
        file = folder.now[name]
        assert isinstance(file, File)
        return file

    def _folder(self, path: str) -> Folder:
        at = self.root
        for part in Path(path).parts:
            found = at.now.setdefault(part, Folder())
            assert isinstance(found, Folder)
            at = found
        return at

    def _elsewhere(self, path: str, file: File | None) -> None:
        """Set an object that another machine keeps; None removes the object."""
        at = self.root
        for part in Path(path).parent.parts:
            found = at.now.setdefault(part, Folder())
            assert isinstance(found, Folder)
            at.kept[part] = found
            at = found
        for names in (at.now, at.kept):
            names.pop(Path(path).name, None)
            if file is not None:
                names[Path(path).name] = file

    def _found(self, path: str, left: Left | None, gone: set[str]) -> Folder | None:
        at = self.root
        for part in Path(path).parts:
            found = None if part in gone and at is self.root else _names_of(at, left).get(part)
            if not isinstance(found, Folder):
                return None
            at = found
        return at

    def _place(self, path: str) -> tuple[Folder, str]:
        return self._folder(os.path.dirname(path)), os.path.basename(path)

    def fingerprint(
        self, left: Left | None = None, memory: Iterable[str] = (), folders: Iterable[str] = ("",)
    ) -> bytes:
        """Hash of what ``materialise`` writes into ``folders``. Moments with the same hash are the same crash there."""
        hasher = blake3()
        gone = set(memory) if left is not None else set()
        for folder in folders:
            if (found := self._found(folder, left, gone)) is not None:
                _mix(found, hasher, left, gone, f"{folder}/" if folder else "")
        return hasher.digest()

    def materialise(
        self, target: Path, left: Left | None = None, memory: Iterable[str] = (), folders: Iterable[str] = ("",)
    ) -> None:
        """Write ``folders`` (by default all folders of the root) below the folder ``target``. ``left``: the state after
        a machine failure, in which the folders ``memory`` are lost.
        """
        gone = set(memory) if left is not None else set()
        for folder in set(folders):
            if (found := self._found(folder, left, gone)) is not None:
                _write(found, target / folder, left, gone, f"{folder}/" if folder else "")


def _names_of(folder: Folder, left: Left | None) -> dict[str, Node]:
    return folder.kept if left in (Left.NOTHING, Left.CONTENTS) else folder.now


def _mix(folder: Folder, hasher: blake3, left: Left | None, gone: set[str], prefix: str) -> None:
    for name, node in sorted(_names_of(folder, left).items()):
        path = f"{prefix}{name}"
        if path in gone:
            continue
        contents = (
            b""
            if isinstance(node, Folder)
            else node.target.encode()
            if isinstance(node, Link)
            else _contents(node, left)
        )
        hasher.update(f"{path}\0{type(node).__name__}\0{len(contents)}\0".encode())
        hasher.update(contents)
        if isinstance(node, Folder):
            _mix(node, hasher, left, gone, f"{path}/")


def _write(folder: Folder, target: Path, left: Left | None, gone: set[str], prefix: str) -> None:
    target.mkdir(0o700, parents=True, exist_ok=True)
    for name, node in _names_of(folder, left).items():
        path = f"{prefix}{name}"
        if path in gone:
            continue
        if isinstance(node, Folder):
            _write(node, target / name, left, gone, f"{path}/")
        elif isinstance(node, Link):
            (target / name).symlink_to(node.target)
        else:
            fd = os.open(target / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "wb") as file:
                file.write(_contents(node, left))


def _contents(file: File, left: Left | None) -> bytes:
    if left in (None, Left.CONTENTS):
        return bytes(file.now)
    if left is not Left.HALVES or bytes(file.now) == file.kept:
        return file.kept
    return _half(file.kept.ljust(len(file.now), b"\0")[: len(file.now)], bytes(file.now))


def _half(before: bytes, after: bytes) -> bytes:
    """The first half of the differing bytes as in ``after``, the rest as in ``before``. Both have the same length."""
    if before == after:
        return after
    differ = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
    middle = int(differ[len(differ) // 2])
    return after[:middle] + before[middle:]
