"""Folders private to this user, also below folders that every user of the machine may write to: /dev/shm, /tmp.

Guarantee: a folder that ``own_folder`` accepts belongs to this user, has mode 0700 and is not a link. Its path follows
no other user's link, and no folder in which every user may rename it. So paths into the folder lead where this user
intended, and its files are safe from other users whatever the files' modes. Trusted are root, and each parent folder's
owner and writing group, because the operator chose the place.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path

from p2pcast.files import disk
from p2pcast.files.atomic_files import explained
from p2pcast.ground.errors import LocalError

OTHERS = 0o077
"""Permission bits of all users but the owner."""
UMASK = 0o077
_OVERFLOW_UID = 65534
"""The kernel's placeholder for owners without a number in a user namespace."""
_INITIAL_MAP = ["0", "0", "4294967295"]


def own_folder(path: Path, marks: Collection[str] | None, *, make: bool = True) -> int:
    """Open the folder, creating it if it is missing and ``make`` is set. The caller closes the returned descriptor.

    Release 0.1 created folders readable by others. If such a folder is this user's, and is empty or contains one of the
    names ``marks`` (None: anything), it is made private with all its contents. Raises LocalError if the folder is a
    link, another user's, writable by all users, or below a folder in which other users may rename it.
    """
    with explained("create" if make else "open", path):
        if path.is_symlink():
            raise _link_error(path)
        if make:
            disk.make_folder(path)
        check_above(path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
                raise _link_error(path) from None
            raise
        try:
            _tighten(fd, path, marks)
        except BaseException:
            os.close(fd)
            raise
    return fd


def opened(folder: int, path: Path, flags: int) -> int:
    """Open an existing file in the folder with descriptor ``folder`` and return its descriptor.

    Raises OSError, and LocalError if it is a link, another user's file, or not a regular file.
    """
    try:
        fd = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _foreign_file_error(path) from None
        raise
    try:
        check_file(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_file(fd: int, path: Path) -> None:
    """Raise LocalError unless the file is this user's, regular, and has no other hard link."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
        raise _foreign_file_error(path)


def check_shared(path: Path) -> int:
    """Return permission bits for files in a folder that others read: the folder's, without other users' write bits.

    Raises LocalError if another user could place files there: the folder belongs to neither root nor this user, or all
    users may write to it.
    """
    with explained("open", path):
        found = path.stat()
    if found.st_uid not in _trusted():
        raise LocalError(f"{path} belongs to user {found.st_uid}, who could replace files in it; choose another folder")
    if found.st_mode & stat.S_IWOTH:
        raise LocalError(
            f"all users of this machine may write to {path} and replace files in it; run: chmod o-w {path}"
        )
    return stat.S_IMODE(found.st_mode) & 0o755 | stat.S_IRWXU


def _tighten(fd: int, path: Path, marks: Collection[str] | None) -> None:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        raise LocalError(
            f"{path} belongs to user {found.st_uid}, not to the user of this process ({os.geteuid()}); "
            "run this as that user, or choose another folder"
        )
    if found.st_mode & stat.S_IWOTH:
        raise LocalError(
            f"all users of this machine may write to {path}; "
            f"check its contents, then run: chmod 700 {path}, or choose another folder"
        )
    if not found.st_mode & OTHERS:
        return
    names = os.listdir(fd)
    if names and marks is not None and not set(names) & set(marks):
        raise LocalError(
            f"{path} can be read by others and holds files that are not p2pcast's; "
            f"choose an empty folder, or run: chmod 700 {path}"
        )
    os.fchmod(fd, stat.S_IMODE(found.st_mode) & ~OTHERS)
    for place, folders, files, folder in os.fwalk(".", dir_fd=fd):
        for name in (*folders, *files):
            _tighten_entry(folder, name, path / place / name)


def _tighten_entry(folder: int, name: str, path: Path) -> None:
    found = os.lstat(name, dir_fd=folder)
    if found.st_uid != os.geteuid():
        raise LocalError(f"{path} belongs to user {found.st_uid}, who could change it; check it, then remove it")
    if found.st_mode & OTHERS and (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        # Other users can't reach this folder, since the topmost folder is private already.
        os.chmod(name, stat.S_IMODE(found.st_mode) & ~OTHERS, dir_fd=folder)


def check_above(path: Path) -> None:
    """Raise LocalError if another user may rename a folder on the path, or redirect a link on the path."""
    _check_links(path.parent.absolute())
    for above in (where := path.parent.resolve(), *where.parents):
        found = above.stat()
        if found.st_mode & stat.S_IWOTH and not (found.st_mode & stat.S_ISVTX and found.st_uid in _trusted()):
            raise LocalError(
                f"all users of this machine may rename files in {above}, and so {path}; "
                f"choose another folder, or run: chmod +t {above}"
            )


def _check_links(path: Path) -> None:
    for link in (path, *path.parents):
        if link.is_symlink():
            if (owner := link.lstat().st_uid) not in _trusted():
                raise LocalError(f"{link} is a link of user {owner}, who could redirect it; choose another path")
            _check_links(link.parent / link.readlink())


def _trusted() -> Collection[int]:
    """Users that may own links on the path, or parent folders that all users may write to."""
    own = (0, os.geteuid())
    # In a user namespace, unmapped users, including the machine's root, appear under this number.
    return own if Path("/proc/self/uid_map").read_text().split() == _INITIAL_MAP else (*own, _OVERFLOW_UID)


def _link_error(path: Path) -> LocalError:
    return LocalError(f"{path} is a link; name its target folder, or remove the link if you did not create it")


def _foreign_file_error(path: Path) -> LocalError:
    return LocalError(
        f"{path} is a link, not a regular file, or belongs to another user, so p2pcast did not create it; "
        "check it, then remove it"
    )
