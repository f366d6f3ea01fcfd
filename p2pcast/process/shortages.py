"""Recognises errors that mean this machine is short of something: open files, memory, threads, disk space. Pure.

Such an error is not the fault of the work that failed, which succeeds once the resource is available again. A failing
disk (EIO) counts too, since restarting the daemon does not repair the disk.
"""

from __future__ import annotations

import errno
from typing import Final

from p2pcast.ground.errors import P2PCastError

_FILES = "too many files are open: raise the limit of open files (ulimit -n)"
_MEMORY = "no memory is left: end other programs, or give this machine more"
_ROOM = "no space is left on the device: make room on the disk"
_DEVICE = "the disk reports an input/output error: check the disk"
_THREADS = "no thread can be started: raise the limit of processes (ulimit -u)"

_ERRNOS: Final = {
    errno.EMFILE: _FILES,
    errno.ENFILE: "too many files are open on this machine: raise fs.file-max, or end other programs",
    errno.ENOMEM: _MEMORY,
    errno.ENOBUFS: _MEMORY,
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: "the disk quota is used up: make room on the disk",
    errno.EIO: _DEVICE,
}
_SQLITE: Final = {
    7: _MEMORY,
    10: "the database's disk fails, or no more files can be opened: check the disk and ulimit -n",
    13: "the database's disk is full: make room on the disk",
    14: "the database's file cannot be opened: check ulimit -n and the disk",
}
"""By SQLite's primary result code: NOMEM, IOERR, FULL, CANTOPEN."""
_POSTGRESQL: Final = {
    "53100": "the database's disk is full: make room on the database's machine",
    "53200": "the database has no memory left: give its machine more",
    "58030": "the database's disk fails: check the disk of the database's machine",
}
"""By SQLSTATE."""


def scarce(error: BaseException | None) -> bool:
    """Whether the machine is short of something, other than through a failing device, so every file is still intact."""
    return shortage(error) not in (None, _DEVICE)


def shortage(error: BaseException | None) -> str | None:
    """Return the machine's shortage in words, without file names; None if the error is not a shortage.

    A p2pcast error is judged by the error it reports, and a SQLAlchemy error by its driver's. A group counts if all its
    errors do.
    """
    if error is None:
        return None
    if isinstance(error, BaseExceptionGroup):
        found = [shortage(inner) for inner in error.exceptions]
        return found[0] if all(found) else None
    if isinstance(error, MemoryError):
        return _MEMORY
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return _THREADS
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return _ERRNOS[error.errno]
    if isinstance(error, P2PCastError):
        return shortage(error.__cause__ or error.__context__)
    if isinstance(orig := getattr(error, "orig", None), Exception):
        return shortage(orig)
    if isinstance(code := getattr(error, "sqlite_errorcode", None), int):
        return _SQLITE.get(code & 0xFF)
    return _POSTGRESQL.get(str(getattr(error, "sqlstate", "")))
