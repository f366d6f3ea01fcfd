"""The callback by which checkpoints of TRL name the batches of a ledger that they contain.

Guarantee: a checkpoint without these names is refused at a restart, so no batch is trained twice or lost unnoticed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback

from p2pcast.ground.errors import LocalError


class Rollouts(Protocol):
    """``LedgerRollouts``."""

    def restore(self, folder: Path) -> None: ...
    def acknowledge(self, folder: Path, step: int) -> None: ...


class LedgerCheckpoints(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """From ``LedgerRollouts.callback``. Acts on rank 0."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero and state.global_step > 0:
            self._rollouts.restore(checkpoint_folder(args.output_dir, state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._rollouts.acknowledge(checkpoint_folder(args.output_dir, state.global_step), state.global_step)


def checkpoint_folder(output: str, step: int) -> Path:
    """Of transformers' trainer. Raises LocalError if there is none."""
    folder = Path(output) / f"checkpoint-{step}"
    if not folder.is_dir():
        raise LocalError(f"there is no {folder}: a ledger's run continues from checkpoints in the output folder")
    return folder
