"""Folders that are this user's alone, also below folders that every user of the machine may write to: /dev/shm, /tmp.

Promise: a folder that ``own_folder`` accepts belongs to this user, has mode 0700, is no link, is reached over no other user's link, and is not below a folder in which every
user may rename it. So from then on paths into it lead where this user made them lead, and files in it are safe from other users whatever their own modes are.
Trusted are root, and the owner of each folder above with the group that may write to it: the operator chose the place.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path

from p2pcast.errors import LocalError
from p2pcast.store import disk
from p2pcast.store.files import explained

OTHERS = 0o077
"""Permission bits of everybody but the owner."""
UMASK = 0o077
_OVERFLOW_UID = 65534
"""What the kernel shows for owners that a user namespace has no number for."""
_INITIAL_MAP = ["0", "0", "4294967295"]


def own_folder(path: Path, marks: Collection[str] | None, *, make: bool = True) -> int:
    """A descriptor of the folder, which is made if it is missing and ``make``. The caller closes it.

    A folder of this user's that others may read, as version 0.1 made them, is tightened with all that lies in it, if it is empty or holds one of the names
    ``marks`` (None: whatever it holds). Raises LocalError: a link, another user's, writable by all users, or below a folder in which others may rename it.
    """
    with explained("create" if make else "open", path):
        if path.is_symlink():
            raise _link(path)
        if make:
            disk.make_folder(path)
        _check_above(path)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
                raise _link(path) from None
            raise
        try:
            _tighten(fd, path, marks)
        except BaseException:
            os.close(fd)
            raise
    return fd


def opened(folder: int, path: Path, flags: int) -> int:
    """A descriptor of a file that is there, in the folder of which ``folder`` is a descriptor. Raises OSError; LocalError: a link, another user's, or no plain file."""
    try:
        fd = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _strange(path) from None
        raise
    try:
        check_file(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_file(fd: int, path: Path) -> None:
    """Raises LocalError unless the file is this user's, plain, and has no other name that leads out of its folder."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink > 1:
        raise _strange(path)


def check_shared(path: Path) -> int:
    """Permission bits for files in a folder that other users are meant to read: the folder's own bits, without the other users' right to write.

    Raises LocalError when somebody else could put files there in our name: another user than root owns it, or all users may write to it.
    """
    with explained("open", path):
        found = path.stat()
    if found.st_uid not in _trusted():
        raise LocalError(f"{path} belongs to user {found.st_uid}, who could replace what is written there; choose another folder")
    if found.st_mode & stat.S_IWOTH:
        raise LocalError(
            f"all users of this machine may write to {path}, and replace what is written there; run: chmod o-w {path}"
        )
    return stat.S_IMODE(found.st_mode) & 0o755 | stat.S_IRWXU


def _tighten(fd: int, path: Path, marks: Collection[str] | None) -> None:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        raise LocalError(
            f"{path} belongs to user {found.st_uid}, not to the user of this process ({os.geteuid()}); run this as that user, or choose another folder"
        )
    if found.st_mode & stat.S_IWOTH:
        raise LocalError(
            f"all users of this machine may write to {path}; look at what lies in it, then run: chmod 700 {path}, or choose another folder"
        )
    if not found.st_mode & OTHERS:
        return
    names = os.listdir(fd)
    if names and marks is not None and not set(names) & set(marks):
        raise LocalError(
            f"{path} can be read by others and holds files that are not p2pcast's; choose a folder of its own, or run: chmod 700 {path}"
        )
    os.fchmod(fd, stat.S_IMODE(found.st_mode) & ~OTHERS)
    for place, folders, files, folder in os.fwalk(".", dir_fd=fd):
        for name in (*folders, *files):
            _tighten_entry(folder, name, path / place / name)


def _tighten_entry(folder: int, name: str, path: Path) -> None:
    found = os.lstat(name, dir_fd=folder)
    if found.st_uid != os.geteuid():
        raise LocalError(f"{path} belongs to user {found.st_uid}, who could change it: look at it, then remove it")
    if found.st_mode & OTHERS and (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        # Others have no way here any more since the topmost folder is closed.
        os.chmod(name, stat.S_IMODE(found.st_mode) & ~OTHERS, dir_fd=folder)


def _check_above(path: Path) -> None:
    """Raises LocalError when another user may rename a folder on the way, or turn a link, so that another comes to have its name."""
    _check_links(path.parent.absolute())
    for above in (where := path.parent.resolve(), *where.parents):
        found = above.stat()
        if found.st_mode & stat.S_IWOTH and not (found.st_mode & stat.S_ISVTX and found.st_uid in _trusted()):
            raise LocalError(
                f"all users of this machine may rename what lies in {above}, and so {path}; choose another folder, or run: chmod +t {above}"
            )


def _check_links(path: Path) -> None:
    for link in (path, *path.parents):
        if link.is_symlink():
            if (owner := link.lstat().st_uid) not in _trusted():
                raise LocalError(f"{link} is a link of user {owner}, who could turn it elsewhere; choose another path")
            _check_links(link.parent / link.readlink())


def _trusted() -> Collection[int]:
    """Owners of links above, and of folders above that all may write to, with which this user may keep its files."""
    own = (0, os.geteuid())
    # In a user namespace, users without a number there look like this; the machine's root is one of them.
    return own if Path("/proc/self/uid_map").read_text().split() == _INITIAL_MAP else (*own, _OVERFLOW_UID)


def _link(path: Path) -> LocalError:
    return LocalError(f"{path} is a link; name the folder that it leads to, or remove it if it is not yours")


def _strange(path: Path) -> LocalError:
    return LocalError(
        f"{path} is a link, not a regular file, or belongs to another user, so p2pcast did not make it: look at it, then remove it"
    )
