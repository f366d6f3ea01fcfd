"""Makes log handlers show a repeated warning or error only rarely, with its count (``repeated_messages``).

Lines below WARNING pass. A line with ``extra=TROUBLE_ENDED`` passes after the counts of its module.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from p2pcast.process.log_context import fields_of
from p2pcast.process.repeated_messages import MAX_TEXT, Line, RepeatedMessages

Lines = Iterable[Line[logging.LogRecord]]


class RepetitionFilter(logging.Filter):
    """The filter of one ``handler``, which also emits the lines with counts. ``clock`` returns seconds."""

    def __init__(self, handler: logging.Handler, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._handler = handler
        self._clock = clock
        self._messages: RepeatedMessages[logging.LogRecord] = RepeatedMessages()
        self._lock = threading.RLock()
        self._deciding = False

    def filter(self, record: logging.LogRecord) -> bool:
        with self._lock:
            if self._deciding:  # a finaliser logs while this thread decides about another line
                return True
            self._deciding = True
            try:
                lines, passes = self._decide(record)
            finally:
                self._deciding = False
            self._emit(lines)
        return passes

    def tell_rest(self) -> None:
        """Emit the counts not yet reported."""
        with self._lock:
            self._emit(self._messages.rest())

    def _decide(self, record: logging.LogRecord) -> tuple[Lines, bool]:
        if record.levelno < logging.WARNING:
            ended = getattr(record, "trouble_ended", False)
            return self._messages.ended(record.pathname) if ended else self._messages.overdue(self._clock()), True
        try:
            kept = _kept(record)
        except Exception:  # noqa: BLE001 - the arguments do not fit the message: the handler reports it
            return (), True
        text = f"{record.levelname} {kept.getMessage()}\n{_error(record)}"
        return self._messages.take((record.pathname, record.lineno), text, kept, self._clock()), False

    def _emit(self, lines: Lines) -> None:
        for line in lines:
            line.item.repetition = line
            self._handler.acquire()
            try:
                self._handler.emit(line.item)
            finally:
                self._handler.release()


def _kept(record: logging.LogRecord) -> logging.LogRecord:
    """Return a copy without the arguments and the traceback's frames, so that their memory can be freed."""
    kept = logging.makeLogRecord(record.__dict__)
    kept.fields = fields_of(record)
    kept.msg, kept.args = record.getMessage()[:MAX_TEXT], ()
    if record.exc_info:
        kept.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
        kept.exc_info = None
    return kept


def _error(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    return "" if error is None else f"{type(error).__qualname__}: {error}"
