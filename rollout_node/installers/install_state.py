"""State of an engine's installer: everything it knows about its engine, and the table of how events change that.

Only ``install_machine.InstallMachine.note`` writes the state. ``validate`` checks the invariants.
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
"""A condition that a row does not list stays unchanged."""

NOTHING_STAGED: Final = (
    EngineEvent.LOST,
    EngineEvent.DOUBTED,
    EngineEvent.DROPPED,
    EngineEvent.COMMITTED,
    EngineEvent.FAILED,
)
"""Events after which no version is staged."""


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """``marks``: for each rank, the checksum of the values that it prepared. ``dense``: whether any rank writes the
    whole state. ``report``: the switch's report, if the engine already switched during staging.
    """

    version: Version
    marks: Mapping[int, int] = field(default_factory=dict)
    dense: bool = False
    report: CommitReport | None = None


@dataclass(frozen=True, slots=True)
class Traits:
    """The ranks' description of their engine. ``incarnations``: names of the ranks' processes. ``follows``: whether its
    attention follows the budget schedule of its version. ``lacks``: the run's adapters that it does not load.
    ``skipped``: the run's tensors that it leaves out without any effect (``in_engine.tensor_accounts``).
    """

    incarnations: Mapping[int, str] = field(default_factory=dict)
    ranks: int = 0
    follows: bool = False
    lacks: tuple[str, ...] = ()
    skipped: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class InstallState:
    """``committed``: the version in use. ``serving_epoch``: an id that changes with each write to the weights. If it is
    the same before and after a request, the version in use produced the whole answer. It is None while weights may be
    written, and with the safe point ``step``. ``pausing``: if the engine is paused, this peer paused it.
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
    """A rank's weights differ from its report."""


class ServerAwayError(RetryableError):
    """Nothing listens at the server's address, so the engine that held a version has exited: its successor starts with
    different weights.
    """


class StillRunningError(RetryableError):
    """Running requests did not finish in time; the engine keeps its old version."""
