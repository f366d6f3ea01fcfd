"""The log of a training run: ``RUN/metrics.jsonl``, one JSON object a line, its event in the key ``event``.

Guarantees: a line is with the operating system when ``write`` returns, so it survives the end of this process, though
not a crash of the machine. A line counts once its newline is there: a last line without one was torn by a killed
process, readers skip it, and the next ``RunLog`` cuts it off. Numbers that are not finite are written as null.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from p2pcast.files.atomic_files import explained
from p2pcast.ground.errors import LocalError
from p2pcast.ground.limits import MIB
from trainer_node.learning.monitoring.run_record import Event, RunRecord

LOG_NAME: Final = "metrics.jsonl"
MAX_LINE_BYTES: Final = 4 * MIB
"""Longest line, so that a wrong file is not read whole into memory."""
_BEGIN: Final = b'{"event"'


def read_run(path: Path) -> RunRecord:
    """The run whose folder, or whose log, ``path`` is. An empty log is a run without events.

    Raises LocalError: unreadable, or no run log.
    """
    record, _ = _read(path / LOG_NAME if path.is_dir() else path)
    return record


class RunLog:
    """Appends events to a log. ``record``: everything that the log holds. Thread-safe."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open the log, or create it; its folder must exist. ``clock``: seconds since 1970.

        Raises LocalError: unreadable, unwritable, or an existing file that is no run log, which is left unchanged.
        """
        self.path = path
        self._clock = clock
        self._lock = threading.RLock()
        self._watchers: list[Callable[[Event], None]] = []
        self.record, self._size = _read(path) if path.exists() else (RunRecord(), 0)
        with explained("write", path):
            self._file = path.open("ab", buffering=0)
            self._file.truncate(self._size)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def watch(self, watcher: Callable[[Event], None]) -> None:
        """Call ``watcher`` with each known event after its line is written, in the thread that writes."""
        self._watchers.append(watcher)

    def write(self, document: Mapping[str, object]) -> Event | None:
        """Append one event; ``time`` is added if it is missing. Arrays' scalars count as numbers.

        The typed event is returned, None for an unknown one. Raises LocalError, and then the log is as before;
        TypeError without ``event``, and for a value that JSON does not have.
        """
        if not isinstance(document.get("event"), str):
            raise TypeError("an event needs the key 'event', a text")
        stamped = {"event": document["event"], "time": self._clock(), **document}
        plain = {key: _plain(value, key) for key, value in stamped.items()}
        # ASCII only, so that the final newline is the only line break.
        line = json.dumps(plain, allow_nan=False).encode("ascii") + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"an event of {len(line)} bytes; at most {MAX_LINE_BYTES}")
        with self._lock:
            self._append(line)
            event = self.record.add(plain)
            if event is not None:
                for watcher in self._watchers:
                    watcher(event)
        return event

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _append(self, line: bytes) -> None:
        with explained("write", self.path):
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError:
                # Cut off a partial line, so that the next event starts a new line.
                self._file.truncate(self._size)
                raise
        self._size += len(line)


def _plain(value: object, key: str) -> object:
    """``value`` as JSON has it: numbers that are not finite become None, other scalars ints and floats."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, key) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, key) for inner in value]
    raise TypeError(f"the event's {key!r} holds a {type(value).__name__}, which JSON does not have")


# -- reading


def _read(path: Path) -> tuple[RunRecord, int]:
    """The record, and the size of all whole lines."""
    with explained("read", path), path.open("rb") as file:
        return _read_lines(file, path)


def _read_lines(file: IO[bytes], path: Path) -> tuple[RunRecord, int]:
    record, size, known, lines = RunRecord(), 0, 0, 0
    while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
        size += len(line)
        lines += 1
        known += record.add(_document(line)) is not None
    if lines and not known:
        raise LocalError(f"{path} is no log of a run: no line is an event of a learner; {_ADVICE}")
    if len(line) == MAX_LINE_BYTES or (not lines and line[: len(_BEGIN)] != _BEGIN[: len(line)]):
        raise LocalError(f"{path} is no log of a run: a line is no event of a learner; {_ADVICE}")
    return record, size


def _document(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


_ADVICE: Final = "give the folder that `p2pcast learn` wrote"
