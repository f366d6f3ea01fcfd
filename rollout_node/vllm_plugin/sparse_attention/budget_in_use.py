"""The schedule that this process's attention layers follow. The one writer is ``use``; None: dense attention.

A worker process has one model, and all of its sparse layers follow one schedule.
"""

from __future__ import annotations

from p2pcast.sparse.budget_schedule import BudgetSchedule

_schedule: BudgetSchedule | None = None


def use(schedule: BudgetSchedule | None) -> None:
    """From the next step on. The engine runs no step meanwhile."""
    global _schedule
    _schedule = schedule


def in_use() -> BudgetSchedule | None:
    return _schedule
