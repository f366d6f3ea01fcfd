"""One learner step: a batch's rows to one or several updates of the weights.

Guarantees: the loss's denominator is that of the whole minibatch, on all ranks, before the first backward pass. Equal
rows, weights and options give equal weights, bit for bit, on the same machine and number of ranks. Nothing random
outlives a step, so a resumed run continues exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import blake3
import torch

from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.micro_batches import MicroBatch, Packing, deal, micro_batches
from trainer_node.learning.objective.policy_loss import LossOptions, policy_loss, token_weights
from trainer_node.learning.objective.token_statistics import TokenStatistics
from trainer_node.learning.objective.training_rows import TrainingRow
from trainer_node.learning.trained_weights import TrainedWeights
from trainer_node.learning.trainer_ranks import TrainerRanks


@dataclass(frozen=True, slots=True)
class StepOptions:
    """``most_tokens``: of a micro-batch. ``minibatches``: updates a step."""

    loss: LossOptions
    most_tokens: int
    packing: Packing = "packed"
    minibatches: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ReplayEffect:
    """Of the first micro-batch of each rank: KL(sampler || learner) by k3 in nats a token, with the recorded experts
    and by the learner's own routing, with equal weights.
    """

    kl_replayed: float
    kl_own_routing: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """``loss``: over the whole batch. ``skipped``: updates whose gradient was not finite. ``replay``: None without
    router replay.
    """

    loss: float
    grad_norm: float
    statistics: TokenStatistics
    skipped: int = 0
    replay: ReplayEffect | None = None


class LearnerStep:
    """``reference``: scores tokens for the divergence term; None without one. All ranks call alike."""

    def __init__(
        self,
        model: LearnerModel,
        weights: TrainedWeights,
        options: StepOptions,
        ranks: TrainerRanks,
        reference: LearnerModel | None = None,
    ) -> None:
        self._model, self._weights, self._options, self._ranks = model, weights, options, ranks
        self._reference = reference

    def train(self, rows: Sequence[TrainingRow], step: int, before_update: Callable[[], None]) -> StepReport:
        """From ``step`` to the next. ``rows``: of all ranks. ``before_update``: returns once the weights may change."""
        torch.manual_seed(_seed(self._options.seed, step, self._ranks.rank))
        parts = [self._prepared(part) for part in _minibatches(rows, self._options.minibatches)]
        if self._options.loss.kind == "tis":
            # The learner's own log-probabilities at the beginning of the step, before any update.
            parts = [[self._with_old(batch) for batch in part] for part in parts]
        effect = None if self._model.replay is None or not parts else self._replay_effect(parts[0][0].batch)
        loss, norm, skipped = 0.0, 0.0, 0
        statistics = TokenStatistics()
        for part in parts:
            found, counted = self._gradient(part, step)
            before_update()
            norm = self._weights.update(step)
            skipped += not torch.isfinite(torch.tensor(norm))
            loss += found
            statistics = statistics.add(counted)
        return StepReport(loss / max(1, len(parts)), norm, statistics, skipped, effect)

    def _prepared(self, rows: Sequence[TrainingRow]) -> list[_Weighted]:
        """This rank's micro-batches of a minibatch. The weights of tokens count the rows of all ranks."""
        dealt = deal(rows, self._ranks.count)
        mine = micro_batches(dealt, self._ranks.rank, self._options.most_tokens, self._options.packing)
        by_row = token_weights(rows, self._options.loss.length)
        return [_Weighted(batch, batch.weights(by_row)) for batch in mine]

    def _with_old(self, one: _Weighted) -> _Weighted:
        with torch.no_grad():
            return _Weighted(one.batch, one.weights, self._model.logprobs(one.batch).cpu())

    def _replay_effect(self, batch: MicroBatch) -> ReplayEffect:
        """Costs two forward passes of one micro-batch."""
        sums = [batch.learnt.sum().to(torch.float64)]
        for replay in (True, False):
            with torch.no_grad():
                found = self._model.scores(batch, replay=replay).logprobs.cpu().to(torch.float64)
            log_ratio = (found - batch.sampler_logprobs)[batch.learnt]
            sums.append((torch.expm1(log_ratio) - log_ratio).sum())
        count, *k3 = self._ranks.total(torch.stack(sums)).tolist()
        return ReplayEffect(*(value / max(1.0, count) for value in k3))

    def _gradient(self, part: Sequence[_Weighted], step: int) -> tuple[float, TokenStatistics]:
        device, ranks = self._ranks.device, self._ranks.count
        loss, statistics = torch.zeros((), dtype=torch.float64), TokenStatistics()
        for one in part:
            batch = one.batch
            reference = None
            if self._reference is not None:
                with torch.no_grad():
                    reference = self._reference.logprobs(batch)
            scores = self._model.scores(batch)
            value, counted = policy_loss(
                self._options.loss,
                scores.logprobs,
                batch.sampler_logprobs.to(device),
                batch.advantages.to(device),
                one.weights.to(device),
                old_logprobs=None if one.old is None else one.old.to(device),
                reference_logprobs=reference,
                same_version=(batch.single_versions == step).to(device),
                sparse=batch.sparse.to(device),
                entropies=scores.entropies,
            )
            # FSDP averages gradients over ranks, and the denominator counts the tokens of all ranks.
            (value * ranks if self._ranks.mesh is not None else value).backward()
            self._weights.collect_gradients()
            loss += value.detach().to("cpu", torch.float64)
            statistics = statistics.add(counted)
        summed = self._ranks.total(torch.cat([loss[None], statistics.sums()]))
        largest = self._ranks.largest(statistics.ratio_max)
        return float(summed[0]), TokenStatistics.of(summed[1:], largest)


@dataclass(frozen=True, slots=True)
class _Weighted:
    """``weights``: of each target in the loss. ``old``: the learner's log-probabilities at the step's beginning."""

    batch: MicroBatch
    weights: torch.Tensor
    old: torch.Tensor | None = None


def _minibatches(rows: Sequence[TrainingRow], count: int) -> Iterator[list[TrainingRow]]:
    """Whole groups, dealt in order to at most ``count`` parts of about equal size."""
    groups: dict[int, list[TrainingRow]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    members = list(groups.values())
    for number in range(min(count, len(members))):
        first, last = (len(members) * (number + k) // min(count, len(members)) for k in (0, 1))
        yield [row for group in members[first:last] for row in group]


def _seed(seed: int, step: int, rank: int) -> int:
    """Of one step and rank: the state of the generator needs no place in a checkpoint."""
    words = b"".join(number.to_bytes(8, "little") for number in (seed, step, rank))
    return int.from_bytes(blake3.blake3(b"p2pcast learner 1\0" + words).digest(7), "little")
