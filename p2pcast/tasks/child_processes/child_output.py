"""Logs what a user's code prints, as lines of the parent's log.

Guarantees: a line contains no control characters and at most MAX_SHOWN characters, and follows its process's name. So
no print can imitate a line of the daemon, or move a terminal's cursor. Excess lines are only counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Final

from p2pcast.ground.plain_text import MAX_SHOWN, shown_text

logger = logging.getLogger("p2pcast.tasks")

MOST_LINES: Final = 100
"""Most lines of one process within WINDOW_S."""
WINDOW_S: Final = 10.0
_MOST_BYTES: Final = 4 * MAX_SHOWN
"""Most bytes kept of one line, because a UTF-8 character has at most four."""
_READ_BYTES: Final = 1 << 16


class ChildOutput(asyncio.Protocol):
    """The parent's end of a child's stdout and stderr. ``name``: the process's name in the log."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._line = bytearray()
        self._since_s = 0.0
        self._said = self._left_out = 0
        self._pipe: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._pipe = transport

    def data_received(self, data: bytes) -> None:
        *whole, rest = data.split(b"\n")
        for part in whole:
            self._keep(part)
            self._tell()
        self._keep(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._line:
            self._tell()
        self._tell_left_out()

    def close(self) -> None:
        """Read what has been printed so far, and close."""
        if self._pipe is None or self._pipe.is_closing():
            return
        with contextlib.suppress(OSError):
            if left := os.read(self._pipe.get_extra_info("pipe").fileno(), _READ_BYTES):
                self.data_received(left)
        self._pipe.close()

    def _keep(self, part: bytes) -> None:
        self._line += part[: max(0, _MOST_BYTES - len(self._line))]

    def _tell(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._since_s > WINDOW_S:
            self._tell_left_out()
            self._since_s, self._said = now_s, 0
        if self._said < MOST_LINES:
            logger.info("%s says: %s", self._name, shown_text(self._line.decode(errors="replace")))
            self._said += 1
        else:
            self._left_out += 1
        self._line.clear()

    def _tell_left_out(self) -> None:
        if self._left_out:
            logger.info("%s said %d lines more", self._name, self._left_out)
        self._left_out = 0
