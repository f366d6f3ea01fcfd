"""Log lines on stderr: coloured on a terminal, plain elsewhere, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from p2pcast.telemetry.log_context import fields_of

FORMATS = ("auto", "plain", "json")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {
            "time": stamp,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(form: str = "auto", *, verbose: bool = False) -> None:
    """Configure logging, once, at the start of a command. ``verbose``: debug messages too."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(_Json())
    elif form == "auto" and sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S")
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    for noisy in ("asyncio", "aiohttp.access", "numba"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
