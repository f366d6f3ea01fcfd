"""Decides which squashes to prepare for late peers: the ladder (design, section 5). Pure.

A rung of size r is the squash of r consecutive deltas. Rungs of one size follow each other without gaps. Rungs of the
next size begin and end where smaller ones do, and are made from these. So a peer that is many versions behind fetches a
few artifacts of each size, and receives a word that changed in several of a squash's deltas only once.
``relay.artifact_path`` finds this path without knowing the ladder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version

RUNGS = (4, 16, 64)
"""Deltas per squash: ascending, each a multiple of the previous one. For the reasons, see
docs/design/decisions/squashes.md.
"""

Span = tuple[Version, Version]
"""A delta's base and version."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A squash to make. ``parts``, oldest first, are deltas of the path, and squashes that exist or precede it in the
    result.
    """

    base: Version
    version: Version
    parts: tuple[Span, ...]


def missing_rungs(path: Sequence[Version], made: Iterable[Span], rungs: Sequence[int] = RUNGS) -> list[Rung]:
    """Return the ladder's missing rungs, in an order in which they can be made.

    ``path``: versions, oldest first, each the base of the delta to the next. ``made``: the existing squashes; those not
    on the path are ignored. New rungs start where the last rung of their size on the path ends, so rungs do not shift
    when the path loses its oldest versions. Raises UsageError for rungs that do not nest.
    """
    if any(r < 2 for r in rungs) or any(b % a or a == b for a, b in pairwise(rungs)):
        raise UsageError(
            f"rungs of {list(rungs)} do not nest: each must be a multiple of the previous one, the first at least 2"
        )
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
    """Return steps from ``start`` to ``stop``, always taking the longest one that exists."""
    parts: list[tuple[int, int]] = []
    while start < stop:
        end = max((e for b, e in spans if b == start and e <= stop), default=start + 1)
        parts.append((start, end))
        start = end
    return parts
