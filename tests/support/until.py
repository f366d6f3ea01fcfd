"""How tests wait: ``await until(look)``, or ``wait_until(look)`` in code that blocks.

The deadline ends a test that would wait for ever. No test asserts how long anything takes.
"""

from __future__ import annotations

import inspect
import subprocess
import time
from asyncio import sleep
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

DEADLINE_S = 900.0
FIRST_LOOKS = 50
"""The first looks follow each other without a pause, so that a wait for tasks of the same loop ends at once."""
LONGEST_PAUSE_S = 0.05

_block = time.sleep


class _Waiting:
    """One wait: its pauses, and the text of its failure."""

    def __init__(self, look: Callable[[], Any], what: str | Callable[[], object]) -> None:
        self._look = look
        self._what = what
        self._looks = 0
        self._since_s = monotonic()

    def pause_s(self, seen: object) -> float:
        """The pause before the next look is at most a tenth of the time so far. After the deadline the wait fails."""
        waited_s = monotonic() - self._since_s
        if waited_s > DEADLINE_S:
            raise AssertionError(f"not within {DEADLINE_S:.0f} s: {self._text()}; last seen: {seen!r}")
        self._looks += 1
        return 0.0 if self._looks < FIRST_LOOKS else min(max(0.001, waited_s / 10), LONGEST_PAUSE_S)

    def _text(self) -> str:
        if callable(self._what):
            return str(self._what())
        code = getattr(self._look, "__code__", None)
        return self._what or (f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self._look))


async def until(
    look: Callable[[], Any],
    what: str | Callable[[], object] = "",
    *,
    holds: Callable[[Any], object] = bool,
    check: Callable[[], object] = bool,
) -> Any:
    """Wait until the value of ``look`` ``holds``, and return the value. ``look`` may be a coroutine function.

    ``check`` raises an error if the wait is in vain. ``what`` is the text of the failure, or a function that makes the
    text after the deadline.
    """
    waiting = _Waiting(look, what)
    while True:
        seen = look()
        if inspect.isawaitable(seen):
            seen = await seen
        if holds(seen):
            return seen
        check()
        await sleep(waiting.pause_s(seen))


def wait_until(
    look: Callable[[], Any],
    what: str | Callable[[], object] = "",
    *,
    holds: Callable[[Any], object] = bool,
    check: Callable[[], object] = bool,
) -> Any:
    """``until``, for code that blocks."""
    waiting = _Waiting(look, what)
    while not holds(seen := look()):
        check()
        _block(waiting.pause_s(seen))
    return seen


def check_runs(process: subprocess.Popen[Any] | Process, log: Path | None = None) -> None:
    """Fails, with the end of its log, if a process has ended."""
    code = process.returncode if isinstance(process, Process) else process.poll()
    assert code is None, f"ended with {code}: {log.read_text()[-4000:] if log else process}"
