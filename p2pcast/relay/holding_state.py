"""The states of a holding and the steps between them. Pure.

A holding is one artifact in a node. Only ``Holding`` takes steps; all others query it.

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
    # Each member is one object. Enum hashes the name, which is slow, and states are looked up all the time.
    __hash__ = object.__hash__

    MAKING = "making"
    """This node is making the artifact: batches and pieces come from its own packer."""
    IDLE = "idle"
    """An earlier process received part of it. Unless the rest turns out to be needed, nothing is offered."""
    WAITING = "waiting"
    """Pieces or records are missing, and no source sends them. A downloader may be pulling them."""
    RECEIVING = "receiving"
    """Pieces or records are missing, and one source sends them."""
    EXCERPT = "excerpt"
    """Some pieces are fetched for a repair. An excerpt never completes and is never offered."""
    VERIFIED = "verified"
    """The directory is sealed and every piece matched its hash. The log may still be on its way to the disk."""
    FINISHED = "finished"
    """Every piece is in the log, and the owner has been informed."""
    DURABLE = "durable"
    """Sealed in the store."""
    SEAL_FAILED = "seal failed"
    """The owner could not seal the artifact in the store."""
    ABORTED = "aborted"
    """The hub called the artifact off, or this node gave it up. The node no longer has it."""


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
        # Sealing runs in a thread and may finish after the abort.
        HoldingState.ABORTED: {HoldingStep.SEAL: HoldingState.ABORTED, HoldingStep.FAIL_SEAL: HoldingState.ABORTED},
    }
)
"""``ABORT`` is legal in every state except ``ABORTED``; ``after`` handles it."""


class IllegalStepError(RuntimeError):
    """A bug: a caller took a step that the holding's state does not allow."""


def after(state: HoldingState, step: HoldingStep) -> HoldingState:
    """Return the state to which ``step`` leads. Raises IllegalStepError."""
    if step is HoldingStep.ABORT and state is not HoldingState.ABORTED:
        return HoldingState.ABORTED
    try:
        return TRANSITIONS[state][step]
    except KeyError:
        raise IllegalStepError(f"a holding that is {state.value} cannot take the step {step.value!r}") from None
