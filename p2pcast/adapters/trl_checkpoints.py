"""The callback by which checkpoints of TRL name the batches of a ledger that they contain.

Promise: a checkpoint without these names is refused at a restart, so no batch is trained twice or lost unnoticed.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from p2pcast.adapters.trl_rollouts import LedgerRollouts, checkpoint_folder


class LedgerCheckpoints(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """From ``LedgerRollouts.callback``. Acts on rank 0."""

    def __init__(self, rollouts: LedgerRollouts) -> None:
        self._rollouts = rollouts

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and state.global_step > 0:
            self._rollouts.restore(checkpoint_folder(args.output_dir, state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._rollouts.acknowledge(checkpoint_folder(args.output_dir, state.global_step), state.global_step)
