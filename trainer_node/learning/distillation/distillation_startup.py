"""A run's distillation as its configuration asks, and how its adapter is published and kept in checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from trainer_node.learning.distillation.decoding_plan import ScheduleOf
from trainer_node.learning.distillation.rollout_adapter import NAME, RolloutAdapter
from trainer_node.learning.distillation.sparse_distillation import DistillOptions, SparseDistillation
from trainer_node.learning.learner_config import LearnerConfig
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.trained_weights import TrainedWeights

logger = logging.getLogger("p2pcast.learner")

_PHI: Final = "phi/"


def distillation_of(config: LearnerConfig, model: LearnerModel, schedule_of: ScheduleOf) -> SparseDistillation:
    """Return the run's distillation. Raises UsageError if the model cannot distil."""
    table = config.distill
    adapter = RolloutAdapter(model, rank=table.rank, alpha=table.alpha, options=table.options(), seed=config.train.seed)
    options = DistillOptions(
        config.loss.options(),
        config.train.micro_batch_tokens,
        config.train.packing,
        kl_weight=table.kl_weight,
        candidates=table.candidates,
        ppo_weight=table.ppo_weight,
        page_tokens=table.page_tokens,
    )
    found = SparseDistillation(model, adapter, options, schedule_of)
    found.check()
    return found


def publisher_arguments(distillation: SparseDistillation | None, base: str) -> dict[str, Any]:
    """Return the Publisher's arguments for the adapter."""
    if distillation is None:
        return {}
    adapter = distillation.adapter
    return {"with_adapter": {NAME: adapter.configuration(base)}, "dtype": adapter.dtype}


def adapter_fault(config: LearnerConfig, beside: Sequence[str]) -> str | None:
    """For a run that would lose its adapter; None for others. ``beside``: adapters of the hub's newest version."""
    if config.distill.rank or NAME not in beside:
        return None
    return (
        f"[distill] rank is 0, and the hub's newest version has the adapter {NAME}: versions of a run keep all tensors."
        f" Set the rank of before, with lr = 0 if {NAME} shall not change, or begin a new run, with a new state folder"
        " of the hub"
    )


def published_words(model: LearnerModel, distillation: SparseDistillation) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the policy's words, then the adapter's under its name."""
    yield from model.working_copy()
    yield from distillation.adapter.published()


class AdapterState(NamedTuple):
    """The rollout adapter in the checkpoints of a run, under names of its own. ``weights``: the adapter's; None for a
    run without one. See ``trainer_node.learning.learner.Kept``.

    Guarantees: a run continues exactly with its adapter. A checkpoint without an adapter, or with one of another rank
    or other layers, begins with the present adapter. A run without an adapter leaves the checkpoint's out, and so do
    its own.
    """

    weights: TrainedWeights | None

    def state(self) -> dict[str, torch.Tensor]:
        if self.weights is None:
            return {}
        return {_PHI + name: value for name, value in self.weights.state().items()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        stored = {name.removeprefix(_PHI): value for name, value in state.items() if name.startswith(_PHI)}
        if self.weights is None:
            if stored:
                logger.warning("the checkpoint has an adapter, and [distill] rank is 0: the adapter is left out")
        elif _shapes(stored) == _shapes(self.weights.state()):
            self.weights.restore(stored)
        else:
            logger.warning("the checkpoint has no adapter of this rank and model: phi begins anew")


def _shapes(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items() if name.startswith("weights.")}
