"""Handles the messages of a trainer's ranks (docs/formats/wire-protocol.md, section 6).

``RankGroup`` knows which ranks there are and which version each has begun. ``RankParts`` keeps the parts of one version
until every rank has passed their cells.

Guarantees: a cell is handed on once, whole, in ascending order, and only when no rank can send more of it. Parts that
overlap, are out of range, or come late or twice are refused with the ranks' names, in whatever order messages arrive.
If ranks disagree, one error lists the terms of each. Pure: no I/O, no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heappop, heappush

from p2pcast.artifact.signed_records import RAW, path_fault, payload_fits
from p2pcast.codec.join_parts import CellPart, within
from p2pcast.codec.layout import Cell, Layout
from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.sparse.budget_schedule import check_schedule
from p2pcast.wire import messages


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a BEGIN."""

    serial: int
    step: int
    layout: bytes
    resume: bool

    @classmethod
    def of(cls, body: messages.Begin) -> Terms:
        return cls(body.serial, body.step, body.layout, body.resume)

    def __str__(self) -> str:
        return (
            f"serial {self.serial}, step {self.step}, layout {self.layout.hex()[:8]}{', resume' if self.resume else ''}"
        )


class Disagreement(RemoteError):
    """Ranks of one group have sent different terms."""


class RankGroup:
    """The ranks of one publisher. ``ident``: the group's id, the same at all ranks. ``ranks``: their number."""

    def __init__(self, ident: bytes, ranks: int) -> None:
        self.ident = ident
        self.ranks = ranks
        self.present: set[int] = set()
        self.over = -1
        """The last serial that is over. Messages of this serial or an earlier one are late, and ignored."""
        self.terms: Terms | None = None
        """The terms of the version that all ranks have begun."""
        self.parts: RankParts | None = None
        """The version's parts, once it was BEGUN."""
        self._terms_by_rank: dict[int, Terms] = {}

    @property
    def complete(self) -> bool:
        return len(self.present) == self.ranks

    def name(self, rank: int) -> str:
        return f"rank {rank} of {self.ranks}"

    def enter(self, rank: int, ranks: int) -> None:
        """Handle a RANK. Raises RemoteError."""
        if ranks != self.ranks or rank >= ranks:
            raise RemoteError(
                f"rank {rank} of {ranks} does not fit a group of {self.ranks}: start all ranks with one world size"
            )
        if rank in self.present:
            raise RemoteError(f"{self.name(rank)} is here already: each rank has a number of its own")
        self.present.add(rank)

    def begin(self, rank: int, terms: Terms) -> bool:
        """Handle a BEGIN that is not late. Returns True once every rank has sent the same terms. Raises Disagreement if
        all ranks have sent a BEGIN and the terms differ, and RemoteError for a BEGIN out of place.
        """
        if not self.complete or self.terms is not None or rank in self._terms_by_rank:
            raise RemoteError(f"{self.name(rank)}: BEGIN of serial {terms.serial} while the one before is not over")
        self._terms_by_rank[rank] = terms
        if len(self._terms_by_rank) < self.ranks:
            return False
        if len(set(self._terms_by_rank.values())) > 1:
            raise Disagreement(f"the ranks do not agree: {self._each()}")
        self.terms = terms
        return True

    def _each(self) -> str:
        """Describe the terms of each rank, with ranks that sent the same terms grouped together."""
        same: dict[Terms, list[int]] = {}
        for rank, terms in sorted(self._terms_by_rank.items()):
            same.setdefault(terms, []).append(rank)
        return "; ".join(f"{_row(ranks)} said {terms}" for terms, ranks in same.items())

    @property
    def silent(self) -> list[int]:
        """The ranks that the others wait for: those that are missing, or that have not begun the others' version."""
        if not self.complete:
            return [rank for rank in range(self.ranks) if rank not in self.present]
        begun = self._terms_by_rank and self.terms is None
        return [rank for rank in range(self.ranks) if rank not in self._terms_by_rank] if begun else []

    def names(self, ranks: list[int]) -> str:
        """Return text such as ``ranks 0-6, 9 of 16``."""
        return f"{_row(ranks)} of {self.ranks}"

    def terms_of(self, rank: int) -> Terms | None:
        """The terms of the rank's BEGIN, until that version is over."""
        return self._terms_by_rank.get(rank)

    def late(self, serial: int) -> bool:
        return serial <= self.over

    def begun(self, layout: Layout, *, whole: bool) -> RankParts:
        """Open the version, so that parts may come. ``whole``: every word must come, since there is no base."""
        self.parts = RankParts(layout, self.ranks, whole=whole)
        return self.parts

    def receiving(self, serial: int, what: str) -> RankParts:
        """Return the parts to which a message of ``serial`` belongs. Raises RemoteError for a message out of place."""
        if self.parts is None or self.terms is None or self.terms.serial != serial:
            raise RemoteError(f"{what} of serial {serial}, which was not BEGUN")
        return self.parts

    def end(self, serial: int | None = None) -> int:
        """Close the version that was begun, or ``serial``. Returns the last serial that is now over."""
        said = [t.serial for t in self._terms_by_rank.values()]
        self.over = max(self.over, *said, self.over if serial is None else serial)
        self.terms = self.parts = None
        self._terms_by_rank.clear()
        return self.over


