"""The schedule of sparse attention that a learner's versions carry, and its guard.

Promises: each version that the learner publishes states its schedule, and a change by the guard goes with the next one.
Only tokens of a schedule that this run published count. A run that continues from a checkpoint has the schedule of that
step, unless its configuration names another file; tokens are counted anew. A run that no longer has a schedule
publishes a dense one, since engines would keep the old one. All ranks hold the same guard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import blake3
import numpy as np
import torch

from p2pcast.errors import UsageError
from p2pcast.sparse.budget_guard import BudgetChange, BudgetGuard, GuardOptions
from p2pcast.sparse.budget_schedule import DENSE, FILE, BudgetSchedule
from trainer_node.learning.guarding.acceptance_scores import Rates

STATE: Final = "guard.schedules"
"""Key of a checkpoint's state: a JSON document, as bytes."""


class ScheduleGuard:
    """``configured``: the schedule of the run's configuration; None: dense. With a target of 0 the guard measures, and
    changes nothing.
    """

    def __init__(self, configured: BudgetSchedule | None, options: GuardOptions) -> None:
        self._configured, self._options = configured, options
        self._known: dict[bytes, BudgetSchedule] = {}
        self._present: BudgetSchedule | None = None
        self._guard: BudgetGuard | None = None
        self._means: list[np.ndarray] = []
        if configured is not None:
            self._use(configured)

    def _use(self, schedule: BudgetSchedule) -> None:
        self._present = schedule
        self._known[blake3.blake3(schedule.to_bytes()).digest()] = schedule
        if self._guard is None:
            self._guard = BudgetGuard(schedule, self._options)

    def files(self) -> dict[str, bytes]:
        """Small files of the next version."""
        return {} if self._present is None else {FILE: self._present.to_bytes()}

    def observe(self, found: Sequence[Rates]) -> Sequence[BudgetChange]:
        """Rates of one batch. Returns the changes of the schedule, which the next version carries."""
        self._means = []
        if self._guard is None:
            return ()
        for one in found:
            made_by = self._known.get(one.schedule)
            if made_by is not None and self._guard.observe(made_by, one.positions, one.alphas):
                self._means.append(one.alphas)
        changes = self._guard.decide()
        if changes:
            self._use(self._guard.schedule)
        return changes

    def figures(self) -> dict[str, Any]:
        """Of the last batch, for the event ``step``: number and mean rate of the tokens that count, and the lowest 5th
        percentile of all bins; None where there is none.
        """
        if self._guard is None:
            return {}
        rates = np.concatenate(self._means) if self._means else np.empty(0)
        percentiles = self._guard.percentiles()
        return {
            "judged_tokens": len(rates),
            "acceptance_mean": float(rates.mean()) if len(rates) else None,
            "acceptance": min(percentiles.values(), default=None),
        }

    # -- checkpoints

    def state(self) -> dict[str, torch.Tensor]:
        if self._present is None:
            return {}
        schedules = [one.document() for one in self._known.values() if one != self._present]
        document = {"configured": _name(self._configured), "schedules": [*schedules, self._present.document()]}
        return {STATE: torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """``state``: of a checkpoint. Raises UsageError for a damaged one."""
        if STATE not in state:
            return
        try:
            document = json.loads(bytes(state[STATE].numpy().tobytes()))
            schedules = [BudgetSchedule.read(one) for one in document["schedules"]]
            configured, present = document["configured"], schedules[-1]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UsageError(f"the checkpoint's schedules of sparse attention are malformed: {error}") from None
        for one in schedules:
            self._known[blake3.blake3(one.to_bytes()).digest()] = one
        if self._configured is None:
            self._present = BudgetSchedule((DENSE,), present.page_tokens, present.bin_tokens)
        elif configured == _name(self._configured):
            self._guard = None
            self._use(present)


def _name(schedule: BudgetSchedule | None) -> str | None:
    return None if schedule is None else blake3.blake3(schedule.to_bytes()).hexdigest()


def change_event(change: BudgetChange) -> dict[str, Any]:
    """Values of the event ``budget``; a number of pages is None where the bin is dense."""
    before, after = (None if pages == DENSE else pages for pages in (change.before, change.after))
    return {
        "bin": change.number,
        "percentile": change.percentile,
        "tokens": change.tokens,
        "before": before,
        "after": after,
    }
