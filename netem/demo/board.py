"""A demo's display: a live picture on a terminal, otherwise a line for each event."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

REFRESH_S = 0.25
"""Least interval between redraws, so that the display costs little."""


class View(Protocol):
    """All displayed data of a demo."""

    phase: str

    def picture(self, elapsed_s: float) -> RenderableType: ...


class Board:
    """On a terminal, ``console`` shows the picture of ``shown``."""

    def __init__(self, console: Console, shown: View) -> None:
        self._console = console
        self._shown = shown
        self._began = time.monotonic()
        self._drawn = float("-inf")
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self.refresh(now=True)
            self._live.stop()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def phase(self, text: str) -> None:
        self._shown.phase = text
        self.event(text)

    def event(self, text: str) -> None:
        self._console.print(f"{self.elapsed_s:6.1f} s  {text}", markup=False, highlight=False, soft_wrap=True)

    def refresh(self, *, now: bool = False) -> None:
        if self._live is not None and (now or time.monotonic() - self._drawn > REFRESH_S):
            self._drawn = time.monotonic()
            self._live.update(self._shown.picture(self.elapsed_s), refresh=True)

    @property
    def live(self) -> bool:
        return self._live is not None

    def checks(self, checks: list[dict[str, Any]]) -> None:
        """Show the results of ``DemoCheck.document()``."""
        table = Table("", "check", "", title="independent check")
        for check in checks:
            table.add_row("pass" if check["ok"] else "FAIL", check["name"], check["detail"])
        self._console.print(table)

    def print_line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
