"""Which squashes to keep ready for late peers: the ladder (design, section 5). Pure.

A rung of r is the squash of r consecutive deltas. Rungs of one size lie end to end; those of the next size begin and end where the smaller ones do and
are made of them. So a peer that is d versions behind takes a few artifacts of each size, and a word that changed in several of the deltas is sent once.
``relay.catchup`` finds that way by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2pcast.errors import UsageError
from p2pcast.version import Version

RUNGS = (4, 16, 64)
"""Deltas a squash; ascending, each a multiple of the one before. Why these: docs/measurements.md."""

Span = tuple[Version, Version]
"""Base and version of a delta."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A squash to be made. ``parts``: what of, oldest first; deltas of the path, and squashes that are there or due before this one."""

    base: Version
    version: Version
    parts: tuple[Span, ...]


def due(path: Sequence[Version], made: Iterable[Span], rungs: Sequence[int] = RUNGS) -> list[Rung]:
    """What the ladder lacks, in the order in which it can be made.

    ``path``: versions, oldest first, each the base of the delta to the next. ``made``: the squashes that there are; what does not lie on the path
    is passed over. Rungs go on where the last one of their size that the path still holds ends, so they stay in place while it loses its oldest versions.
    Raises UsageError for rungs that do not nest.
    """
    if any(r < 2 for r in rungs) or any(b % a or a == b for a, b in pairwise(rungs)):
        raise UsageError(f"rungs of {list(rungs)} do not nest: each has to be a multiple of the one before, the first at least 2")
    at = {version: number for number, version in enumerate(path)}
    spans = {(at[base], at[version]) for base, version in made if base in at and version in at}
    out: list[Rung] = []
    smaller = 0
    for rung in rungs:
        first = min((b for b, e in spans if e - b == smaller), default=0)
        begin = max((e for b, e in spans if e - b == rung), default=first)
        for start in range(begin, len(path) - rung, rung):
            parts = tuple((path[b], path[e]) for b, e in _parts(start, start + rung, spans))
            out.append(Rung(path[start], path[start + rung], parts))
            spans.add((start, start + rung))
        smaller = rung
    return out


def _parts(start: int, stop: int, spans: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """From ``start`` to ``stop`` by the longest steps that there are."""
    parts: list[tuple[int, int]] = []
    while start < stop:
        end = max((e for b, e in spans if b == start and e <= stop), default=start + 1)
        parts.append((start, end))
        start = end
    return parts
