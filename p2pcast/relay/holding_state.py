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


class State(Enum):
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


class Step(Enum):
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


MISSING: Final = frozenset({State.MAKING, State.IDLE, State.WAITING, State.RECEIVING, State.EXCERPT})
"""States in which pieces or records are missing, or (``EXCERPT``) may be."""
BIRTH: Final = MISSING | {State.DURABLE}
"""States in which a holding may begin."""
COMPLETE: Final = frozenset({State.VERIFIED, State.FINISHED, State.DURABLE, State.SEAL_FAILED})
IN_LOG: Final = COMPLETE - {State.VERIFIED}
SETTLED: Final = frozenset({State.DURABLE, State.SEAL_FAILED, State.ABORTED})
"""States in which the outcome of sealing is known."""
SOURCED: Final = frozenset({State.RECEIVING, State.EXCERPT})
"""States in which a holding may have a source; ``RECEIVING`` always has one."""

TRANSITIONS: Final[Mapping[State, Mapping[Step, State]]] = MappingProxyType(
    {
        State.MAKING: {Step.VERIFY: State.VERIFIED},
        State.IDLE: {
            Step.WANT: State.WAITING,
            Step.RECEIVE: State.RECEIVING,
            Step.VERIFY: State.VERIFIED,
        },
        State.WAITING: {
            Step.RECEIVE: State.RECEIVING,
            Step.VERIFY: State.VERIFIED,
        },
        State.RECEIVING: {
            Step.LOSE_SOURCE: State.WAITING,
            Step.VERIFY: State.VERIFIED,
        },
        State.EXCERPT: {
            Step.RECEIVE: State.EXCERPT,
            Step.LOSE_SOURCE: State.EXCERPT,
        },
        State.VERIFIED: {Step.FINISH: State.FINISHED},
        State.FINISHED: {Step.SEAL: State.DURABLE, Step.FAIL_SEAL: State.SEAL_FAILED},
        State.DURABLE: {},
        State.SEAL_FAILED: {},
        # Sealing runs in a thread and may end after the abort.
        State.ABORTED: {Step.SEAL: State.ABORTED, Step.FAIL_SEAL: State.ABORTED},
    }
)
"""``ABORT`` is legal in every state but ``ABORTED``; ``after`` adds it."""


class IllegalStepError(RuntimeError):
    """A defect of this program: a caller took a step that the holding's state does not allow."""


def after(state: State, step: Step) -> State:
    """The state that ``step`` leads to. Raises IllegalStepError."""
    if step is Step.ABORT and state is not State.ABORTED:
        return State.ABORTED
    try:
        return TRANSITIONS[state][step]
    except KeyError:
        raise IllegalStepError(f"a holding that is {state.value} cannot take the step {step.value!r}") from None
