"""State of an engine's installer: all that it knows of its engine, and the table by which events change that.

``install_machine.InstallMachine.note`` alone writes the state. ``validate`` states what holds at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from p2pcast.ground.errors import IntegrityError, RetryableError
from p2pcast.ground.version import Version
from rollout_node.installers.installer import CommitReport


class Condition(Enum):
    UNKNOWN = "no version of the engine is known"
    DOUBTED = "a rank's report is not reliable: only a whole install restores a known version"
    UNREADY = "an install failed or is under way: only a commit makes the engine ready"
    AWAY = "ready, except that the server is out of reach"
    READY = "fit for traffic"


KNOWN: Final = (Condition.UNREADY, Condition.AWAY, Condition.READY)
"""Conditions of an engine whose version is known."""


class EngineEvent(Enum):
    MET = "all ranks answered"
    RESTARTED = "all ranks answered, and some are other processes than before"
    UNREACHABLE = "the server did not answer a check"
    ANSWERED = "the server answered a check, and has kept its version"
    LOST = "the version in use is not known any more"
    DOUBTED = "a rank's report is not reliable"
    PAUSE = "this peer's pause is about to begin, or has ended"
    DROPPED = "nothing is staged any more"
    WHOLE = "some rank prepared the whole state"
    STAGED = "all ranks prepared a version"
    WRITING = "weights may be written from now on"
    PROVED = "all ranks proved one version, which is in use as soon as the engine is resumed"
    RESTORED = "no weight is written any more, and the version before is in use"
    COMMITTED = "the engine serves a version that all ranks proved"
    FAILED = "an install failed"


TRANSITIONS: Final[Mapping[EngineEvent, Mapping[Condition, Condition]]] = {
    EngineEvent.MET: {},
    EngineEvent.RESTARTED: {Condition.DOUBTED: Condition.UNKNOWN},
    EngineEvent.UNREACHABLE: {Condition.READY: Condition.AWAY},
    EngineEvent.ANSWERED: {Condition.AWAY: Condition.READY},
    EngineEvent.LOST: dict.fromkeys(KNOWN, Condition.UNKNOWN),
    EngineEvent.DOUBTED: dict.fromkeys(Condition, Condition.DOUBTED),
    EngineEvent.PAUSE: {},
    EngineEvent.DROPPED: {},
    EngineEvent.WHOLE: dict.fromkeys(KNOWN, Condition.UNREADY),
    EngineEvent.STAGED: {},
    EngineEvent.WRITING: {},
    EngineEvent.PROVED: dict.fromkeys(Condition, Condition.UNREADY),
    EngineEvent.RESTORED: {},
    EngineEvent.COMMITTED: dict.fromkeys(Condition, Condition.READY),
    EngineEvent.FAILED: dict.fromkeys(KNOWN, Condition.UNREADY),
}
"""A condition that a row does not name stays as it is."""

NOTHING_STAGED: Final = (
    EngineEvent.LOST,
    EngineEvent.DOUBTED,
    EngineEvent.DROPPED,
    EngineEvent.COMMITTED,
    EngineEvent.FAILED,
)
"""After these, no version is staged."""


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """``marks``: by rank, the checksum of the values that the rank prepared. ``dense``: some rank writes the whole
    state. ``report``: of the switch, if the engine has switched while staging.
    """

    version: Version
    marks: Mapping[int, int] = field(default_factory=dict)
    dense: bool = False
    report: CommitReport | None = None


@dataclass(frozen=True, slots=True)
class Traits:
    """The ranks' description of their engine. ``incarnations``: names of their processes. ``follows``: its attention
    follows the schedule of budgets that belongs to its version. ``lacks``: adapters of the run that it does not take.
    ``skipped``: tensors of the run that it leaves out, without an effect (``in_engine.tensor_accounts``).
    """

    incarnations: Mapping[int, str] = field(default_factory=dict)
    ranks: int = 0
    follows: bool = False
    lacks: tuple[str, ...] = ()
    skipped: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class InstallState:
    """``committed``: the version in use. ``serving_epoch``: id that changes with each write to the weights. A reader
    asks before and after a request: equal ids mean that the version in use made the whole answer. None while weights
    may be written, and for the safe point ``step``. ``pausing``: if the engine is paused, this peer paused it.
    """

    condition: Condition = Condition.UNKNOWN
    committed: Version | None = None
    serving_epoch: str | None = None
    staged: StagedVersion | None = None
    pausing: bool = False
    traits: Traits = Traits()

    @property
    def ready(self) -> bool:
        return self.condition is Condition.READY

    @property
    def commit_needs_shadow(self) -> bool:
        return self.staged is not None and self.staged.dense and self.staged.report is None

    def validate(self) -> None:
        """Raises AssertionError unless the state's invariants hold."""
        assert (self.committed is not None) == (self.condition in KNOWN), "a version is known, or it is not"
        assert self.serving_epoch is None or self.committed is not None, "an epoch is a version's"
        assert not (self.ready and self.staged is not None and self.staged.dense), "a whole install takes time"


# -- errors that decide what follows


class FalseReportError(IntegrityError):
    """A rank's report and its weights differ."""


class ServerAwayError(RetryableError):
    """Nothing listens at the server's address, so the engine that held a version has ended: its successor begins with
    other weights.
    """


class StillRunningError(RetryableError):
    """Running requests did not end in time; the engine was left at its old version."""
