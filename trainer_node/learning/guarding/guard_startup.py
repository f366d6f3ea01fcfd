"""A run's guard of sparse attention as its configuration asks, and what a start says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from p2pcast.files.atomic_files import explained
from p2pcast.ground.errors import UsageError
from p2pcast.sparse.budget_schedule import FILE, BudgetSchedule
from trainer_node.learning.guarding.acceptance_scores import acceptance_rates
from trainer_node.learning.guarding.schedule_guard import ScheduleGuard, change_event
from trainer_node.learning.learner_config import LearnerConfig
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.training_rows import TrainingRow
from trainer_node.learning.trainer_ranks import TrainerRanks


def guard_of(config: LearnerConfig) -> ScheduleGuard:
    """Return the run's guard. Raises LocalError, and UsageError if the file does not contain a schedule."""
    file = config.sparse.schedule
    if file is None:
        return ScheduleGuard(None, config.sparse.guard())
    with explained("read", file):
        contents = file.read_bytes()
    try:
        return ScheduleGuard(BudgetSchedule.from_bytes(contents), config.sparse.guard())
    except UsageError as error:
        raise UsageError(f"[sparse] schedule = {str(file)!r}: {error}") from None


def guard_advice(config: LearnerConfig, every: int) -> str | None:
    """For a guard that would count few tokens; None for others. ``every``: learner steps between two versions."""
    if config.sparse.schedule is None or config.sparse.staleness >= every:
        return None
    return (
        f"[sparse] staleness = {config.sparse.staleness}, and two versions are {every} steps apart: the guard of sparse"
        f" attention leaves out most rollouts. Set it to {every}, or publish more often"
    )


def dense_instead(guard: ScheduleGuard, schedule: bytes | None, folder: Path) -> str | None:
    """Let the guard of a run without a schedule replace that of the hub's newest version, and that of the model's
    ``folder``, which goes with a first version. ``schedule``: BLAKE3 of the hub's. Returns a warning if it did.
    """
    of_folder = folder / FILE
    for where, name in (
        ("the hub's newest version", schedule),
        (str(of_folder), blake3(of_folder.read_bytes()).digest() if of_folder.is_file() else None),
    ):
        if guard.replace_by_dense(name):
            return (
                f"{where} has a schedule of sparse attention, and [sparse] schedule is empty: versions of this run"
                " carry a dense schedule, since engines would follow the other one without a guard. To use it, name its"
                " file in [sparse] schedule; target = 0 keeps it as it is"
            )
    return None


def judged(
    config: LearnerConfig, model: LearnerModel, ranks: TrainerRanks, guard: ScheduleGuard, rows: Sequence[TrainingRow]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures of a step, and values of the events ``budget``."""
    found = acceptance_rates(model, ranks, rows, config.train.micro_batch_tokens, config.train.packing, guard.knows)
    changes = [change_event(change) for change in guard.observe(found)]
    return guard.figures(), changes
