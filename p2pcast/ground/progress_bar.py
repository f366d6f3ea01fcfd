"""Shows a command's progress: a bar on a terminal, occasional lines elsewhere, nothing if the work is short."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

logger = logging.getLogger("p2pcast")

SILENT_S = 0.5
"""Seconds during which no progress is shown."""
LINE_S = 10.0
"""Seconds between lines if the output is not a terminal."""


class ProgressMeter:
    """Context manager; any thread calls it with the bytes done since the last call and the total number of bytes."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._done = 0
        self._began = self._said_at = time.monotonic()
        self._lock = threading.Lock()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        with self._lock:
            self._done += done
            now = time.monotonic()
            if now - self._began < SILENT_S:
                return
            if not sys.stderr.isatty():
                if now - self._said_at >= LINE_S:
                    self._said_at = now
                    logger.info("%s: %.0f %% of %.1f GB", self._what, 100 * self._done / max(1, total), total / 1e9)
                return
            if self._bar is None:
                columns = (
                    TextColumn("{task.description}"),
                    BarColumn(),
                    DownloadColumn(),
                    TransferSpeedColumn(),
                    TimeRemainingColumn(),
                )
                self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
                self._bar.add_task(self._what, total=total)
                self._bar.start()
            self._bar.update(self._bar.task_ids[0], completed=self._done, total=total)
