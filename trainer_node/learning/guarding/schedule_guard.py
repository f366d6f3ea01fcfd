"""The schedule of sparse attention that a learner's versions carry, and its guard.

Guarantees: each version that the learner publishes states its schedule, and a change by the guard goes with the next
one. Only tokens of a schedule that this run published count. A run that continues from a checkpoint has the schedule of
that step, unless its configuration names another file; tokens are counted anew. A run without a schedule publishes a
dense one where versions carried another, since engines would keep that one. All ranks hold the same guard.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from p2pcast.ground.errors import UsageError
from p2pcast.sparse.budget_guard import BudgetChange, BudgetGuard, GuardOptions
from p2pcast.sparse.budget_schedule import ALL_PAGES, ALL_PAGES_NAME, DENSE, FILE, BudgetSchedule
from trainer_node.learning.guarding.acceptance_scores import AcceptanceRates

STATE: Final = "guard.schedules"
"""Key of a checkpoint's state: a JSON document, as bytes."""


class ScheduleGuard:
    """``configured``: the schedule of the run's configuration; None: dense. With a target of 0 the guard measures, and
    changes nothing.
    """

    def __init__(self, configured: BudgetSchedule | None, options: GuardOptions) -> None:
        self._configured, self._options = configured, options
        self._next = configured
        """Of the next version."""
        self._published: list[tuple[int, BudgetSchedule]] = []
        """First step of each schedule that versions carried, ascending."""
        self._guard = None if configured is None else BudgetGuard(configured, options)
        self._counted: list[np.ndarray] = []
        self._lowest: float | None = None

    def files(self, step: int) -> dict[str, bytes]:
        """Small files of the version of ``step``, which is about to be published. A repeated step counts anew."""
        if self._next is None:
            return {}
        self._published = [one for one in self._published if one[0] < step]
        if not self._published or self._published[-1][1] != self._next:
            self._published.append((step, self._next))
        return {FILE: self._next.to_bytes()}

    def replace_by_dense(self, name: bytes | None) -> bool:
        """In a run without a schedule, replace the one with this BLAKE3, which versions carry otherwise, by a dense
        one. Returns whether that is needed. None: they carry none.
        """
        if self._configured is not None or name in (None, ALL_PAGES_NAME):
            return False
        self._next = ALL_PAGES
        return True

    def schedule_of(self, step: int) -> BudgetSchedule | None:
        """Of the version of a step; None: dense."""
        return next((schedule for first, schedule in reversed(self._published) if first <= step), None)

    def knows(self, name: bytes) -> bool:
        """Whether a version of this run carried the schedule with this BLAKE3."""
        return self._guard is not None and any(schedule.name() == name for _, schedule in self._published)

    def observe(self, found: Sequence[AcceptanceRates]) -> Sequence[BudgetChange]:
        """Rates of one batch. Returns the changes of the schedule, which the next version carries."""
        self._counted = []
        if self._guard is None:
            return ()
        known = {schedule.name(): schedule for _, schedule in self._published}
        for one in found:
            made_by = known.get(one.schedule)
            if made_by is not None and self._guard.observe(made_by, one.positions, one.alphas):
                self._counted.append(one.alphas)
        # A change forgets the tokens that led to it.
        self._lowest = min(self._guard.percentiles().values(), default=None)
        changes = self._guard.decide()
        self._next = self._guard.schedule
        return changes

    def figures(self) -> dict[str, Any]:
        """Of the last batch, for the event ``step``: number and mean rate of the tokens that count, and the lowest 5th
        percentile of all bins; None where there is none.
        """
        if self._guard is None:
            return {}
        rates = np.concatenate(self._counted) if self._counted else np.empty(0)
        return {
            "judged_tokens": len(rates),
            "acceptance_mean": float(rates.mean()) if len(rates) else None,
            "acceptance": self._lowest,
        }

    # -- checkpoints

    def state(self) -> dict[str, torch.Tensor]:
        if self._next is None:
            return {}
        document = {
            "configured": None if self._configured is None else self._configured.document(),
            "published": [[step, schedule.document()] for step, schedule in self._published],
            "next": self._next.document(),
        }
        return {STATE: torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """``state``: of a checkpoint. Raises UsageError for a damaged one."""
        if STATE not in state:
            return
        try:
            document = json.loads(state[STATE].numpy().tobytes())
            stored = document["configured"]
            configured = None if stored is None else BudgetSchedule.read(stored)
            published = [(int(step), BudgetSchedule.read(one)) for step, one in document["published"]]
            following = BudgetSchedule.read(document["next"])
        except (ValueError, KeyError, TypeError, UsageError) as error:
            raise UsageError(f"the checkpoint's schedules of sparse attention are malformed: {error}") from None
        self._published = published
        if self._configured is None:
            self._next = ALL_PAGES
        elif configured == self._configured:
            self._next, self._guard = following, BudgetGuard(following, self._options)


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
