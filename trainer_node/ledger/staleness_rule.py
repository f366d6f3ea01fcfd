"""When a group of jobs may be opened: the rule of bounded staleness. Pure.

The rule, in groups (AReaL's rule assumes a publication at every step and an instant broadcast):

    a group opens for a worker whose engine serves step v  if  ahead < (v + S + 1 - t) * P

``ahead`` counts the groups that were opened and are neither trained nor dropped; a group in a batch that was taken
counts until the learner has applied the batch. Counting on until a checkpoint contains the batch would leave no room
between checkpoints that are more than S steps apart. P groups make a batch, t is the learner's step (batches applied),
S the staleness bound. If batches take the oldest groups first, the new group is trained at step t + ahead // P, at
most v + S: its rollouts are fresh enough when their turn comes. Every count is a query over rows, so recovery cannot
inflate it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessBounds:
    """``staleness``: S, in learner steps. ``batch_groups``: P. ``last_step``: the run's last step; None: no end."""

    staleness: int
    batch_groups: int
    last_step: int | None = None


def room(bounds: StalenessBounds, ahead: int, served_step: int, learner_step: int) -> int:
    """How many groups may be opened now for a worker whose engine serves ``served_step``."""
    batches = served_step + bounds.staleness + 1 - learner_step
    if bounds.last_step is not None:
        batches = min(batches, bounds.last_step - learner_step)
    return max(0, batches * bounds.batch_groups - ahead)
