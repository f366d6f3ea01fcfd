"""Writes log lines to stderr: coloured on a terminal, plain elsewhere, or as one JSON object per line.

A repeated warning is shown with its count, as ``repetition_filter`` decides.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from p2pcast.process.log_context import fields_of
from p2pcast.process.repeated_messages import Line, note
from p2pcast.process.repetition_filter import RepetitionFilter

FORMATS = ("auto", "plain", "json")
_NOT_REPEATED: Line[None] = Line(None)


class _Text(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        return super().formatMessage(record) + note(getattr(record, "repetition", _NOT_REPEATED))


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {
            "time": stamp,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **(getattr(record, "fields", None) or fields_of(record)),
        }
        repetition: Line[Any] = getattr(record, "repetition", _NOT_REPEATED)
        counts = {"more_times": repetition.more, "others_not_shown": repetition.others}
        line |= {name: count for name, count in counts.items() if count}
        if repetition.more or repetition.others:
            line["within_s"] = round(repetition.within_s, 3)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        elif record.exc_text:
            line["traceback"] = record.exc_text
        return json.dumps(line)


def set_up(form: str = "auto", *, verbose: bool = False) -> None:
    """Configure logging, once, when a command starts. ``verbose``: include debug messages."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(_Json())
    elif form == "auto" and sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S")
        handler.setFormatter(_Text("%(message)s"))
    else:
        handler.setFormatter(_Text("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    handler.addFilter(RepetitionFilter(handler))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    for noisy in ("asyncio", "aiohttp.access", "numba"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def tell_rest() -> None:
    """Log the counts of repeated messages not yet reported. Call it before the process exits."""
    for handler in logging.getLogger().handlers:
        for one in handler.filters:
            if isinstance(one, RepetitionFilter):
                one.tell_rest()
