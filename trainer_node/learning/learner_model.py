"""The model that a learner trains: a Hugging Face causal LM, whole in one process or sharded over ranks (FSDP2).

Promises: names, shapes and published dtypes are those of the folder. Log-probabilities come from the words that are
published. One rank and several compute the same, up to the order of sums.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.errors import LocalError, P2PCastError, UsageError
from trainer_node.learning.objective.micro_batches import MicroBatch
from trainer_node.learning.objective.policy_loss import target_logprobs
from trainer_node.learning.trainer_ranks import TrainerRanks
from trainer_node.sdk.tensors import TORCH_DTYPES

Compute = Literal["published", "float32"]


class LearnerModel:
    """``compute``: dtype of forward and backward passes. ``published``: as the folder's; ``float32``: the published
    words, computed with in fp32, for processors that are slow or inexact in bf16.

    Raises LocalError for a folder that transformers cannot load.
    """

    def __init__(
        self, folder: Path, ranks: TrainerRanks, *, compute: Compute = "published", recompute: bool = False
    ) -> None:
        """``recompute``: activations are computed again in the backward pass, which takes less memory."""
        self.folder, self._ranks = folder, ranks
        stored = {t.name: TORCH_DTYPES[t.dtype] for t in Checkpoint.open(folder).layout().tensors}
        self.module = _loaded(folder, torch.float32 if compute == "float32" else _dtype(folder, stored))
        if recompute:
            self.module.gradient_checkpointing_enable()
        self.module.to(ranks.device)
        if ranks.mesh is not None:
            _shard(self.module, ranks.mesh)
        self.parameters = dict(self.module.named_parameters())
        self.published = {name: stored.get(name, p.dtype) for name, p in self.parameters.items()}
        if missing := sorted(self.parameters.keys() - stored.keys()):
            raise UsageError(
                f"{folder} has no tensor {missing[0]!r}, which its model trains: save the model with its head"
            )

    @property
    def elements(self) -> int:
        return sum(p.numel() for p in self.parameters.values())

    @property
    def vocabulary(self) -> int:
        return int(self.module.config.vocab_size)

    def freeze(self) -> None:
        """For a reference model."""
        self.module.requires_grad_(False)

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probabilities of the micro-batch's targets, (M,), at each row's temperature. Of packed rows the head
        computes only the positions that predict a target.
        """
        device = self._ranks.device
        positions, packed = batch.logit_positions.to(device), batch.attention_mask is None
        answer = self.module(
            input_ids=batch.input_ids.to(device),
            attention_mask=None if batch.attention_mask is None else batch.attention_mask.to(device),
            position_ids=batch.position_ids.to(device),
            use_cache=False,
            logits_to_keep=positions if packed else 0,
        )
        logits = answer.logits[0] if packed else answer.logits.flatten(0, 1)[positions]
        return target_logprobs(logits, batch.targets.to(device), batch.temperatures.to(device))


def _dtype(folder: Path, stored: dict[str, torch.dtype]) -> torch.dtype:
    """The one floating dtype of the folder. Raises UsageError."""
    found = {dtype for dtype in stored.values() if dtype.is_floating_point}
    if len(found) != 1:
        raise UsageError(
            f"{folder} holds weights of {len(found)} floating dtypes: a learner trains models of one; use compute ="
            " 'float32'"
        )
    return found.pop()


def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        # Only a local folder: nothing is asked of a model hub.
        return AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True).train()
    except P2PCastError:
        raise
    except Exception as error:  # noqa: BLE001 - transformers raises errors of many kinds
        raise LocalError(f"transformers cannot load {folder}: {type(error).__name__}: {str(error)[:300]}") from None


def _shard(module: Any, mesh: Any) -> None:
    """FSDP2: each decoder layer is gathered while it computes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in _layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def _layers(module: Any) -> list[Any]:
    """The decoder layers: the longest list of modules."""
    lists = [m for m in module.modules() if isinstance(m, torch.nn.ModuleList)]
    return max((list(found) for found in lists), key=len, default=[])
