"""``PublishCallback``: trainers of transformers, and of libraries built on its ``Trainer``, publish while they train.

    Trainer(…, callbacks=[PublishCallback("hub:7077", token_file="token", base="Qwen3-8B", every_steps=10)]).train()

Guarantees: every rank publishes its own share of the weights, and FSDP2 gathers nothing. Training goes on after a copy:
the next optimiser step waits for that copy alone. The weights of the last step are published when training ends. A
trainer that has loaded a checkpoint publishes the loaded weights before its first step. The first version opens a
branch if the hub has versions of another process.
"""

from __future__ import annotations

import logging
import os
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, Literal

from transformers import TrainerCallback

from p2pcast.ground.errors import RetryableError, UsageError
from trainer_node.frameworks.tried_versions import untried

if TYPE_CHECKING:
    import torch

    from trainer_node import Handle, Publisher
    from trainer_node.sdk.tensors import Rename

TRIED: Final = ("5.19",)
"""Versions of transformers."""
logger = logging.getLogger("p2pcast.transformers")


class PublishCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """Publishes every ``every_steps`` optimiser steps, and at the end. All ranks of the trainer make one.

    ``hub``, ``token_file``, ``base``, ``rename``, ``dtype``, ``previous`` and ``plaintext`` are those of ``Publisher``.
    ``live_fraction``: share of all engines that has to serve the last version before ``train`` returns; None: ``train``
    waits for the hub alone. ``timeout_s``: seconds for that, until RetryableError.

    A version that is lost on its way is logged as a warning, and training goes on. A lost last version raises
    RetryableError. ``train`` raises UsageError for models that it cannot publish: FSDP1, DeepSpeed, PEFT.
    """

    def __init__(
        self,
        hub: str,
        *,
        every_steps: int = 1,
        token_file: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
        rename: Rename | None = None,
        dtype: torch.dtype | None = None,
        previous: Literal["gpu", "pinned"] = "gpu",
        plaintext: bool = False,
        live_fraction: float | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if every_steps < 1:
            raise UsageError(f"every_steps={every_steps}: give 1 or more optimiser steps")
        if live_fraction is not None and not 0 < live_fraction <= 1:
            raise UsageError(
                f"live_fraction={live_fraction}: give more than 0 and at most 1, or None to wait for no engine"
            )
        self._hub, self._every_steps = hub, every_steps
        self._options: dict[str, Any] = {
            "token_file": token_file,
            "base": base,
            "rename": rename,
            "previous": previous,
            "plaintext": plaintext,
        }
        if dtype is not None:
            self._options["dtype"] = dtype
        self._live_fraction, self._timeout_s = live_fraction, timeout_s
        self._publisher: Publisher | None = None
        self._handle: Handle | None = None
        self._published: int | None = None
        """The step that was published last."""
        self._resumes = False
        """Whether the next version opens a branch."""
        if (sentence := untried("transformers", metadata.version("transformers"), TRIED)) is not None:
            logger.warning("%s", sentence)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        from trainer_node import Publisher

        _check(model, getattr(args, "deepspeed", None))
        if self._publisher is not None:
            # The call of train() before has raised: its last version may never be complete.
            self._publisher.__exit__(UsageError, None, None)
        self._publisher, self._handle, self._published = Publisher(self._hub, **self._options), None, None
        newest = self._publisher.newest
        # Versions of an earlier process are left behind on their branch.
        self._resumes = newest is not None and newest.step > 0
        if state.global_step > 0:
            self._publish(state.global_step, model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._handle is not None:
            self._handle.wait_snapshot()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % self._every_steps == 0:
            self._publish(state.global_step, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step != self._published:
            self._publish(state.global_step, model)
        assert self._handle is not None
        assert self._publisher is not None
        with self._publisher:
            self._handle.wait_durable(self._timeout_s)
            if self._live_fraction is not None:
                self._handle.wait_live(self._live_fraction, self._timeout_s)
        self._publisher = self._handle = None

    def _publish(self, step: int, model: Any) -> None:
        assert self._publisher is not None
        before = self._handle
        begin = self._publisher.resume if self._resumes else self._publisher.publish
        # Unlike the parameters, the state has persistent buffers, and FSDP2 shards it whatever the forward has left.
        self._handle = begin(step, model.state_dict())
        self._published, self._resumes = step, False
        if before is not None and before.failed:
            try:
                before.wait_durable(0)
            except RetryableError as error:
                logger.warning("training goes on, and step %d is tried next: %s", step, error)


def _check(model: Any, deepspeed: Any) -> None:
    """Raises UsageError for models whose tensors are not those of their checkpoint."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    if model is None:
        raise UsageError("the trainer has no model to publish")
    if deepspeed:
        raise UsageError("PublishCallback cannot read the partitions of DeepSpeed: train with FSDP2 (fsdp_version 2)")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UsageError("PublishCallback cannot read the flat parameters of FSDP1: set fsdp_version to 2")
    if hasattr(model, "peft_config"):
        raise UsageError(
            "PublishCallback does not merge adapters of PEFT: train the whole model, or publish the merged folders with"
            " p2pcast seed CHECKPOINTS"
        )
