"""Why a worker returns a lease without a result. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

MAX_REASON: Final = 32
MAX_DETAIL: Final = 300
"""Most characters of a reason, and of the worker's explanation."""


class ReturnReason(Enum):
    DRAINED = "drained"
    """The worker is stopping, or has no capacity for the job."""
    UNFIT = "unfit"
    """The job belongs to a different task than the worker's."""
    ENGINE = "engine"
    """The engine does not answer, or its answer is invalid."""
    REFUSED = "refused prompt"
    """The engine refuses the prompt, for instance one that is too long."""
    FAILED = "failed play"
    """The task's play raised an exception."""
    HUNG = "hung play"
    """The task's play did not finish in time, while it had no request at the engine."""
    INVALID = "invalid play"
    """The play is not a valid result."""

    @property
    def fails_job(self) -> bool:
        """Whether the job itself is at fault, as far as the worker knows."""
        return self in (ReturnReason.REFUSED, ReturnReason.FAILED, ReturnReason.HUNG, ReturnReason.INVALID)


class Returned(NamedTuple):
    """``detail``: one printable line for people."""

    reason: ReturnReason
    detail: str = ""
