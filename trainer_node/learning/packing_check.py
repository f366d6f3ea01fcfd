"""Checks at the start that a model computes rows packed into one sequence as it computes them apart.

Packing needs attention that separates rows by position ids alone. Recurrent and convolutional layers carry a row into
the next one, and some models ignore position ids. Without a check, their gradients would be wrong without an error.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from p2pcast.ground.errors import UsageError
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.micro_batches import micro_batches
from trainer_node.learning.objective.training_rows import TrainingRow

FIRST_TOKENS, SECOND_TOKENS = 13, 10
"""Lengths of both rows: a few milliseconds on a CPU, and together below the positions of any model."""
ROUNDINGS: Final = 4.0
"""Difference that rounding may cause, in units of the dtype's epsilon and in nats: 0.03 in bfloat16."""
LEAST_NATS: Final = 1e-4
"""Difference that counts as rounding in any dtype."""
LEAK_SHARE: Final = 0.25
"""Share of the difference that a whole leak makes. Mixtures of experts round more than ROUNDINGS allow, since rows of
another sequence change the shapes of their products; a leak is never that small.
"""


def require_separate_rows(model: LearnerModel) -> None:
    """All ranks call. Raises UsageError for a model whose packed rows change each other."""
    error, leak, rounding = packing_error(model)
    if error <= max(rounding, LEAK_SHARE * leak):
        return
    raise UsageError(
        f"[train] packing = 'packed' does not fit the model {model.folder}: a packed row differs from the row alone by"
        f" {error:.2g} nats a token, and rounding explains {rounding:.2g}. Its layers do not separate rows by position"
        " ids: set packing = 'padded'"
    )


def packing_error(model: LearnerModel) -> tuple[float, float, float]:
    """Error, leak and rounding in nats.

    - Error: root mean square difference of a packed row's log-probabilities from those of the row alone.
    - Leak: the same of the row as the other row's continuation.
    - Rounding: the largest difference that counts as rounding.
    """
    # Of a fixed seed: all ranks compute the same.
    ids = np.random.default_rng(0).integers(0, model.vocabulary, FIRST_TOKENS + SECOND_TOKENS)
    second = np.arange(len(ids)) > FIRST_TOKENS
    first_row, second_row = _row(ids[:FIRST_TOKENS], None), _row(ids[FIRST_TOKENS:], second[FIRST_TOKENS:])
    dtype = next(iter(model.parameters.values())).dtype
    packed = _logprobs(model, first_row, second_row)[-(SECOND_TOKENS - 1) :]
    alone = _logprobs(model, second_row)
    continued = _logprobs(model, _row(ids, second))
    rounding = max(LEAST_NATS, ROUNDINGS * torch.finfo(dtype).eps)
    return _rms(packed - alone), _rms(continued - alone), rounding


def _row(ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]], learnt: np.ndarray | None) -> TrainingRow:
    """``learnt``: places of the targets; None: all but the first."""
    return TrainingRow.of_text(ids, np.arange(len(ids)) > 0 if learnt is None else learnt)


def _logprobs(model: LearnerModel, *rows: TrainingRow) -> torch.Tensor:
    (batch,) = micro_batches([list(enumerate(rows))], 0, FIRST_TOKENS + SECOND_TOKENS, "packed")
    with torch.no_grad():
        return model.logprobs(batch).double()


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
