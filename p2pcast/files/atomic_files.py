"""Writes files durably and atomically: a reader finds a whole file or none.

Every file is created under a hidden name next to its final one (``.<name>.part-<random>``), synced and renamed. Then
its folder is synced. A failure removes the hidden file. Operating system errors become LocalError with the file's name
and the reason.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from p2pcast.files import disk
from p2pcast.ground.errors import LocalError

_REASONS = {
    errno.ENOSPC: "no space is left on the device; free some or choose another folder",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another folder",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "permission denied; check the owner and mode of the file and its folders",
    errno.EPERM: "permission denied; check the owner and mode of the file and its folders",
    errno.ENOENT: "there is no such file or folder",
    errno.ENOTDIR: "a part of the path is not a folder",
    errno.EISDIR: "it is a folder, not a file",
    errno.EEXIST: "it exists already; remove it or choose another name",
    errno.ENOTEMPTY: "it exists already and is not empty; remove it or choose another name",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.ELOOP: "it is a link; remove the link if you did not create it",
    errno.EIO: "the device reports an input/output error",
}


def reason(error: OSError) -> str:
    """Return the cause of a system error, in words."""
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)


def is_full(error: BaseException) -> bool:
    """Whether an error raised by this package means that a file system is full."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explained(what: str, path: Path | str) -> Iterator[None]:
    """Context manager that turns an OSError into a LocalError: ``cannot <what> <path>: <reason>``."""
    try:
        yield
    except LocalError:
        raise  # already has a reason
    except OSError as error:
        # If the error concerns a file inside the folder, name that file.
        inner = error.filename if isinstance(error.filename, str) else None
        name = inner if inner and inner.startswith(f"{path}{os.sep}") else str(path)
        raise LocalError(f"cannot {what} {name}: {reason(error)}") from error


def part_path(final: Path) -> Path:
    """Return a new hidden name next to ``final`` for an incomplete file."""
    return final.with_name(f".{final.name}.part-{secrets.token_hex(6)}")


def fsync_dir(path: Path | str) -> None:
    """Make a folder's names durable. Raises LocalError."""
    with explained("sync", path):
        disk.sync_folder(Path(path))


def atomic_write(path: Path | str, data: bytes, mode: int | None = disk.PRIVATE.file, *, replace: bool = True) -> None:
    """Write ``data`` to ``path`` atomically and durably. Raises LocalError with the file and the reason.

    If ``replace`` is False and the file exists, the file is kept and FileExistsError is raised. If ``mode`` is None,
    the umask applies, which suits files that a user asked for.
    """
    final = Path(path)
    part = part_path(final)
    with explained("write", final):
        try:
            fd = disk.create(part, os.O_WRONLY | os.O_EXCL, disk.USERS.file if mode is None else mode)
            try:
                if mode is not None:
                    os.fchmod(fd, mode)
                disk.write(fd, part, data)
                disk.sync(fd, part)
            finally:
                os.close(fd)
            commit(part, final, replace=replace)
        except BaseException as error:
            with suppress(OSError):
                disk.unlink(part)
            if isinstance(error, FileExistsError) and not replace:
                raise _Existing(str(final)) from None
            raise
    fsync_dir(final.parent)


class _Existing(LocalError, FileExistsError):
    """``atomic_write(replace=False)`` found an existing file. It has both types, so callers can catch either."""

    def __str__(self) -> str:
        return f"cannot write {self.args[0]}: it exists already"


def commit(part: Path, final: Path, *, replace: bool = True) -> None:
    """Rename a synced file to its final name. Raises OSError; the caller syncs the folder."""
    if replace:
        disk.rename(part, final)
    else:
        disk.link(part, final)
        disk.unlink(part)


@contextmanager
def atomic_folder(final: Path, modes: disk.Modes = disk.PRIVATE) -> Iterator[Path]:
    """Yield a hidden folder next to ``final``; after the block, it is synced, file by file, and renamed.

    ``final`` must be missing or an empty folder. On any failure the hidden folder is removed. Raises LocalError.
    """
    final = Path(final)
    with explained("create", final):
        if final.is_symlink() or (final.exists() and not final.is_dir()):
            raise LocalError(
                f"cannot create {final}: the name belongs to something other than a folder; choose another name"
            )
        if final.is_dir() and any(final.iterdir()):
            raise LocalError(
                f"cannot create {final}: it exists already and is not empty; remove it or choose another name"
            )
        disk.make_folder(final.parent, modes.folder)
        part = part_path(final)
        disk.mkdir(part, modes.folder)
    try:
        # An OSError from the caller's block keeps its own file name, which explained() reports.
        with explained("write", part):
            yield part
            _sync_tree(part)
        with explained("create", final):
            disk.rename(part, final)
    except BaseException:
        with suppress(OSError):
            disk.remove_tree(part)
        raise
    fsync_dir(final.parent)


def _sync_tree(top: Path) -> None:
    for folder, _, names in os.walk(top, topdown=False):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    disk.sync(fd, Path(path))
                finally:
                    os.close(fd)
        fsync_dir(folder)
