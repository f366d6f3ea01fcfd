"""Decides which pieces to request from which source when artifacts are pulled from several nodes. Pure: events and
times go in, instructions come out.

Promises:
- A piece is requested from one source at a time, and only from a source that has it.
- The rarest pieces are requested first, from the source that will finish soonest.
- A source's window of outstanding pieces follows its rate. A lost source's outstanding pieces are free at once.
- When nothing is left to request, a slow source is asked to give back unsent pieces. Only pieces that it gives back are
  requested from a different source, so nothing arrives twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from p2pcast.artifact.piece_set import indices_of, ranges_of
from p2pcast.ground import limits
from p2pcast.relay.tuning import (
    PULL_LATE_S,
    PULL_STALL_S,
    PULL_WINDOW_LEAST_BYTES,
    PULL_WINDOW_LEAST_PIECES,
    PULL_WINDOW_MOST_BYTES,
    PULL_WINDOW_S,
    RATE_WINDOW_S,
)

Source = bytes
"""A node."""
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RequestPieces:
    """``pieces``: ranges, as on the wire; ``seal``: also the directory."""

    source: Source
    artifact: bytes
    pieces: list[int]
    seal: bool = False


@dataclass(frozen=True, slots=True)
class CancelPieces:
    source: Source
    artifact: bytes
    pieces: list[int]


@dataclass(frozen=True, slots=True)
class LeaveParent:
    source: Source
    why: str


Instruction = RequestPieces | CancelPieces | LeaveParent


@dataclass(slots=True)
class _Pulled:
    begin: float
    """Where to begin, from 0 to 1, so that nodes take different ones of equally rare pieces."""
    free: Mask = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Pieces that are neither held nor asked for."""
    rarity: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Piece -> number of sources that have it."""
    piece_bytes: int = 0
    known: bool = False
    """The directory is here, and the fields above are set."""
    sealing: Source | None = None
    """The source that was asked for the directory."""


@dataclass(slots=True)
class _Source:
    last_received_s: float
    """When the source last sent anything, or got a request while it owed nothing."""
    measured_s: float
    has: dict[bytes, Mask] = field(default_factory=dict)
    early: dict[bytes, list[int]] = field(default_factory=dict)
    """Artifact -> announced ranges, while its number of pieces is unknown."""
    sealed: set[bytes] = field(default_factory=set)
    asked: dict[tuple[bytes, int], int] = field(default_factory=dict)
    """(artifact, piece) -> bytes, in the order of asking."""
    asked_bytes: int = 0
    bytes_s: float = 0.0
    received_bytes: int = 0
    """Since ``measured_s``."""
    cancelled_s: float | None = None

    def window_bytes(self, piece_bytes: int) -> float:
        least = max(PULL_WINDOW_LEAST_BYTES, PULL_WINDOW_LEAST_PIECES * piece_bytes)
        return min(PULL_WINDOW_MOST_BYTES, max(least, self.bytes_s * PULL_WINDOW_S))

    def done_in_s(self, more_bytes: int = 0) -> float:
        """Return the seconds until the source has sent everything requested from it."""
        return (self.asked_bytes + more_bytes) / max(self.bytes_s, 1.0)


class PullSchedule:
    """Artifacts are pulled in the order of ``want``: a later artifact gets the capacity that earlier ones leave."""

    def __init__(self) -> None:
        self._pulled: dict[bytes, _Pulled] = {}
        self._sources: dict[Source, _Source] = {}

    # -- what is pulled

    def want(self, artifact: bytes, begin: float = 0.0) -> None:
        """``begin``: share of the whole at which to begin, from 0 to 1."""
        self._pulled.setdefault(artifact, _Pulled(begin))

    def directory(self, artifact: bytes, pieces: int, piece_bytes: int, held: Iterable[int]) -> None:
        """Note that the directory has arrived. ``held``: pieces that are already here."""
        pulled = self._pulled[artifact]
        if pulled.known:
            return
        pulled.known, pulled.sealing, pulled.piece_bytes = True, None, piece_bytes
        pulled.free = np.ones(pieces, np.bool_)
        pulled.free[np.fromiter(held, np.int64)] = False
        pulled.rarity = np.zeros(pieces, np.int32)
        for source in self._sources.values():
            source.has[artifact] = np.zeros(pieces, np.bool_)
            self._add(pulled, source, artifact, source.early.pop(artifact, []))

    def done(self, artifact: bytes) -> None:
        """Forget an artifact that is complete or no longer wanted."""
        self._pulled.pop(artifact, None)
        for source in self._sources.values():
            for key in [key for key in source.asked if key[0] == artifact]:
                source.asked_bytes -= source.asked.pop(key)
            source.has.pop(artifact, None)
            source.early.pop(artifact, None)
            source.sealed.discard(artifact)

    # -- what sources say

    def found(self, source: Source, now_s: float) -> None:
        self._sources[source] = _Source(now_s, now_s)

    def holds(self, source: Source, artifact: bytes, pieces: Sequence[int], *, sealed: bool) -> None:
        """``pieces``: ranges, in addition to earlier ones. ``sealed``: the source has the whole directory."""
        pulled, one = self._pulled.get(artifact), self._sources.get(source)
        if pulled is None or one is None:
            return
        if sealed:
            one.sealed.add(artifact)
        if pulled.known:
            self._add(pulled, one, artifact, pieces)
        elif len(early := one.early.setdefault(artifact, [])) < limits.MAX_RANGES:
            early.extend(pieces)

    @staticmethod
    def _add(pulled: _Pulled, source: _Source, artifact: bytes, pieces: Sequence[int]) -> None:
        has = source.has.setdefault(artifact, np.zeros(len(pulled.free), np.bool_))
        for start, end in zip(pieces[::2], pieces[1::2], strict=True):
            fresh = ~has[start:end]
            pulled.rarity[start:end] += fresh
            has[start:end] = True

    def received(self, source: Source, size: int, now_s: float) -> None:
        """``size`` bytes of pieces have come from the source."""
        one = self._sources.get(source)
        if one is not None:
            one.last_received_s = now_s
            one.received_bytes += size

    def got(self, source: Source, artifact: bytes, piece: int) -> None:
        """Note that a piece from the source has arrived and matched its hash."""
        if (one := self._sources.get(source)) is not None and (
            size := one.asked.pop((artifact, piece), None)
        ) is not None:
            one.asked_bytes -= size

    def cancelled(self, source: Source, artifact: bytes, pieces: Sequence[int]) -> None:
        """The source will not send these pieces: they were cancelled, or the source does not have them after all."""
        one = self._sources.get(source)
        if one is None:
            return
        if one.cancelled_s is None:
            self.refused(source, artifact, pieces)
        one.cancelled_s = None
        pulled = self._pulled.get(artifact)
        for piece in indices_of(pieces, limits.MAX_REQUESTED):
            if (size := one.asked.pop((artifact, piece), None)) is not None:
                one.asked_bytes -= size
                if pulled is not None:
                    pulled.free[piece] = True

    def refused(self, source: Source, artifact: bytes, pieces: Sequence[int]) -> None:
        """Note that the source does not have these pieces after all."""
        one, pulled = self._sources.get(source), self._pulled.get(artifact)
        if one is not None and pulled is not None and (has := one.has.get(artifact)) is not None:
            for piece in indices_of(pieces, len(has)):
                pulled.rarity[piece] -= has[piece]
                has[piece] = False

    def lost(self, source: Source) -> None:
        """Forget a source whose link has ended; its outstanding pieces are free again."""
        one = self._sources.pop(source, None)
        if one is None:
            return
        for artifact, piece in one.asked:
            if (pulled := self._pulled.get(artifact)) is not None:
                pulled.free[piece] = True
        for artifact, has in one.has.items():
            if (pulled := self._pulled.get(artifact)) is not None:
                pulled.rarity -= has
        for pulled in self._pulled.values():
            if pulled.sealing == source:
                pulled.sealing = None

    # -- questions

    def expects(self, source: Source, artifact: bytes, piece: int) -> bool:
        """Whether the source was asked for this piece and has not sent it."""
        return (one := self._sources.get(source)) is not None and (artifact, piece) in one.asked

    def owes(self, source: Source) -> bool:
        one = self._sources.get(source)
        return one is not None and (bool(one.asked) or any(p.sealing == source for p in self._pulled.values()))

    def whole(self, artifact: bytes) -> bool:
        """Whether the sources together have all missing pieces."""
        pulled = self._pulled.get(artifact)
        if pulled is None or not pulled.known:
            return any(artifact in one.sealed for one in self._sources.values())
        return not bool((pulled.free & (pulled.rarity <= 0)).any())

    def asked(self, artifact: bytes) -> bool:
        """Whether any part of the artifact has been requested and may arrive."""
        pulled = self._pulled.get(artifact)
        return pulled is not None and (
            pulled.sealing is not None or any(key[0] == artifact for one in self._sources.values() for key in one.asked)
        )

    # -- deciding

    def decide(self, now_s: float) -> list[Instruction]:
        """Return instructions, which must be carried out in order."""
        out: list[Instruction] = []
        for source, one in self._sources.items():
            self._measure(one, now_s)
            if self.owes(source) and now_s - one.last_received_s > PULL_STALL_S:
                out.append(LeaveParent(source, f"sent nothing of what it was asked for in {PULL_STALL_S:.0f} s"))
            elif one.cancelled_s is not None and now_s - one.cancelled_s > PULL_STALL_S:
                out.append(LeaveParent(source, f"did not say in {PULL_STALL_S:.0f} s what it has not sent"))
        for instruction in out:
            self.lost(instruction.source)
        out += self._directories(now_s)
        asked: dict[tuple[Source, bytes], list[int]] = {}
        while (pick := self._pick()) is not None:
            source, artifact, pieces = pick
            one, pulled = self._sources[source], self._pulled[artifact]
            if not one.asked:
                one.last_received_s = now_s
            pulled.free[pieces] = False
            for piece in pieces:
                one.asked[artifact, piece] = pulled.piece_bytes
            one.asked_bytes += len(pieces) * pulled.piece_bytes
            asked.setdefault((source, artifact), []).extend(pieces)
        out += [
            RequestPieces(source, artifact, ranges_of(sorted(pieces))) for (source, artifact), pieces in asked.items()
        ]
        return out + self._cancels(now_s)

    @staticmethod
    def _measure(one: _Source, now_s: float) -> None:
        passed_s = now_s - one.measured_s
        if passed_s >= RATE_WINDOW_S:
            bytes_s = one.received_bytes / passed_s
            if one.asked or one.received_bytes:
                one.bytes_s = bytes_s if not one.bytes_s else 0.5 * one.bytes_s + 0.5 * bytes_s
            one.measured_s, one.received_bytes = now_s, 0

    def _directories(self, now_s: float) -> list[Instruction]:
        """Request each unknown directory from the source that will finish soonest."""
        out: list[Instruction] = []
        for artifact, pulled in self._pulled.items():
            if pulled.known or pulled.sealing is not None:
                continue
            able = [(one.done_in_s(), source) for source, one in self._sources.items() if artifact in one.sealed]
            if able:
                _, source = min(able)
                pulled.sealing = source
                self._sources[source].last_received_s = now_s
                out.append(RequestPieces(source, artifact, [], seal=True))
        return out

    def _pick(self) -> tuple[Source, bytes, list[int]] | None:
        """Return the source to ask next, and the pieces to request."""
        ranked = sorted(self._sources.items(), key=lambda item: (item[1].done_in_s(), item[0]))
        for source, one in ranked:
            for artifact, pulled in self._pulled.items():
                if not pulled.known:
                    continue
                window = one.window_bytes(pulled.piece_bytes)
                room = int((window - one.asked_bytes) // pulled.piece_bytes)
                # A quarter of the window at a time: sources take turns, and asking does not cost more than sending.
                run = max(1, int(window / pulled.piece_bytes) // 4)
                if room >= min(run, 2) and (pieces := self._rarest(one, artifact, pulled, min(run, room))):
                    return source, artifact, pieces
        return None

    @staticmethod
    def _rarest(one: _Source, artifact: bytes, pulled: _Pulled, most: int) -> list[int]:
        """The rarest free pieces that the source has, from the artifact's beginning point on."""
        has = one.has.get(artifact)
        if has is None:
            return []
        able = np.flatnonzero(has & pulled.free)
        if not len(able):
            return []
        rarity = pulled.rarity[able]
        rarest = able[rarity == rarity.min()]
        at = int(np.searchsorted(rarest, int(pulled.begin * len(pulled.free))))
        return [int(piece) for piece in np.concatenate([rarest[at:], rarest[:at]])[:most]]

    def _cancels(self, now_s: float) -> list[Instruction]:
        """Near the end, cancel pieces at a slow source that an idle source could send sooner."""
        idle = [one for one in self._sources.values() if not one.asked and one.bytes_s]
        out: list[Instruction] = []
        for source, one in self._sources.items():
            if one.cancelled_s is not None or len(one.asked) < 2 or one.done_in_s() < PULL_LATE_S:
                continue
            for artifact, pulled in self._pulled.items():
                owed = [piece for key, piece in one.asked if key == artifact]
                sooner = [i for i in idle if i.done_in_s(pulled.piece_bytes) * 2 < one.done_in_s()]
                masks = [has for i in sooner if (has := i.has.get(artifact)) is not None]
                able = [piece for piece in owed[1:] if any(has[piece] for has in masks)]
                if able:
                    one.cancelled_s = now_s
                    out.append(CancelPieces(source, artifact, ranges_of(sorted(able))))
                    break
        return out
