"""Why a worker gives a lease back without a result. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

MAX_REASON: Final = 32
MAX_DETAIL: Final = 300
"""Most characters of a reason, and of what a worker says about it."""


class ReturnReason(Enum):
    DRAINED = "drained"
    """The worker ends, or has no room for the job."""
    UNFIT = "unfit"
    """The job is of another task than the worker's."""
    ENGINE = "engine"
    """The engine does not answer, or answers nonsense."""
    REFUSED = "refused prompt"
    """The engine refuses the prompt, for instance one that is too long."""
    FAILED = "failed play"
    """The task's play raised."""
    HUNG = "hung play"
    """The task's play did not end in time, while the engine had nothing to do for it."""
    INVALID = "invalid play"
    """The play is no valid result."""

    @property
    def fails_job(self) -> bool:
        """Whether the job itself is at fault, as far as the worker knows."""
        return self in (ReturnReason.REFUSED, ReturnReason.FAILED, ReturnReason.HUNG, ReturnReason.INVALID)


class Returned(NamedTuple):
    """``detail``: one printable line for people."""

    reason: ReturnReason
    detail: str = ""
