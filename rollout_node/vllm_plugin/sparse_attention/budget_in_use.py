"""The schedule that this process's attention layers follow; None means dense attention. Only ``use`` sets it.

A rank's process has one model, and all its sparse layers follow one schedule.
"""

from __future__ import annotations

from p2pcast.sparse.budget_schedule import BudgetSchedule

_schedule: BudgetSchedule | None = None


def use(schedule: BudgetSchedule | None) -> None:
    """Set the schedule for the next step on. The engine must not run a step meanwhile."""
    global _schedule
    _schedule = schedule


def in_use() -> BudgetSchedule | None:
    return _schedule
