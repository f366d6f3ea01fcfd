"""The state of a run in its checkpoints: weights of the policy, and of the rollout adapter under names of their own.

Promises: a run continues exactly with both. A checkpoint without an adapter, or with one of another rank or other
layers, begins with the present adapter. A run without an adapter leaves the checkpoint's out, and so do its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

import torch

from trainer_node.learning.trained_weights import TrainedWeights

logger = logging.getLogger("p2pcast.learner")

_PHI: Final = "phi/"
Entry = TypeVar("Entry")


class RunState(NamedTuple):
    """``theta``: the policy's weights. ``phi``: the adapter's; None without one."""

    theta: TrainedWeights
    phi: TrainedWeights | None = None

    def state(self) -> dict[str, torch.Tensor]:
        """See ``TrainedWeights.state``."""
        found = self.theta.state()
        if self.phi is not None:
            found |= {_PHI + name: value for name, value in self.phi.state().items()}
        return found

    def expected(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
        """See ``TrainedWeights.expected``."""
        theirs, ours = _parts(shapes)
        found = self.theta.expected(theirs)
        if self.phi is not None and _fits(self.phi, ours):
            found |= {_PHI + name: value for name, value in self.phi.expected(ours).items()}
        elif self.phi is not None:
            logger.warning("the checkpoint has no adapter of this rank and model: phi begins anew")
        elif ours:
            logger.warning("the checkpoint has an adapter, and [distill] rank is 0: the adapter is left out")
        return found

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """See ``TrainedWeights.restore``."""
        theirs, ours = _parts(state)
        self.theta.restore(theirs)
        if self.phi is not None and ours:
            self.phi.restore(ours)


def _fits(phi: TrainedWeights, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bool:
    def weights(entries: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in entries.items() if name.startswith("weights.")}

    return weights({name: tuple(value.shape) for name, value in phi.state().items()}) == weights(
        {name: tuple(shape) for name, (shape, _) in shapes.items()}
    )


def _parts(entries: Mapping[str, Entry]) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Of theta and of phi."""
    ours = {name.removeprefix(_PHI): value for name, value in entries.items() if name.startswith(_PHI)}
    return {name: value for name, value in entries.items() if not name.startswith(_PHI)}, ours
