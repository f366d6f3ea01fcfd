"""REPORT, whose values are read leniently: an invalid optional value is dropped, and the rest is kept.

Some of a report's values are sent from one release on and understood only from the next. An invalid value must not
close the link to the peer that sent it, nor reach the plan, /status or the metrics. So the reader drops such values,
and every key that this release does not know. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Required, TypeAlias, TypedDict

from p2pcast.ground import limits
from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from p2pcast.wire.constraints import (
    AtMost,
    Constraint,
    Flag,
    Integer,
    InvalidError,
    Nullable,
    OneOf,
    Read,
    Text,
    refuse,
)
from p2pcast.wire.field_types import (
    ArtifactId,
    CorruptSender,
    DurableRecord,
    Epoch,
    Host,
    Missing,
    Node,
    Size,
    Statement,
)
from p2pcast.wire.message_types import Type
from p2pcast.wire.records import ABSENT, Lenient, Record, message

MAX_PAUSE_S = 1e6
"""Longest valid pause in seconds, so that sums of pauses stay finite."""


@dataclass(frozen=True, slots=True)
class Number:
    """An integer or a finite float from 0 to ``most``."""

    most: float

    def reader(self) -> Read:
        most = self.most
        return lambda x: x if type(x) in (int, float) and math.isfinite(x) and 0 <= x <= most else refuse()


@dataclass(frozen=True, slots=True)
class VersionText:
    """``branch.step``."""

    def reader(self) -> Read:
        return lambda x: x if _is_version(x) else refuse()


def _is_valid(read: Read, x: Any) -> bool:
    try:
        read(x)
    except InvalidError:
        return False
    return True


def _is_version(x: Any) -> bool:
    try:
        return type(x) is str and "." in x and bool(Version.parse(x))
    except UsageError:
        return False


@dataclass(frozen=True, slots=True)
class Truncated:
    """A string, of which the first ``most`` characters are kept."""

    most: int

    def reader(self) -> Read:
        most = self.most
        return lambda x: x[:most] if type(x) is str else refuse()


@dataclass(frozen=True, slots=True)
class NameText:
    """A string of 1 to ``most`` characters."""

    most: int

    def reader(self) -> Read:
        most = self.most
        return lambda x: x if type(x) is str and 0 < len(x) <= most else refuse()


@dataclass(frozen=True, slots=True)
class PlainFigures:
    """An installer's own figures: of the first ``limits.MAX_DETAILS`` keys, valid ones with plain values."""

    def reader(self) -> Read:
        name = Text(limits.MAX_SPAN_NAME).reader()
        text = Text(limits.MAX_EVENT_TEXT).reader()
        figure = Number(2.0**62).reader()

        def is_plain(x: Any) -> bool:
            return x is None or type(x) is bool or _is_valid(figure, x) or _is_valid(text, x)

        def read(x: Any) -> Any:
            if type(x) is not dict:
                raise InvalidError
            first = list(x.items())[: limits.MAX_DETAILS]
            return {key: value for key, value in first if _is_valid(name, key) and is_plain(value)}

        return read


@dataclass(frozen=True, slots=True, eq=False)
class LenientTable:
    """A map, of which known keys with valid values are kept. Invalid unless these include all of ``needed``."""

    columns: Mapping[str, Constraint]
    needed: frozenset[str] = frozenset()

    def reader(self) -> Read:
        reads, needed = {key: of.reader() for key, of in self.columns.items()}, self.needed

        def read(x: Any) -> Any:
            if type(x) is not dict:
                raise InvalidError
            kept = {}
            for key, read_one in reads.items():
                if key in x:
                    with suppress(InvalidError):
                        kept[key] = read_one(x[key])
            return kept if kept.keys() >= needed else refuse()

        return read


@dataclass(frozen=True, slots=True)
class ValidRows:
    """An array: of its first ``most`` elements, the valid ones are kept."""

    of: Constraint
    most: int

    def reader(self) -> Read:
        read_row, most = self.of.reader(), self.most

        def read(x: Any) -> Any:
            if type(x) is not tuple:
                raise InvalidError
            kept = []
            for each in x[:most]:
                with suppress(InvalidError):
                    kept.append(read_row(each))
            return tuple(kept)

        return read


class EngineStatus(TypedDict, total=False):
    """One of the peer's engines. ``started``: the peer has reached it. ``ready``: it can serve requests, at version
    ``committed``. ``pause_s``, ``recomputed_tokens``: those of its last commit.
    """

    name: Required[str]
    started: bool
    ready: bool
    staged: str | None
    committed: str | None
    pause_s: float | None
    recomputed_tokens: int | None
    detail: dict[str, Any]
    waits_for: str | None
    error: str | None


