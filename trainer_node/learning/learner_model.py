"""The model that a learner trains: a Hugging Face causal LM, whole in one process or sharded over ranks (FSDP2).

Guarantees: names, shapes and dtypes of what is published are those of the folder. Log-probabilities come from the words
that are published, without dropout in every pass, as engines compute. One rank and several compute the same, up to the
order of sums.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

import torch

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.ground.errors import UsageError
from trainer_node.learning.objective.micro_batches import MicroBatch
from trainer_node.learning.objective.token_scores import (
    Candidates,
    TokenScores,
    candidate_logprobs,
    most_probable,
    scores_of_hidden,
    scores_of_logits,
)
from trainer_node.learning.router_replay import RouterReplay
from trainer_node.learning.sharded_loading import attention_of, loading, sharded
from trainer_node.learning.stored_tensors import blocks, check, dtypes
from trainer_node.learning.trainer_ranks import TrainerRanks
from trainer_node.sdk.tensors import TORCH_DTYPES

logger = logging.getLogger("p2pcast.learner")

Compute = Literal["published", "float32"]
T = TypeVar("T", bound=tuple[torch.Tensor, ...])
T_co = TypeVar("T_co", bound=tuple[torch.Tensor, ...], covariant=True)


class _Compute(Protocol[T_co]):
    """Of hidden states (M, H) with the head's weight (V, H) and bias, or of logits (M, V) without a weight."""

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, /) -> T_co: ...


