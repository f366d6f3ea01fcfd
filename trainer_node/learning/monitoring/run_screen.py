"""A training run while it goes on: a live table on a terminal, otherwise a line for each event."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler

from trainer_node.learning.monitoring.run_record import BudgetEvent, Event, Probe, RunRecord, StartEvent
from trainer_node.learning.monitoring.run_table import ROWS, event_line, run_picture, summary_lines

REFRESH_S = 0.25
"""Least interval between redraws, so that the screen costs little."""


class RunScreen:
    """``show`` fits ``RunLog.watch``; ``record`` is ``RunLog.record``, which already holds the shown event."""

    def __init__(self, console: Console, record: RunRecord, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._record = record
        self._clock = clock
        self._drawn = float("-inf")
        self._doing = ""
        self._live = Live(console=console, auto_refresh=False, transient=False) if console.is_terminal else None
        self._logs: list[tuple[RichHandler, Console]] = []
        """Log handlers of the terminal, and the consoles to which they wrote before."""

    def __enter__(self) -> RunScreen:
        if self._live is not None:
            self._live.start()
            self._take_logs()
            self.refresh(now=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self.refresh(now=True)
            self._live.stop()
            for handler, console in self._logs:
                handler.console = console

    def show(self, event: Event) -> None:
        """On a terminal, starts, alarms and new budgets stay above the table; everything else is in it."""
        alarm = isinstance(event, Probe) and event.alarm
        if self._live is None or alarm or isinstance(event, StartEvent | BudgetEvent):
            self.say(event_line(event))
        self.refresh()

    def doing(self, text: str) -> None:
        """The learner's present activity, such as ``waiting for a batch``: shown on a terminal alone."""
        self._doing = text
        self.refresh()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def refresh(self, *, now: bool = False) -> None:
        """Redraw, if the last redraw is long enough ago. Call while waiting, too."""
        at = self._clock()
        if self._live is not None and (now or at - self._drawn > REFRESH_S):
            self._drawn = at
            self._live.update(self._picture(), refresh=True)

    def _take_logs(self) -> None:
        """Print log lines above the table: another console of the same terminal would write them into it."""
        handlers = [one for one in logging.getLogger().handlers if isinstance(one, RichHandler)]
        self._logs = [(handler, handler.console) for handler in handlers]
        for handler in handlers:
            handler.console = self._console

    def _picture(self) -> Group:
        width, height = self._console.size
        below = len(summary_lines(self._record, self._doing))
        # The heading takes two lines, and the cursor one.
        rows = max(1, min(ROWS, height - below - 3))
        return run_picture(self._record, width=width, rows=rows, doing=self._doing)
