"""The ranks that publish together, and their collective work, all of which is done when a Publisher is made."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from p2pcast.ground.errors import UsageError


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """This rank among those that publish together. ``numbers``: the global ranks of all of them, in order."""

    rank: int
    numbers: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.numbers)

    @classmethod
    def of(cls, group: Any) -> ProcessGroup:
        """Return ``group``, else the default process group, else a single rank. Raises UsageError."""
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise UsageError("a group was given, but torch.distributed is not initialised")
            return cls(0, (0,))
        rank = dist.get_rank(group)
        if rank < 0:
            raise UsageError("this rank is not in the group that was given: only its members make a Publisher")
        return cls(rank, tuple(dist.get_process_group_ranks(group or dist.group.WORLD)))

    def draw(self, group: Any, size: int) -> bytes:
        """Return random bytes, the same on all ranks. Collective."""
        box: list[Any] = [secrets.token_bytes(size)]
        if self.ranks > 1:
            dist.broadcast_object_list(box, src=self.numbers[0], group=group)
        drawn: bytes = box[0]
        return drawn
