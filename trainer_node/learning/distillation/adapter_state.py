"""The rollout adapter in the checkpoints of a run, under names of its own.

Promises: a run continues exactly with its adapter. A checkpoint without an adapter, or with one of another rank or
other layers, begins with the present adapter. A run without an adapter leaves the checkpoint's out, and so do its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from trainer_node.learning.trained_weights import TrainedWeights

logger = logging.getLogger("p2pcast.learner")

_PHI: Final = "phi/"


class AdapterState(NamedTuple):
    """``weights``: the adapter's; None for a run without one. See ``trainer_node.learning.learner.Kept``."""

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
