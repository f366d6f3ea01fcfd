"""Finds which artifacts a peer should stage, in order, to reach the newest version soonest. Pure: rates and the held
version are passed in.

An artifact's cost is its time: a fixed step, and the transfer of its missing bytes or staging's pass over the state,
whichever takes longer, since cells are decoded as they arrive. A path begins at the held version, or at nothing if its
first artifact is a whole state. A squash that the hub has promised is an artifact whose first byte arrives after
``wait_s``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from p2pcast.ground.version import Version
from p2pcast.relay.tuning import CATCH_UP_STEP_S


@dataclass(frozen=True, slots=True)
class Edge:
    """An artifact as a step from one version to another. ``base``: None for an anchor. ``bytes``: missing here."""

    artifact: bytes
    base: Version | None
    version: Version
    bytes: int
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PathRates:
    """This peer's rates. ``link_bps``: in bits per second. ``stage_bytes_s``, ``fill_bytes_s``: in bytes of the state
    per second, for staging a delta and a whole state.
    """

    link_bps: float = 100e6
    stage_bytes_s: float = 3.5e9
    fill_bytes_s: float = 1e9

    def seconds(self, edge: Edge, state_bytes: int) -> float:
        """Return the seconds that the shadow takes from the edge's base to its version."""
        work_s = state_bytes / (self.fill_bytes_s if edge.base is None else self.stage_bytes_s)
        return edge.wait_s + max(8 * edge.bytes / self.link_bps, work_s) + CATCH_UP_STEP_S


def cheapest_path(
    held: Version | None,
    edges: Iterable[Edge],
    *,
    cost: Callable[[Edge], float] = lambda edge: edge.bytes,
    target: Version | None = None,
) -> list[Edge]:
    """Return the artifacts to stage, in order, from ``held`` to ``target`` (None: the newest version that can be
    reached). Empty if the target is held already or cannot be reached.

    The path has the lowest ``cost`` (never negative), then the fewest artifacts. It may begin with an anchor.
    """
    by_base: dict[Version | None, list[Edge]] = {}
    newest = target
    for edge in edges:
        by_base.setdefault(edge.base, []).append(edge)
        if target is None and (newest is None or edge.version > newest):
            newest = edge.version
    best: dict[Version | None, tuple[float, int]] = {held: (0.0, 0)}
    via: dict[Version, Edge] = {}
    queue: list[tuple[float, int, tuple[int, int]]] = [(0.0, 0, held or (-1, -1))]
    anchors = by_base.get(None, [])
    while queue:
        spent, hops, at = heapq.heappop(queue)
        here = None if at == (-1, -1) else Version(*at)
        if best[here] < (spent, hops):
            continue
        if here is not None and here == newest:
            break  # Nothing newer can be reached, and the rest costs more.
        following = by_base.get(here, []) if here is not None else []
        for edge in [*following, *(anchors if here == held else [])]:
            reach = (spent + cost(edge), hops + 1)
            if edge.version != held and (edge.version not in best or reach < best[edge.version]):
                best[edge.version] = reach
                via[edge.version] = edge
                heapq.heappush(queue, (*reach, edge.version))
    end = max((v for v in best if v is not None), default=None) if target is None else target
    path: list[Edge] = []
    while end is not None and end != held:
        if end not in via:
            return []
        edge = via[end]
        path.append(edge)
        if edge.base is None:
            break
        end = edge.base
    return path[::-1]


@dataclass(frozen=True, slots=True)
class Gap:
    """No artifact leads to ``base``, and so none from ``held`` (None: from nothing) to ``version``, the first version
    that cannot be reached.
    """

    held: Version | None
    base: Version
    version: Version

    def __str__(self) -> str:
        begin = "nothing" if self.held is None else self.held
        return (
            f"no way leads from {begin} to {self.version}: every artifact that leads to {self.base}, the base of"
            f" {self.version}, is missing, and so is a newer whole state"
        )


def find_gap(held: Version | None, edges: Iterable[Edge]) -> Gap | None:
    """Return why the newest version cannot be reached from ``held``; None if it can be, or if nothing is newer."""
    ordered, reached = sorted(edges, key=lambda e: e.version), {held}
    for edge in ordered:  # A base is always older than its version.
        if edge.base is None or edge.base in reached:
            reached.add(edge.version)
    newer = [e for e in ordered if held is None or e.version > held]
    if not newer or newer[-1].version in reached:
        return None
    first = next(e.version for e in newer if e.version not in reached)
    return Gap(held, max(e.base for e in newer if e.version == first and e.base is not None), first)


def seconds(path: Iterable[Edge], rates: PathRates, state_bytes: int) -> float:
    """Return the seconds that a path takes, one artifact after the other."""
    return sum(rates.seconds(edge, state_bytes) for edge in path)


# -- the worth of a squash made for one peer


def expected_bytes(chain_bytes: int, links: int, exponent: float) -> int:
    """Return the bytes of a squash of ``links`` deltas with ``chain_bytes`` in total: ``chain_bytes`` times ``links``
    to the power of -``exponent``.
    """
    return int(chain_bytes * max(1, links) ** -exponent)


def fitted_exponent(squashes: Iterable[tuple[int, float]], default: float = 0.3) -> float:
    """Return the exponent for ``expected_bytes``, from existing squashes: (number of deltas, the squash's bytes divided
    by theirs). The longest squash decides, because it is closest to what a late peer needs.
    """
    known = [(links, ratio) for links, ratio in squashes if links > 1 and ratio > 0]
    if not known:
        return default
    links, ratio = max(known)
    return min(1.0, max(0.0, -math.log(ratio) / math.log(links)))
