"""What may lie on a disk after a crash: a small model of a file system that knows what has been made durable. Pure, but for ``materialise``.

Two kinds of crash. A *killed* process leaves all that the system calls before it did; the one that it died in may have been half done (``torn``). When the
*machine* goes down, only what was synced is sure to be there: contents by fsync of the file, names by fsync of the folder. What was not may be there all the
same, in part, in any order: ``Left`` names the extremes that are tried. What lies in memory (tmpfs) is gone then. A mirror's store is another machine: what it was
told to keep or to remove is kept or removed, whatever becomes of this one.
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
    """What a machine that went down leaves of all that was not synced."""

    NOTHING = "neither contents nor names"
    NAMES = "names, and files as they were last synced"
    HALVES = "names, and the first halves of what was written since"
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
class Done:
    """A step as it was recorded (``p2pcast.store.disk.Step``); ``file`` numbers the file that it was done to, ``data`` is what was written. ``put`` and
    ``remove``: what a mirror was asked for (``p2pcast.mirror.requests``), in the form in which its folder holds it."""

    what: str
    path: str
    to: str = ""
    file: int = -1
    at: int = 0
    size: int = 0
    data: bytes = b""


class Image:
    """One file system, from an empty folder on. Paths are relative to it."""

    def __init__(self) -> None:
        self.root = Folder()
        self._files: dict[int, File] = {}

    def apply(self, done: Done) -> None:
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
    def torn(self, done: Done) -> Iterator[bool]:
        """Half of the step is done while the block runs; False where it can't be half done."""
        if done.what == "put":
            # A folder that is a mirror holds an object under another name, which no list shows, until it is whole.
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

    def _names(self, done: Done) -> None:
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

    def _file(self, done: Done) -> File:
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
        """What another machine keeps; None: nothing any more."""
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

    def fingerprint(self, left: Left | None = None, memory: Iterable[str] = (), folders: Iterable[str] = ("",)) -> bytes:
        """Of what ``materialise`` writes into ``folders``: two moments with the same one are the same crash there."""
        hasher = blake3()
        gone = set(memory) if left is not None else set()
        for folder in folders:
            if (found := self._found(folder, left, gone)) is not None:
                _mix(found, hasher, left, gone, f"{folder}/" if folder else "")
        return hasher.digest()

    def materialise(
        self, target: Path, left: Left | None = None, memory: Iterable[str] = (), folders: Iterable[str] = ("",)
    ) -> None:
        """Write ``folders`` (all of them: the root's) out, below the folder ``target``. ``left``: as a machine that went down leaves it; then the folders ``memory`` are gone."""
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
        contents = b"" if isinstance(node, Folder) else node.target.encode() if isinstance(node, Link) else _contents(node, left)
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
    """Of the bytes that differ the first half as they are after, the rest as before. Both are of one length."""
    if before == after:
        return after
    differ = np.flatnonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))
    middle = int(differ[len(differ) // 2])
    return after[:middle] + before[middle:]