def _row(ranks: list[int]) -> str:
    """Return text such as ``rank 3`` or ``ranks 0-6, 9``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


@dataclass(slots=True)
class Complete:
    """A cell that no rank can add to any more."""

    cell: Cell
    parts: list[CellPart]
    bytes: int
    """Bytes of the parts' payloads."""


@dataclass(slots=True)
class _Rank:
    passed: int = 0
    """The rank sends no more parts of cells below this number."""
    parts: int = 0
    done: bool = False


@dataclass(slots=True)
class _Open:
    """A cell that may still receive parts; ``parts`` are sorted by start."""

    parts: list[CellPart] = field(default_factory=list)
    bytes: int = 0
    words: int = 0


class RankParts:
    """The parts of one version. Methods that take a message raise RemoteError, which makes the version fail."""

    def __init__(self, layout: Layout, ranks: int, *, whole: bool) -> None:
        self.layout = layout
        self.whole = whole
        self.waiting_bytes = 0
        """Bytes of payloads of cells that are not complete."""
        self.files: dict[str, bytes] | None = None
        """The version's small files, if rank 0 sent any."""
        self._files_bytes = 0
        self._ranks = [_Rank() for _ in range(ranks)]
        self._low = 0
        self._at_low = ranks
        self._open: dict[int, _Open] = {}
        self._order: list[int] = []
        """Heap of the open cells' numbers."""
        self._taken = 0
        """All cells below this number have been handed on."""

    # -- messages from ranks

    def add(self, rank: int, body: messages.Cell) -> None:
        """Handle a CELL."""
        who = self._name(rank)
        cell = self._cell(rank, body.cell)
        start, words = body.start, body.words
        where = f"{who}: cell {cell.index}, words {start} to {start + words}"
        if start + words > cell.words:
            raise RemoteError(f"{where}: the cell has {cell.words}")
        part = CellPart(start, words, body.codec, body.payload, body.before, body.after, who)
        stated = part.before is None
        if self.whole and not stated:
            raise RemoteError(f"{where}: a change, where there is nothing that it could change")
        if (stated and part.codec != RAW) or not payload_fits(
            part.codec, len(part.payload), within(cell, start, words).nbytes
        ):
            raise RemoteError(
                f"{where}: payload of {len(part.payload)} bytes in codec {part.codec} can't be these words"
            )
        found = self._open.get(cell.index)
        if found is None:
            found = self._open[cell.index] = _Open()
            heappush(self._order, cell.index)
        at = bisect_left(found.parts, start, key=lambda p: p.start)
        for other in found.parts[max(0, at - 1) : at + 1]:
            if other.start < part.end and start < other.end:
                raise RemoteError(f"{where}: {other.sender} sent words {other.start} to {other.end} already")
        if len(found.parts) == limits.MAX_CELL_PARTS:
            raise RemoteError(f"{where}: that is more than {limits.MAX_CELL_PARTS} parts of one cell")
        found.parts.insert(at, part)
        found.words += words
        found.bytes += len(part.payload)
        self.waiting_bytes += len(part.payload)
        self._ranks[rank].parts += 1
        self._pass(rank, cell.index)

    def passed(self, rank: int, cell: int) -> None:
        """Handle a PASSED."""
        if cell > len(self.layout.cells) or cell < self._speaking(rank).passed:
            raise RemoteError(
                f"{self._name(rank)}: PASSED {cell} of {len(self.layout.cells)} after {self._ranks[rank].passed}"
            )
        self._pass(rank, cell)

    def file(self, rank: int, path: str, contents: bytes) -> None:
        """Handle a FILE."""
        self._speaking(rank)
        where = f"{self._name(rank)}: small file"
        if rank != 0:
            raise RemoteError(f"{where} {path!r}: rank 0 sends them")
        if fault := path_fault(path):
            raise RemoteError(f"{where} {fault}")
        try:
            check_schedule({path: contents})
        except UsageError as error:
            raise RemoteError(f"{where} {path!r}: {error}") from None
        files = self.files = self.files or {}
        above = {"/".join(path.split("/")[:n]) for n in range(1, path.count("/") + 1)}
        if path in files or above & files.keys() or any(known.startswith(f"{path}/") for known in files):
            raise RemoteError(f"{where} {path!r}: sent before, or lies below another file")
        self._files_bytes += len(contents)
        if len(files) == limits.MAX_FILES or self._files_bytes > limits.MAX_FILES_BYTES:
            raise RemoteError(f"{where} {path!r}: one too many, or too many bytes together")
        files[path] = contents

    def done(self, rank: int, parts: int) -> None:
        """Handle a DONE."""
        speaker = self._speaking(rank)
        if parts != speaker.parts:
            raise RemoteError(f"{self._name(rank)} says that it sent {parts} parts, {speaker.parts} came")
        speaker.done = True
        self._pass(rank, len(self.layout.cells))

    # -- results

    def progress(self, rank: int) -> tuple[int, int, bool]:
        """A rank's progress, which every message that advances the version changes."""
        one = self._ranks[rank]
        return one.passed, one.parts, one.done

    @property
    def ended(self) -> bool:
        """Whether every rank has sent DONE. Cells may be left to take, but no more parts will come."""
        return all(rank.done for rank in self._ranks)

    @property
    def behind(self) -> list[int]:
        """The ranks that the others wait for."""
        return [number for number, rank in enumerate(self._ranks) if rank.passed == self._low and not rank.done]

    def take(self) -> list[Complete]:
        """Return the newly complete cells, ascending. With ``whole``, raises RemoteError unless each is covered."""
        out: list[Complete] = []
        while self._order and self._order[0] < self._low:
            index = heappop(self._order)
            found = self._open.pop(index)
            cell = self.layout.cells[index]
            if self.whole:
                self._check_covered(index, found.words)
            self._taken = index + 1
            self.waiting_bytes -= found.bytes
            out.append(Complete(cell, found.parts, found.bytes))
        if self.whole:
            self._check_covered(self._low, 0)
        self._taken = self._low
        return out

    def _check_covered(self, upto: int, words: int) -> None:
        """Raises RemoteError if a cell from ``_taken`` to ``upto`` is missing or, for ``upto``, short of words."""
        cells = self.layout.cells
        missing = next(iter(range(self._taken, upto)), None)
        if missing is None and upto < self._low and words < cells[upto].words:
            missing = upto
        if missing is not None:
            came = words if missing == upto else 0
            name = self.layout.tensors[cells[missing].tensor].name
            raise RemoteError(
                f"cell {missing} ({name}): {came} of its {cells[missing].words} words came from all ranks together; "
                "each element must have one owner"
            )

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self._ranks)}"

    def _speaking(self, rank: int) -> _Rank:
        speaker = self._ranks[rank]
        if speaker.done:
            raise RemoteError(f"{self._name(rank)} sends more after its DONE")
        return speaker

    def _cell(self, rank: int, index: int) -> Cell:
        passed = self._speaking(rank).passed
        if index >= len(self.layout.cells):
            raise RemoteError(f"{self._name(rank)}: cell {index} is not one of the layout's {len(self.layout.cells)}")
        if index < passed:
            raise RemoteError(
                f"{self._name(rank)}: cell {index} comes late: the rank has passed all cells below {passed}"
            )
        return self.layout.cells[index]

    def _pass(self, rank: int, cell: int) -> None:
        speaker = self._ranks[rank]
        if cell == speaker.passed:
            return
        self._at_low -= speaker.passed == self._low
        speaker.passed = cell
        if not self._at_low:
            # Every rank has advanced since this was last computed, so the cost is bounded by the number of messages.
            self._low = min(r.passed for r in self._ranks)
            self._at_low = sum(r.passed == self._low for r in self._ranks)