class UnreadyReason(TypedDict):
    """Why the peer itself is not ready: a level of ``p2pcast.fleet_verdict``, and a message."""

    level: str
    words: str


class ParentLinkReport(TypedDict, total=False):
    """The link to the parent: which side dialled, and at which address."""

    dialled_by: str
    address: str


class Progress(TypedDict):
    """How many pieces of the version in transfer the peer has received."""

    version: str
    pieces: int
    of: int


_COUNT = Integer(0, 1 << 62)
_VERSION = Nullable(VersionText())
_ERROR = Truncated(limits.MAX_EVENT_TEXT)
_ENGINE = LenientTable(
    {
        "name": NameText(limits.MAX_ENGINE_NAME),
        "started": Flag(),
        "ready": Flag(),
        "staged": _VERSION,
        "committed": _VERSION,
        "pause_s": Nullable(Number(MAX_PAUSE_S)),
        "recomputed_tokens": Nullable(_COUNT),
        "detail": PlainFigures(),
        "waits_for": Nullable(Text(limits.MAX_SPAN_NAME)),
        "error": Nullable(_ERROR),
    },
    frozenset({"name"}),
)
_REASON = LenientTable({"level": OneOf(("moving", "watch", "alarm")), "words": _ERROR}, frozenset({"level", "words"}))
_LINK = LenientTable({"dialled_by": OneOf(("child", "parent")), "address": Truncated(limits.MAX_EVENT_TEXT)})
_PROGRESS = LenientTable(
    {"version": VersionText(), "pieces": _COUNT, "of": _COUNT}, frozenset({"version", "pieces", "of"})
)

Count: TypeAlias = Annotated[int, _COUNT]
Micros: TypeAlias = Annotated[int, Integer(1, 1 << 53)]


@message(Type.REPORT)
class Report(Record):
    """A peer's artifacts, progress and observations.

    ``transfer``: bytes and microseconds of a transfer that has just ended. ``inflow``: bytes and microseconds, and how
    many bytes the peer is behind its parent, during a transfer. ``held``, ``dropped``: artifacts that the peer now has,
    or no longer has. ``garbled``, ``lacking``: other nodes' faults. ``spoilt``: names of the mirror's invalid objects.
    """

    parent: Node | None
    staged: Version | None
    committed: Version | None
    evicted: Annotated[Sequence[Statement], AtMost(limits.MAX_RELAYED)] | None = None
    durable: Annotated[Sequence[DurableRecord], AtMost(limits.MAX_EVIDENCE)] | None = None
    opened: Annotated[Sequence[DurableRecord], AtMost(limits.MAX_EVIDENCE)] | None = None
    held: Annotated[Sequence[ArtifactId], AtMost(limits.MAX_HELD)] | None = None
    dropped: Annotated[Sequence[ArtifactId], AtMost(limits.MAX_HELD)] | None = None
    garbled: Annotated[Sequence[CorruptSender], AtMost(limits.MAX_CORRUPT_SENDERS)] | None = None
    lacking: Annotated[Sequence[Missing], AtMost(limits.MAX_MISSING)] | None = None
    spoilt: Annotated[Sequence[Annotated[str, Text(limits.MAX_OBJECT_NAME)]], AtMost(limits.MAX_BAD_OBJECTS)] | None = (
        None
    )
    epoch: Annotated[Epoch, Lenient()] | None = None
    transfer: Annotated[tuple[Size, Micros] | None, Lenient()] = ABSENT
    inflow: Annotated[tuple[Count, Micros, Count] | None, Lenient()] = ABSENT
    cores: Annotated[int, Integer(1, limits.MAX_CORES), Lenient()] | None = None
    http: Annotated[tuple[Host, Annotated[int, Integer(1, 65535)]], Lenient()] | None = None
    link: Annotated[ParentLinkReport | None, Nullable(_LINK), Lenient()] = ABSENT
    state: Annotated[str, Truncated(limits.MAX_SPAN_NAME), Lenient()] | None = None
    progress: Annotated[Progress | None, Nullable(_PROGRESS), Lenient()] = ABSENT
    bytes_received: Annotated[int, _COUNT, Lenient()] | None = None
    bytes_duplicate: Annotated[int, _COUNT, Lenient()] | None = None
    engines: Annotated[Sequence[EngineStatus], ValidRows(_ENGINE, limits.MAX_PEER_ENGINES), Lenient()] | None = None
    unready: Annotated[Sequence[UnreadyReason], ValidRows(_REASON, limits.MAX_REASONS), Lenient()] | None = None
    error: Annotated[str | None, Nullable(_ERROR), Lenient()] = ABSENT
