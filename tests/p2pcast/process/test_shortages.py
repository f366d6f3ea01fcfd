"""Errors that say that the machine is short of something, and those that do not."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3

import pytest
from sqlalchemy.exc import OperationalError

from p2pcast.files.atomic_files import explained
from p2pcast.ground.errors import LocalError, P2PCastError, RetryableError
from p2pcast.process.shortages import scarce, shortage


def system(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/secret/folder")


def reported(error: BaseException, kind: type[P2PCastError] = LocalError) -> P2PCastError:
    """An error of p2pcast that stands in for ``error``, and hides it."""
    try:
        try:
            raise error
        except type(error):
            raise kind("cannot write") from None
    except P2PCastError as found:
        return found


def of_sqlite(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = code
    return error


class Postgresql(Exception):
    sqlstate = "53100"


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (system(errno.EMFILE), "open files"),
        (system(errno.ENFILE), "files are open"),
        (system(errno.ENOMEM), "memory"),
        (system(errno.ENOSPC), "no space"),
        (system(errno.EDQUOT), "quota"),
        (system(errno.EIO), "input/output"),
        (MemoryError(), "memory"),
        (RuntimeError("can't start new thread"), "thread"),
        (reported(system(errno.ENOSPC)), "no space"),
        (reported(reported(system(errno.EMFILE)), RetryableError), "open files"),
        (of_sqlite(sqlite3.SQLITE_FULL), "full"),
        (of_sqlite(sqlite3.SQLITE_IOERR_WRITE), "disk fails"),
        (reported(OperationalError("INSERT", {}, of_sqlite(sqlite3.SQLITE_CANTOPEN))), "cannot be opened"),
        (OperationalError("INSERT", {}, Postgresql()), "full"),
        (ExceptionGroup("", [ExceptionGroup("", [reported(system(errno.ENOSPC))])]), "no space"),
    ],
)
def test_shortages_are_named_without_names_of_files(error, word):
    found = shortage(error)
    assert found is not None
    assert word in found
    assert "/secret" not in found


def after(first: BaseException, second: Exception) -> Exception:
    """``second``, raised while ``first`` was handled."""
    try:
        try:
            raise first
        except type(first):
            raise second  # noqa: B904 - the first one stays its context
    except type(second) as found:
        return found


@pytest.mark.parametrize(
    "error",
    [
        None,
        KeyError("a bug"),
        after(system(errno.EMFILE), KeyError("a bug of the handler")),
        system(errno.ENOENT),
        system(errno.ECONNRESET),
        LocalError("the disk is full"),
        reported(KeyError("a bug")),
        RuntimeError("another"),
        of_sqlite(sqlite3.SQLITE_CONSTRAINT),
        ExceptionGroup("", [system(errno.ENOSPC), KeyError("a bug")]),
        asyncio.CancelledError(),
    ],
)
def test_other_errors_are_no_shortages(error):
    assert shortage(error) is None
    assert not scarce(error)


def test_a_device_that_fails_may_have_lost_the_file():
    with pytest.raises(LocalError) as caught, explained("read", "/x"):
        raise system(errno.EIO)
    assert shortage(caught.value)
    assert not scarce(caught.value)
    assert scarce(system(errno.EMFILE))
