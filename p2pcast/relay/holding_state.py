"""The states of a holding and the steps between them. Pure.

A holding is one artifact in a node. ``Holding`` alone takes steps; all others ask it questions.

    MAKING ----------------------------+
    IDLE -> WAITING <-> RECEIVING -----+-> VERIFIED -> FINISHED -> DURABLE
    EXCERPT (never complete)                              +------> SEAL_FAILED
    every state -> ABORTED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final


class HoldingState(Enum):
    # Each member is one object. Enum hashes names, in Python, and holdings look states up all the time.
    __hash__ = object.__hash__

    MAKING = "making"
    """This node makes the artifact: batches and pieces come from its own packer."""
    IDLE = "idle"
    """An earlier process received a part. Whether the rest is needed is unknown: nothing is offered or asked for."""
    WAITING = "waiting"
    """Pieces or records are missing, and no source sends them. A downloader may be pulling them."""
    RECEIVING = "receiving"
    """Pieces or records are missing, and one source sends them."""
    EXCERPT = "excerpt"
    """Some pieces are fetched for a repair. An excerpt never completes and is never offered."""
    VERIFIED = "verified"
    """The directory is sealed and every piece matched its hash. The log may still be on its way to the disk."""
    FINISHED = "finished"
    """Every piece is in the log, and the owner was told."""
    DURABLE = "durable"
    """Sealed in the store."""
    SEAL_FAILED = "seal failed"
    """The owner could not seal the artifact in the store."""
    ABORTED = "aborted"
    """The hub called the artifact off, or this node gave it up. The node no longer holds it."""


class HoldingStep(Enum):
    WANT = "want"
    """The rest is needed."""
    RECEIVE = "receive"
    """A source begins to send."""
    LOSE_SOURCE = "lose source"
    """The source stopped before the end."""
    VERIFY = "verify"
    """The last missing record or piece was verified."""
    FINISH = "finish"
    """The last piece was written to the log."""
    SEAL = "seal"
    """The owner sealed the artifact in the store."""
    FAIL_SEAL = "fail to seal"
    ABORT = "abort"


MISSING: Final = frozenset(
    {HoldingState.MAKING, HoldingState.IDLE, HoldingState.WAITING, HoldingState.RECEIVING, HoldingState.EXCERPT}
)
"""States in which pieces or records are missing, or (``EXCERPT``) may be."""
BIRTH: Final = MISSING | {HoldingState.DURABLE}
"""States in which a holding may begin."""
COMPLETE: Final = frozenset(
    {HoldingState.VERIFIED, HoldingState.FINISHED, HoldingState.DURABLE, HoldingState.SEAL_FAILED}
)
IN_LOG: Final = COMPLETE - {HoldingState.VERIFIED}
SETTLED: Final = frozenset({HoldingState.DURABLE, HoldingState.SEAL_FAILED, HoldingState.ABORTED})
"""States in which the outcome of sealing is known."""
SOURCED: Final = frozenset({HoldingState.RECEIVING, HoldingState.EXCERPT})
"""States in which a holding may have a source; ``RECEIVING`` always has one."""

TRANSITIONS: Final[Mapping[HoldingState, Mapping[HoldingStep, HoldingState]]] = MappingProxyType(
    {
        HoldingState.MAKING: {HoldingStep.VERIFY: HoldingState.VERIFIED},
        HoldingState.IDLE: {
            HoldingStep.WANT: HoldingState.WAITING,
            HoldingStep.RECEIVE: HoldingState.RECEIVING,
            HoldingStep.VERIFY: HoldingState.VERIFIED,
        },
        HoldingState.WAITING: {
            HoldingStep.RECEIVE: HoldingState.RECEIVING,
            HoldingStep.VERIFY: HoldingState.VERIFIED,
        },
        HoldingState.RECEIVING: {
            HoldingStep.LOSE_SOURCE: HoldingState.WAITING,
            HoldingStep.VERIFY: HoldingState.VERIFIED,
        },
        HoldingState.EXCERPT: {
            HoldingStep.RECEIVE: HoldingState.EXCERPT,
            HoldingStep.LOSE_SOURCE: HoldingState.EXCERPT,
        },
        HoldingState.VERIFIED: {HoldingStep.FINISH: HoldingState.FINISHED},
        HoldingState.FINISHED: {
            HoldingStep.SEAL: HoldingState.DURABLE,
            HoldingStep.FAIL_SEAL: HoldingState.SEAL_FAILED,
        },
        HoldingState.DURABLE: {},
        HoldingState.SEAL_FAILED: {},
        # Sealing runs in a thread and may end after the abort.
        HoldingState.ABORTED: {HoldingStep.SEAL: HoldingState.ABORTED, HoldingStep.FAIL_SEAL: HoldingState.ABORTED},
    }
)
"""``ABORT`` is legal in every state but ``ABORTED``; ``after`` adds it."""


class IllegalStepError(RuntimeError):
    """A defect of this program: a caller took a step that the holding's state does not allow."""


def after(state: HoldingState, step: HoldingStep) -> HoldingState:
    """The state that ``step`` leads to. Raises IllegalStepError."""
    if step is HoldingStep.ABORT and state is not HoldingState.ABORTED:
        return HoldingState.ABORTED
    try:
        return TRANSITIONS[state][step]
    except KeyError:
        raise IllegalStepError(f"a holding that is {state.value} cannot take the step {step.value!r}") from None
