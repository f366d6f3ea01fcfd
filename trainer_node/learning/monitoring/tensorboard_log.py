"""Events of a training run as TensorBoard's scalars, at the learner's step and the event's time."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from p2pcast.files.atomic_files import explained
from p2pcast.ground.errors import LocalError
from trainer_node.learning.monitoring.run_record import (
    BudgetEvent,
    CheckpointEvent,
    EndEvent,
    Evaluation,
    Event,
    Probe,
    Publication,
    StartEvent,
    StepEvent,
)

FLUSH_S: Final = 10
"""Longest time in seconds between an event and its scalars in the file."""
_NO_SCALARS: Final = frozenset({"step", "time", "branch"})


def scalars(event: Event) -> dict[str, float]:
    """Tag and value of each number of the event, such as ``train/reward``."""
    match event:
        case StepEvent():
            derived = {
                "staleness_mean": event.staleness_mean,
                "staleness_max": event.staleness_max,
                "tokens_per_s": event.tokens_per_s,
            }
            return _numbers("train", event) | {f"train/{k}": float(v) for k, v in derived.items() if v is not None}
        case Publication():
            return _numbers("publish", event)
        case Evaluation():
            counted = {
                f"evaluation/{name}/{value}": float(count)
                for name, counts in event.tags.items()
                for value, count in counts.items()
            }
            return _numbers("evaluation", event) | counted
        case Probe():
            found = {"kl": event.kl, "floor": event.floor, "alarm": float(event.alarm)}
            return {f"probe_{name}/{event.engine}": value for name, value in found.items() if value is not None}
        case BudgetEvent():
            found = {"percentile": event.percentile, "pages": None if event.after is None else float(event.after)}
            return {f"budget_{name}/bin {event.bin}": value for name, value in found.items() if value is not None}
        case CheckpointEvent():
            return _numbers("checkpoint", event)
        case StartEvent() | EndEvent():
            return {}


def _numbers(prefix: str, event: Any) -> dict[str, float]:
    values = {each.name: getattr(event, each.name) for each in fields(event) if each.name not in _NO_SCALARS}
    return {f"{prefix}/{k}": float(v) for k, v in values.items() if isinstance(v, int | float)}


class TensorBoardLog:
    """Writes the scalars of each event into event files in ``folder``. ``write`` fits ``RunLog.watch``."""

    def __init__(self, folder: Path) -> None:
        """Raises LocalError: the package tensorboard is missing."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise LocalError(
                "TensorBoard's files need the package tensorboard, which is not installed: "
                "pip install 'p2pcast[tensorboard]'"
            ) from None
        self._folder = folder
        self._make = SummaryWriter
        self._writer: Any = None

    def __enter__(self) -> TensorBoardLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, event: Event) -> None:
        """A start makes TensorBoard hide scalars of earlier runs beyond its step. Raises LocalError."""
        with explained("write", self._folder):
            if isinstance(event, StartEvent) or self._writer is None:
                self.close()
                beyond = event.step + 1 if isinstance(event, StartEvent) else None
                self._writer = self._make(str(self._folder), purge_step=beyond, flush_secs=FLUSH_S)
            for tag, value in scalars(event).items():
                self._writer.add_scalar(tag, value, global_step=event.step, walltime=event.time)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
