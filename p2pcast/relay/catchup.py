"""Which artifact a peer should stage next to get to the newest version for the fewest bytes. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from p2pcast.version import Version


@dataclass(frozen=True, slots=True)
class Edge:
    """An artifact as a way from one version to another; ``base`` None: from nothing (an anchor)."""

    artifact: bytes
    base: Version | None
    version: Version
    bytes: int


def cheapest_path(held: Version | None, edges: Iterable[Edge]) -> list[Edge]:
    """Artifacts to stage, in order, from ``held`` to the newest version that can be reached; empty when that is held already.

    Fewest bytes, then fewest artifacts. An anchor may be used from anywhere.
    """
    by_base: dict[Version | None, list[Edge]] = {}
    for edge in edges:
        by_base.setdefault(edge.base, []).append(edge)
    best: dict[Version | None, tuple[int, int]] = {held: (0, 0)}
    via: dict[Version, Edge] = {}
    queue: list[tuple[int, int, tuple[int, int]]] = [(0, 0, held or (-1, -1))]
    anchors = by_base.get(None, [])
    while queue:
        cost, hops, at = heapq.heappop(queue)
        here = None if at == (-1, -1) else Version(*at)
        if best[here] < (cost, hops):
            continue
        following = by_base.get(here, []) if here is not None else []
        for edge in [*following, *(anchors if here == held else [])]:
            reach = (cost + edge.bytes, hops + 1)
            if edge.version != held and (edge.version not in best or reach < best[edge.version]):
                best[edge.version] = reach
                via[edge.version] = edge
                heapq.heappush(queue, (*reach, edge.version))
    target = max((v for v in best if v is not None), default=None)
    path: list[Edge] = []
    while target is not None and target != held:
        edge = via[target]
        path.append(edge)
        if edge.base is None:
            break
        target = edge.base
    return path[::-1]