class LearnerModel:
    """``compute``: dtype of forward and backward passes. ``published``: as the folder's; ``float32``: the published
    words, computed with in fp32, for processors that are slow or inexact in bf16.

    Raises LocalError for a folder that transformers cannot load, UsageError for a model that cannot be published.
    """

    def __init__(
        self,
        folder: Path,
        ranks: TrainerRanks,
        *,
        compute: Compute = "published",
        recompute: bool = False,
        router_replay: bool = False,
    ) -> None:
        """``recompute``: activations are computed again in the backward pass, which takes less memory.
        ``router_replay``: layers of experts are forced to the recorded experts of a micro-batch.
        """
        self.folder, self._ranks = folder, ranks
        checkpoint = Checkpoint.open(folder)
        stored = {t.name: TORCH_DTYPES[t.dtype] for t in checkpoint.layout().tensors}
        dtype = torch.float32 if compute == "float32" else _dtype(folder, stored)
        self.module = (
            _loaded(folder, dtype).to(ranks.device) if ranks.mesh is None else sharded(checkpoint, dtype, ranks)
        )
        # Dropout and other noise of training would make the policy another one than the sampler.
        self.module.eval()
        if recompute:
            _recompute(self.module)
        self.replay = RouterReplay(self.module) if router_replay else None
        self._head = _ScoringHead.of(self.module)
        self.parameters = dict(self.module.named_parameters())
        fused = blocks(self.module, stored.keys())
        views = {name: block.of(self.parameters[block.parameter]) for name, block in fused.items()}
        check(checkpoint, views)
        self.stored = {name: p for name, p in self.parameters.items() if name in stored} | views
        """Parameters, and blocks of parameters, under the names of the folder."""
        self.stored_dtypes = {name: stored[name] for name in self.stored}
        own = {name: stored[name] for name in self.parameters if name in stored}
        self.published = own | dtypes(fused, stored)
        """Of each parameter, the dtype of its published words."""

    @property
    def elements(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    @property
    def vocabulary(self) -> int:
        return int(self.module.config.vocab_size)

    @property
    def positions(self) -> int | None:
        """The longest text in tokens, or None if the model's configuration does not give it."""
        found = getattr(self.module.config, "max_position_embeddings", None)
        return found if isinstance(found, int) else None

    def working_copy(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the published words under the names of the folder's tensors."""
        yield from self.stored.items()

    def freeze(self) -> None:
        """Freeze the weights, for a reference model."""
        self.module.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self._ranks.device

    @property
    def sharded(self) -> bool:
        return self._ranks.mesh is not None

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities of the micro-batch's targets, (M,), at each row's temperature."""
        return self.scores(batch).logprobs

    def scores(
        self, batch: MicroBatch, *, replay: bool = True, to_attention: Mapping[str, object] | None = None
    ) -> TokenScores:
        """Scores of the micro-batch's targets, (M,), at each row's temperature. The head computes only the positions
        that predict a target, chunk by chunk. ``replay``: with the recorded experts, by a model that replays routers.
        ``to_attention``: keywords for the model's attention function.
        """
        self._route(batch if replay else None)
        targets, temperatures = self._on_device(batch.targets, batch.temperatures)

        def scored(rows: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> TokenScores:
            if weight is None:
                return scores_of_logits(rows, targets, temperatures)
            return scores_of_hidden(rows, weight, bias, targets, temperatures)

        return self._scored(batch, scored, to_attention)

    def candidate_logprobs(
        self, batch: MicroBatch, candidates: torch.Tensor, *, to_attention: Mapping[str, object] | None = None
    ) -> torch.Tensor:
        """Log-probabilities of ``candidates`` (M, K), token ids at each of the micro-batch's targets, at each row's
        temperature, with a gradient.
        """
        self._route(batch)
        ids, temperatures = self._on_device(candidates, batch.temperatures)

        def scored(rows: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
            return (candidate_logprobs(rows, weight, bias, ids, temperatures),)

        return self._scored(batch, scored, to_attention)[0]

    def most_probable(self, batch: MicroBatch, count: int) -> Candidates:
        """The micro-batch's targets, each followed by the ``count`` most probable tokens of its position, (M, 1 +
        count), at each row's temperature; without a gradient.
        """
        self._route(batch)
        targets, temperatures = self._on_device(batch.targets, batch.temperatures)

        def found(
            rows: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            ids, logprobs = most_probable(rows, weight, bias, targets, count, temperatures)
            return logprobs, ids

        with torch.no_grad():
            logprobs, ids = self._scored(batch, found, None)
        return Candidates(ids, logprobs)

    def _on_device(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.to(self._ranks.device) for tensor in tensors)

    def _scored(self, batch: MicroBatch, compute: _Compute[T], to_attention: Mapping[str, object] | None) -> T:
        """The answer of ``compute`` at the positions that predict a target: in the model's head, or of whole logits."""
        if self._head is not None:
            with self._head.computing(batch.logit_positions.to(self._ranks.device), compute) as asked:
                answer = self._answer(batch, 0, to_attention)
            if asked.found is not None and asked.found[0] is answer.logits:
                return cast("T", asked.found)
            logger.info("%s changes the logits of its head: they are computed whole", self.folder)
            self._head = None
        return compute(self._logits(batch, to_attention), None, None)

    def _route(self, batch: MicroBatch | None) -> None:
        """As the micro-batch has recorded, in a model that replays routers."""
        if self.replay is not None:
            self.replay.follow(batch, self._ranks.device)

    def _logits(self, batch: MicroBatch, to_attention: Mapping[str, object] | None) -> torch.Tensor:
        """Of the targets, (M, V)."""
        positions, packed = batch.logit_positions.to(self._ranks.device), batch.attention_mask is None
        answer = self._answer(batch, positions if packed else 0, to_attention)
        return answer.logits[0] if packed else answer.logits.flatten(0, 1)[positions]

    def _answer(
        self, batch: MicroBatch, logits_to_keep: int | torch.Tensor, to_attention: Mapping[str, object] | None
    ) -> Any:
        device = self._ranks.device
        return self.module(
            input_ids=batch.input_ids.to(device),
            attention_mask=None if batch.attention_mask is None else batch.attention_mask.to(device),
            position_ids=batch.position_ids.to(device),
            use_cache=False,
            logits_to_keep=logits_to_keep,
            **(to_attention or {}),
        )


@dataclass(slots=True)
class _Asked:
    """``positions``: those whose hidden states the head gives to ``compute``. ``found``: the answer, whose first tensor
    is the head's output.
    """

    positions: torch.Tensor
    compute: _Compute[Any]
    found: tuple[torch.Tensor, ...] | None = None


class _ScoringHead:
    """Lets a model's linear head answer with log-probabilities in place of all logits. The head computes inside of the
    model's own forward pass, where FSDP has gathered the head's weight.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        self._linear, self._whole = linear, linear.forward
        self._asked: _Asked | None = None
        linear.forward = self._forward

    @classmethod
    def of(cls, module: Any) -> _ScoringHead | None:
        """None for a model without a plain linear head."""
        linear = module.get_output_embeddings()
        return cls(linear) if type(linear) is torch.nn.Linear else None

    @contextmanager
    def computing(self, positions: torch.Tensor, compute: _Compute[Any]) -> Iterator[_Asked]:
        self._asked = _Asked(positions, compute)
        try:
            yield self._asked
        finally:
            self._asked = None

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        asked = self._asked
        if asked is None:
            return self._whole(hidden)
        rows = hidden.flatten(0, -2)[asked.positions]
        asked.found = found = asked.compute(rows, self._linear.weight, self._linear.bias)
        return found[0]


def _dtype(folder: Path, stored: dict[str, torch.dtype]) -> torch.dtype:
    """Return the folder's only floating dtype. Raises UsageError unless there is exactly one."""
    found = {dtype for dtype in stored.values() if dtype.is_floating_point}
    if len(found) != 1:
        raise UsageError(
            f"{folder} holds weights of {len(found)} floating dtypes: a learner trains models of one; use compute ="
            " 'float32'"
        )
    return found.pop()


def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    """The whole model, on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with loading(folder):
        # Only a local folder: nothing is asked of a model hub.
        attention = attention_of(AutoConfig.from_pretrained(str(folder), local_files_only=True))
        return AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype, local_files_only=True, attn_implementation=attention
        )


def _recompute(module: Any) -> None:
    """Activations of each layer are computed again in the backward pass. The option of transformers does so in training
    mode alone, and that mode has dropout. Raises UsageError.
    """
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise UsageError(
            f"[model] recompute = true does not fit a model of the type {module.config.model_type}: transformers cannot"
            " compute its layers again. Set recompute = false"
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
