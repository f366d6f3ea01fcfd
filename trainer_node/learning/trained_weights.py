"""The weights that a learner trains: a working copy for forward and backward passes, and what the optimiser updates.

    masters = "fp32"        fp32 masters and AdamW's moments; the working copy is the masters, rounded as published
    masters = "kahan"       no masters; bf16 weights with a compensation for each (Kahan summation), moments in bf16
    masters = "stochastic"  no masters; bf16 weights, rounded stochastically without bias, moments in fp32

Guarantee: the working copy holds exactly the words that are published, so log-probabilities of the learner differ from
those of an engine by numerics alone (docs/design/learner.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from p2pcast.ground.errors import UsageError
from trainer_node.learning.stochastic_adamw import StochasticAdamW

Masters = Literal["fp32", "kahan", "stochastic"]


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """``warmup_steps``: learner steps over which the rate rises linearly. ``grad_clip``: largest gradient norm."""

    lr: float = 1e-6
    warmup_steps: int = 0
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    masters: Masters = "fp32"

    def rate(self, step: int) -> float:
        """The learning rate of the update that leads from ``step`` to the next one."""
        return self.lr * min(1.0, (step + 1) / (self.warmup_steps + 1))


class TrainedWeights:
    """``parameters``: name → parameter of the model, without aliases. ``published``: name → dtype in which it is
    published. Raises UsageError for a model that the chosen masters cannot train.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        published: Mapping[str, torch.dtype],
        options: OptimizerOptions,
    ) -> None:
        self._parameters = dict(parameters)
        self._published = dict(published)
        self._options = options
        self._masters: dict[str, torch.Tensor] = {}
        if options.masters == "fp32":
            self._masters = {n: p.detach().to(torch.float32, copy=True) for n, p in self._parameters.items()}
        else:
            for name, parameter in self._parameters.items():
                if not parameter.dtype == self._published[name] == torch.bfloat16:
                    raise UsageError(
                        f"masters = {options.masters!r} needs a bfloat16 model, and {name} is {parameter.dtype},"
                        f" published as {self._published[name]}: use masters = 'fp32'"
                    )
        self._trained: dict[str, torch.Tensor] = self._masters or dict(self._parameters)
        self._optimizer = self._made(list(self._trained.values()))

    def _made(self, trained: list[torch.Tensor]) -> torch.optim.Optimizer:
        o = self._options
        shared: dict[str, Any] = {"lr": o.lr, "betas": o.betas, "eps": o.eps, "weight_decay": o.weight_decay}
        if o.masters == "stochastic":
            return StochasticAdamW(trained, **shared)
        if o.masters == "kahan":
            from optimi import AdamW

            made: torch.optim.Optimizer = AdamW(trained, kahan_sum=True, foreach=False, **shared)
            return made
        return torch.optim.AdamW(trained, foreach=False, **shared)

    # -- an update

    def collect_gradients(self) -> None:
        """Add the working copy's gradients to those of the masters, in fp32: micro-batches add up without loss."""
        if not self._masters:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            master = self._masters[name]
            gradient = parameter.grad.to(torch.float32)
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def rate(self, step: int) -> float:
        """The learning rate of the update that leads from ``step`` to the next one."""
        return self._options.rate(step)

    def update(self, step: int) -> float:
        """One update by the gradients that were collected. Returns the norm of the gradient before it was clipped; an
        update whose norm is not finite changes nothing.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), self._options.grad_clip, foreach=False)
        found = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if torch.isfinite(torch.tensor(found)):
            for group in self._optimizer.param_groups:
                group["lr"] = self.rate(step)
            self._optimizer.step()
            self._publish_masters()
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            parameter.grad = None
        return found

    def _publish_masters(self) -> None:
        """The working copy becomes the masters, rounded to the dtype in which they are published."""
        with torch.no_grad():
            for name, master in self._masters.items():
                self._parameters[name].copy_(master.to(self._published[name]))

    # -- checkpoints

    def state(self) -> dict[str, torch.Tensor]:
        """All that an exact continuation needs: weights or masters, and the optimiser's state, by name."""
        out: dict[str, torch.Tensor] = {}
        for name, trained in self._trained.items():
            out[f"weights.{name}"] = trained.detach()
            for key, value in self._optimizer.state.get(trained, {}).items():
                if isinstance(value, torch.Tensor):
                    out[f"optimizer.{key}.{name}"] = value
        return out

    def expected(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
        """Tensors into which a checkpoint with these entries (shape, dtype) is read: sharded as the weights are. Those
        of other parts are whole, in the memory of the host.
        """
        return {key: self._room(key, shape, dtype) for key, (shape, dtype) in shapes.items()}

    def _room(self, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        like = self._trained.get(_split(key)[1])
        if like is not None and tuple(like.shape) == tuple(shape):
            return torch.empty_like(like, dtype=dtype)
        return torch.empty(shape, dtype=dtype)

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from ``state`` of another process; entries of other parts are left out. Raises UsageError for the
        state of another model.
        """
        weights = {_split(key)[1]: value for key, value in state.items() if key.startswith("weights.")}
        if weights.keys() != self._trained.keys():
            differ = sorted(weights.keys() ^ self._trained.keys())
            raise UsageError(f"the checkpoint is of another model: {len(differ)} names differ, such as {differ[0]!r}")
        with torch.no_grad():
            for name, trained in self._trained.items():
                trained.copy_(weights[name])
        for key, value in state.items():
            if key.startswith("optimizer."):
                kind, name = _split(key)
                trained = self._trained[name]
                # AdamW keeps its count of steps on the host.
                self._optimizer.state[trained][kind] = value.to(trained.device) if value.dim() else value
        self._publish_masters()


def _split(key: str) -> tuple[str, str]:
    """``optimizer.KIND.NAME`` or ``weights.NAME`` → (kind, name)."""
    if key.startswith("weights."):
        return "", key.removeprefix("weights.")
    kind, _, name = key.removeprefix("optimizer.").partition(".")
    return kind, name
