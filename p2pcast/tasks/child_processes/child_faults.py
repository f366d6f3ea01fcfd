"""Describes errors in a user's code as text, for the parent process. Pure."""

from __future__ import annotations

import sysconfig
import traceback
from typing import Final

from p2pcast.ground.errors import P2PCastError

MAX_TEXT: Final = 300
"""Most characters of a text."""
MAX_SEEN: Final = 256
"""Most errors that a process remembers."""
_LIBRARIES: Final = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_FOLDER: Final = __file__.rpartition("/")[0]
_OURS: Final = (_FOLDER, _FOLDER.rpartition("/")[0] + "/task_checker.py")
"""Files that call a user's code."""


def fault_with_place(error: BaseException) -> str:
    """An error with the file and the line of the user's code that raised it; of a library that the code called, the
    line of the call.
    """
    try:
        text = str(error).encode(errors="replace").decode()  # a lone surrogate cannot be sent
    except Exception:  # noqa: BLE001 - a user's class may fail here too
        text = ""
    if isinstance(error, P2PCastError):
        return text[:MAX_TEXT]
    found = place(error)
    where = "" if found is None else f" ({found[0].rpartition('/')[2]}, line {found[1]})"
    return f"{type(error).__name__}: {text}"[: MAX_TEXT - len(where)] + where[:MAX_TEXT]


def place(error: BaseException) -> tuple[str, int] | None:
    """The file and line of the user's code that raised an error, or None if the error has not been raised yet."""
    # Without the source, which memory may be short for.
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [one for one in lines if not one[0].startswith(_OURS)]
    lines = [one for one in lines if not one[0].startswith(_LIBRARIES)] or lines
    return lines[-1] if lines else None


class SeenErrors:
    """The errors that one process has seen, by type, file and line; at most MAX_SEEN."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, tuple[str, int] | None]] = set()

    def is_new(self, error: BaseException) -> bool:
        """Whether this is the first such error. After MAX_SEEN errors, none counts as new."""
        known = type(error).__name__, place(error)
        if known in self._seen or len(self._seen) >= MAX_SEEN:
            return False
        self._seen.add(known)
        return True
