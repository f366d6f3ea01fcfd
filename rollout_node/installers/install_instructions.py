"""Instructions of ``install_machine`` to its shell, their answers, and what the ranks' reports say."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal, NamedTuple

from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import IntegrityError, LocalError, RetryableError
from p2pcast.ground.version import Version

Report = Mapping[str, Any]
"""Of a rank: ``in_engine.rank_installer``."""
Phase = Literal["prepare", "commit", "abort", "audit"]


class Act(Enum):
    """Instructions without arguments. Their answers are None, except where stated."""

    READ_LABEL = auto()
    """Answer: the version that the server names in its answers."""
    ASK_PAUSED = auto()
    """Answer: whether the engine is paused, by anyone."""
    COUNT_TOKENS = auto()
    """Answer: tokens in the cache blocks of running requests; None if not known."""
    BEGIN = auto()
    """Open the server's session of commands."""
    FINISH = auto()
    """Make a commit permanent, and close the session."""
    DRAIN = auto()
    """Hold new requests until the running ones have ended. Raises StillRunningError."""
    RESUME = auto()
    CLEAR_CACHES = auto()


@dataclass(frozen=True, slots=True)
class Meet:
    """Count the server's workers, and introduce this peer to them. Answer: ``Met``."""


class Met(NamedTuple):
    """``ranks``: number of workers that report to this peer."""

    reports: list[Report]
    ranks: int


@dataclass(frozen=True, slots=True)
class Introduce:
    """Answer: a report of each rank. ``pausing``: the ranks note that this peer is about to pause the engine.
    ``forget``: they name no version until the next install.
    """

    pausing: bool = False
    forget: bool = False


@dataclass(frozen=True, slots=True)
class RankCommand:
    """Answer: a report of each rank. ``dense``: the command writes the whole state, so it may take long. ``whole``:
    prepare everything from the shadow, whatever is held.
    """

    phase: Phase
    version: Version
    dense: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Pause:
    clear_cache: bool


@dataclass(frozen=True, slots=True)
class SetLabel:
    version: Version


@dataclass(frozen=True, slots=True)
class CoreSwitch:
    """Pause, commit and resume by one command. Answer: ``CoreAnswer``. ``ours``: the engine may be resumed."""

    version: Version
    marks: Mapping[int, int]
    clear_cache: bool
    ours: bool
    dense: bool


class CoreAnswer(NamedTuple):
    """``core``: the engine core's own report. ``deadline_s``: time that the core had."""

    reports: Sequence[Report]
    core: Mapping[str, Any]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare the ranks' digests with a version's. Answer: names of wrong and of unknown tensors."""

    layout: Layout
    entries: Sequence[Any]
    digests: Mapping[int, int]


Instruction = Act | Meet | Introduce | RankCommand | Pause | SetLabel | CoreSwitch | Compare


# -- reports


def raise_first(name: str, reports: Sequence[Report], phase: str) -> None:
    """The first error that a rank reports, as the kind of error that the rank named."""
    for report in reports:
        if report["error"] is not None:
            kind = report.get("kind")
            make = next((k for k in (IntegrityError, RetryableError) if k.wire_code == kind), LocalError)
            raise make(f"{name}: rank {report['rank']}, {phase}: {report['error']}")


def common_version(reports: Collection[Report], key: str = "held") -> Version | None:
    """The one version that every rank holds. ``before`` as the key: that it held when the run's layout changed."""
    held = {r.get(key) for r in reports}
    found = held.pop() if len(held) == 1 else None
    return Version.parse(found) if found else None
