"""The processes that train together: one, or those that torchrun started.

Guarantees: every rank gets the same answer from ``share`` and ``total``; a rank that dies ends the waits of the others
by the process group's time limit.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed as dist

from p2pcast.ground.errors import RetryableError, UsageError

T = TypeVar("T")

GROUP_S: Final = 600.0
"""Time limit of a collective call in seconds. Rank 0 shares a sign of life more often while the ledger has no batch."""


@dataclass(frozen=True, slots=True)
class TrainerRanks:
    """``rank`` of ``count``. ``device``: of this rank. ``mesh``: None for one process."""

    rank: int
    count: int
    device: torch.device
    mesh: Any = None

    @classmethod
    def start(cls) -> TrainerRanks:
        """Joins the other ranks, if torchrun has started this process. Raises UsageError."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cpu")
        if torch.cuda.is_available():
            if local >= torch.cuda.device_count():
                raise UsageError(
                    f"local rank {local} has no GPU: this machine has {torch.cuda.device_count()}; start torchrun with "
                    f"--nproc-per-node {torch.cuda.device_count()}"
                )
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        if not by_torchrun():
            return cls(0, 1, device)
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=GROUP_S))
        mesh = dist.device_mesh.init_device_mesh(device.type, (count,))
        return cls(dist.get_rank(), dist.get_world_size(), device, mesh)

    @property
    def first(self) -> bool:
        """Whether this rank talks to the ledger."""
        return self.rank == 0

    def share(self, value: T) -> T:
        """The value of the first rank, on all ranks."""
        if self.count == 1:
            return value
        box: list[Any] = [value if self.first else None]
        dist.broadcast_object_list(box, src=0)
        shared: T = box[0]
        return shared

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of a vector on the CPU, in float64."""
        summed = values.detach().to("cpu", torch.float64)
        if self.count > 1:
            dist.all_reduce(summed)
        return summed

    def largest(self, value: float) -> float:
        """The largest value of all ranks."""
        found = torch.tensor([value], dtype=torch.float64)
        if self.count > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    def gathered(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Turns the failure of a collective call into a RetryableError: another rank has ended."""
        try:
            yield
        except RuntimeError as error:
            if self.count == 1 or not _collective(error):
                raise
            raise RetryableError(
                f"rank {self.rank} of {self.count} lost the connection to another rank: {str(error)[:200]}. Read the"
                " message of the rank that ended first, and start all ranks again: they continue from the newest"
                " checkpoint"
            ) from error

    def end(self) -> None:
        if self.mesh is not None:
            dist.destroy_process_group()


def by_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"


def leave(code: int) -> NoReturn:
    """End this rank's process without Python's shutdown, which can abort it.

    A thread of gloo needs Python's lock to release the tensors of its last collective call. During the shutdown, the
    request for the lock aborts the process: https://github.com/pytorch/pytorch/issues/190489. The thread outlives
    ``destroy_process_group``, because DTensor's caches hold the group.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _collective(error: RuntimeError) -> bool:
    """Whether a collective call has failed. Gloo raises RuntimeErrors without a type of their own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
