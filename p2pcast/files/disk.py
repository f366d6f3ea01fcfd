"""Makes all file system changes that must survive a crash. Each change is a step, and a watcher can intercept steps.

Guarantee: every file that a daemon must find again is written, named, removed and made durable through this module,
including stores into memory-mapped shadows. Without a watcher, a step is just the system call. A watcher sees every
step before it happens, and performs it. So a recorder knows every state that a crash could leave
(``tests/daemons/swarm/disk_image.py``), and a killer can kill the process between any two steps
(``tests/chaos/killed_command.py``). All functions raise OSError.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from p2pcast.ground.limits import KIB
from p2pcast.ground.step_hook import StepHook

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

IOV_MAX = 512
"""Buffers in one pwritev: below every kernel's limit."""
CALL_BYTES = 512 * KIB
"""Bytes written in one system call.

For 2 MiB and more at once, Linux takes huge pages for its page cache. On most virtual machines the host must first
supply these pages, which costs the writer 2 s/GB and more.
"""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True, slots=True)
class Modes:
    """Permission bits of new files and folders, before the umask."""

    file: int
    folder: int


PRIVATE = Modes(0o600, 0o700)
"""A daemon's own files: the default."""
USERS = Modes(0o666, 0o777)
"""Files that a user asked for: only the umask restricts access."""


@dataclass(frozen=True, slots=True)
class DiskStep:
    """``what``: create, write, allocate, sync, sync folder, rename, exchange, link, symlink, unlink, mkdir, rmdir or
    store.

    ``to``: the second name. ``fd``: descriptor, for steps on an open file. ``parts`` are written at ``at``; allocate
    reserves ``size`` bytes starting at ``at``.
    """

    what: str
    path: Path
    to: Path | None = None
    fd: int = -1
    at: int = 0
    size: int = 0
    parts: Sequence[Buffer] = ()


class DiskWatcher(Protocol):
    def step(self, step: DiskStep, do: Callable[[], T]) -> T:
        """Perform the step and return its result. May be called from any thread."""


_watch: StepHook[DiskWatcher] = StepHook()
watched = _watch.by
"""Send all steps of this process through a watcher during the block."""


def _step(step: DiskStep, do: Callable[[], T]) -> T:
    return do() if _watch.watcher is None else _watch.watcher.step(step, do)


def free_bytes(path: Path) -> float:
    """Return the space available to this user in an existing folder; infinite on a tmpfs without a size limit."""
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize if room.f_blocks else float("inf")


# -- files


def create(path: Path, flags: int, mode: int = PRIVATE.file) -> int:
    """Create a file, or without O_EXCL truncate or reopen it, and return its descriptor.

    ``flags`` are added to O_CREAT, O_NOFOLLOW and O_CLOEXEC.
    """
    safe = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return _step(DiskStep("create", path, size=flags), lambda: os.open(path, flags | safe, mode))


def write(fd: int, path: Path, data: Buffer) -> None:
    """Write every byte at the descriptor's position."""

    def do() -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(fd, view[:CALL_BYTES]) :]

    if _watch.watcher is None:
        do()
    else:
        _watch.watcher.step(DiskStep("write", path, fd=fd, at=os.lseek(fd, 0, os.SEEK_CUR), parts=[data]), do)


def write_at(fd: int, path: Path, parts: Sequence[Buffer], at: int) -> None:
    """Write every byte of ``parts``, one after the other, starting at ``at``."""

    def do() -> None:
        begin = at
        for some in _calls(parts):
            size = sum(len(p) for p in some)
            done = os.pwritev(fd, some, begin)
            if done < size:
                rest = memoryview(b"".join(some))[done:]
                while rest:
                    more = os.pwrite(fd, rest, begin + done)
                    rest, done = rest[more:], done + more
            begin += size

    _step(DiskStep("write", path, fd=fd, at=at, parts=parts), do)


