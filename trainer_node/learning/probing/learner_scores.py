"""The learner's scores of the probe set, by the words that it publishes.

All ranks score all sequences: a sharded model needs equally many passes on each rank, and the set is small.
"""

from __future__ import annotations

import numpy as np
import torch

from p2pcast.rollouts.probe_set import ProbeSet
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.micro_batches import Packing, micro_batches
from trainer_node.learning.objective.training_rows import TrainingRow


def learner_scores(model: LearnerModel, probe_set: ProbeSet, most_tokens: int, packing: Packing) -> np.ndarray:
    """float32, (scores,), in the set's order. ``most_tokens``: of one forward pass. All ranks call alike."""
    texts = [np.array(tokens, np.int64) for tokens in probe_set.sequences]
    # The first token of a text is predicted from no position.
    rows = [TrainingRow.of_text(tokens, np.arange(len(tokens)) > 0) for tokens in texts]
    found: list[list[float]] = [[] for _ in rows]
    for batch in micro_batches([list(enumerate(rows))], 0, most_tokens, packing):
        with torch.no_grad():
            scores = model.logprobs(batch).float().cpu().tolist()
        for row, score in zip(batch.rows.tolist(), scores, strict=True):
            found[row].append(score)
    return np.concatenate([np.array(row, "<f4") for row in found])
