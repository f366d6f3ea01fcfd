"""Instructions from ``install_machine`` to its shell, their answers, and the contents of the ranks' reports."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal, NamedTuple

from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import IntegrityError, LocalError, RetryableError
from p2pcast.ground.version import Version

Report = Mapping[str, Any]
"""A rank's report, as built by ``in_engine.rank_installer``."""
Phase = Literal["prepare", "commit", "abort", "audit"]


class Act(Enum):
    """Instructions without arguments. Unless an answer is given below, it is None."""

    READ_LABEL = auto()
    """Answer: the version that the server includes in its answers."""
    ASK_PAUSED = auto()
    """Answer: whether the engine is paused, no matter by whom."""
    COUNT_TOKENS = auto()
    """Answer: tokens in running requests' cache blocks; None if unknown."""
    BEGIN = auto()
    """Open the server's command session."""
    FINISH = auto()
    """Make a commit permanent, and close the session."""
    DRAIN = auto()
    """Hold new requests until the running ones have finished. Raises StillRunningError."""
    RESUME = auto()
    CLEAR_CACHES = auto()


@dataclass(frozen=True, slots=True)
class Meet:
    """Count the server's ranks, and introduce this peer to them. Answer: ``Met``."""


class Met(NamedTuple):
    """``ranks``: number of ranks that report to this peer."""

    reports: list[Report]
    ranks: int


@dataclass(frozen=True, slots=True)
class Introduce:
    """Introduce this peer to the ranks. Answer: one report per rank. ``pausing``: the ranks note that this peer is
    about to pause the engine. ``forget``: they report no version until the next install.
    """

    pausing: bool = False
    forget: bool = False


@dataclass(frozen=True, slots=True)
class RankCommand:
    """Send a command to the ranks. Answer: one report per rank. ``dense``: the command writes the whole state, which
    may take long. ``whole``: prepare everything from the shadow, whatever the ranks hold.
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
    """Pause, commit and resume in one command. Answer: ``CoreAnswer``. ``ours``: whether the engine may be resumed."""

    version: Version
    marks: Mapping[int, int]
    clear_cache: bool
    ours: bool
    dense: bool


class CoreAnswer(NamedTuple):
    """The ranks' reports, and the engine core's own (``core``). ``deadline_s``: time that the core was given."""

    reports: Sequence[Report]
    core: Mapping[str, Any]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Compare:
    """Compare the ranks' digests with a version's. Answer: the names of wrong tensors and of unknown tensors."""

    layout: Layout
    entries: Sequence[Any]
    digests: Mapping[int, int]


Instruction = Act | Meet | Introduce | RankCommand | Pause | SetLabel | CoreSwitch | Compare


# -- reports


def raise_first(name: str, reports: Sequence[Report], phase: str) -> None:
    """Raise the first error that a rank reports, as the kind of error named in its report."""
    for report in reports:
        if report["error"] is not None:
            kind = report.get("kind")
            make = next((k for k in (IntegrityError, RetryableError) if k.wire_code == kind), LocalError)
            raise make(f"{name}: rank {report['rank']}, {phase}: {report['error']}")


def common_version(reports: Collection[Report], key: str = "held") -> Version | None:
    """The version that every rank holds, if it is the same. With the key ``before``: held when the layout changed."""
    held = {r.get(key) for r in reports}
    found = held.pop() if len(held) == 1 else None
    return Version.parse(found) if found else None