def _calls(parts: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    """Yield ``parts`` as views, in order, grouped by system call."""
    some: list[memoryview] = []
    room = CALL_BYTES
    for part in parts:
        left = memoryview(part).cast("B")
        while left:
            if not room or len(some) == IOV_MAX:
                yield some
                some, room = [], CALL_BYTES
            some.append(left[:room])
            left = left[len(some[-1]) :]
            room -= len(some[-1])
    if some:
        yield some


def copy(source: int, fd: int, path: Path, at: int, size: int, *, direct: bool) -> int:
    """Copy in the kernel, at the same offset, and return the bytes copied. ``direct``: share blocks if the file system
    supports it.
    """

    def do() -> int:
        if direct:
            return os.copy_file_range(source, fd, size, at, at)
        os.lseek(fd, at, os.SEEK_SET)
        return os.sendfile(fd, source, at, size)

    if _watch.watcher is None:
        return do()
    return _watch.watcher.step(DiskStep("write", path, fd=fd, at=at, parts=[os.pread(source, size, at)]), do)


def allocate(fd: int, path: Path, at: int, size: int) -> None:
    """Allocate space; the new range reads as zeros."""
    _step(DiskStep("allocate", path, fd=fd, at=at, size=size), lambda: os.posix_fallocate(fd, at, size))


def resize(fd: int, path: Path, size: int) -> None:
    _step(DiskStep("resize", path, fd=fd, size=size), lambda: os.ftruncate(fd, size))


def sync(fd: int, path: Path) -> None:
    """Make the contents durable; the name is made durable by ``sync_folder``."""
    _step(DiskStep("sync", path, fd=fd), lambda: os.fsync(fd))


def store(path: Path, do: Callable[[], None]) -> None:
    """Call ``do``, which stores into a memory map of the file at ``path``."""
    if _watch.watcher is None:
        do()
    else:
        _watch.watcher.step(DiskStep("store", path), do)


# -- names


def rename(path: Path, to: Path) -> None:
    """Rename; an existing ``to`` is replaced atomically."""
    _step(DiskStep("rename", path, to), lambda: os.replace(path, to))


def exchange(path: Path, to: Path) -> bool:
    """Swap two names atomically; returns False if the system can't."""
    swap = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if swap is None:
        return False

    def do() -> bool:
        if swap(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(to), _RENAME_EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in _NO_EXCHANGE:
            return False
        raise OSError(code, os.strerror(code), str(to))

    return _step(DiskStep("exchange", path, to), do)


def link(path: Path, to: Path) -> None:
    _step(DiskStep("link", path, to), lambda: os.link(path, to))


def symlink(target: str, path: Path) -> None:
    _step(DiskStep("symlink", path, Path(target)), lambda: os.symlink(target, path))


def unlink(path: Path, *, missing_ok: bool = False) -> None:
    try:
        _step(DiskStep("unlink", path), lambda: os.unlink(path))
    except FileNotFoundError:
        if not missing_ok:
            raise


def mkdir(path: Path, mode: int = PRIVATE.folder) -> None:
    _step(DiskStep("mkdir", path), lambda: os.mkdir(path, mode))


def rmdir(path: Path) -> None:
    _step(DiskStep("rmdir", path), lambda: os.rmdir(path))


def sync_folder(path: Path) -> None:
    """Make a folder's names durable."""

    def do() -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    _step(DiskStep("sync folder", path), do)


# -- several steps


def make_folder(path: Path, mode: int = PRIVATE.folder) -> None:
    """Create the folder and its missing parents, each made durable in its parent. An existing folder is kept."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent, mode)
    with suppress(FileExistsError):
        mkdir(path, mode)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    sync_folder(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder with its contents, without following links. Missing files are ignored.

    A folder's contents are removed before the folder, so a crash leaves a valid folder with the rest.
    """
    try:
        with os.scandir(path) as entries:
            found = list(entries)
    except FileNotFoundError:
        return
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            unlink(Path(entry.path), missing_ok=True)
    with suppress(FileNotFoundError):
        rmdir(path)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        unlink(path, missing_ok=True)
