"""Chooses how a peer that is behind gets to the newest version fastest, and whether it asks the hub for a squash from
its own version. It does no I/O; time is passed in.

| mode | allowed |
|---|---|
| ``none`` | single deltas or a whole state; a squash only if a delta is lost |
| ``kept`` | also squashes that the hub already has |
| ``auto`` | also a new squash, requested and awaited while it should save time |
| ``ask`` | also a new squash, always requested and awaited |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from p2pcast.ground.limits import MIB
from p2pcast.ground.version import Version
from p2pcast.relay.artifact_path import Edge, PathRates, cheapest_path, expected_bytes, find_gap, seconds
from p2pcast.relay.tuning import SQUASH_LEAST_GAIN_S
from p2pcast.wire import messages

if TYPE_CHECKING:
    from rollout_node.peer_config import Squashes

ANSWER_S = 2.0
"""Seconds for the hub to answer whether it will make a squash."""
PATIENCE = 3.0
"""A squash is awaited for this multiple of its announced time, plus ANSWER_S."""
MEASURED_FROM_BYTES = MIB
"""Smaller transfers are too short for measuring a rate."""
REFILL_S = 2.0
"""Extra seconds for replacing a state that is already here by a whole state, which every engine has to load too."""
PROMISED = b""
"""Stands for the artifact id of a squash that the hub has announced."""


class CatchupChoice:
    def __init__(self, mode: Squashes, cores: int) -> None:
        self.mode = mode
        self._cores = cores
        self._took: deque[float] = deque(maxlen=8)
        """Rates of the most recent transfers, in bits per second."""
        self._asked: Version | None = None
        """The base of the last request; there is one request per staged version."""
        self._answer_by_s = 0.0
        self._promise: tuple[Edge, float, float] | None = None
        """The announced squash, when it should be available, and until when to wait for it."""

    @property
    def asks(self) -> bool:
        """Whether the hub may be asked for squashes."""
        return self.mode in ("auto", "ask")

    def transferred(self, size: int, took_s: float) -> None:
        """Record a finished transfer. The best recent rate counts, because artifacts still being made arrive slowly."""
        if size >= MEASURED_FROM_BYTES and took_s > 0:
            self._took.append(8 * size / took_s)

    @property
    def rates(self) -> PathRates:
        known = PathRates()
        return PathRates(
            max(self._took, default=known.link_bps), known.stage_bytes_s * self._cores / 2, known.fill_bytes_s
        )

    def answered(self, body: messages.Squashing, now_s: float) -> None:
        """Handle SQUASHING, the hub's answer to a request."""
        base = body.base
        self._answer_by_s = 0.0
        if body.version is not None and base == self._asked:
            wait_s = body.wait_us / 1e6
            edge = Edge(PROMISED, base, body.version, body.bytes)
            self._promise = edge, now_s + wait_s, now_s + PATIENCE * wait_s + ANSWER_S

    def way(self, held: Version | None, edges: Collection[Edge], state_bytes: int) -> list[Edge]:
        """Return the fastest path over existing artifacts."""
        rates = self.rates
        usable: Collection[Edge] = _steps(edges) if self.mode == "none" else edges
        if usable is not edges and find_gap(held, usable) is not None:
            usable = edges  # If a step is lost, a squash may lead past it.
        return cheapest_path(held, usable, cost=lambda e: rates.seconds(e, state_bytes) + self._refill_s(held, e))

    def should_ask(self, held: Version | None, missing: Collection[Edge], state_bytes: int) -> Version | None:
        """Return the version from which to request a squash, or None. ``missing``: the path's artifacts that are not
        here, in order.
        """
        if not self.asks or held is None or held == self._asked or len(missing) < 2:
            return None
        rates = self.rates
        one = Edge(
            PROMISED,
            held,
            max(e.version for e in missing),
            expected_bytes(sum(e.bytes for e in missing), len(missing), 0.3),
        )
        gain_s = seconds(missing, rates, state_bytes) - rates.seconds(one, state_bytes)
        if self.mode == "auto" and gain_s < SQUASH_LEAST_GAIN_S:
            return None
        return held

    def asked(self, base: Version, now_s: float) -> None:
        self._asked, self._answer_by_s, self._promise = base, now_s + ANSWER_S, None

    def waits(self, held: Version | None, edges: Collection[Edge], state_bytes: int, now_s: float) -> bool:
        """Whether to request nothing yet, because an announced squash is worth waiting for."""
        if now_s < self._answer_by_s and held == self._asked:
            return True
        if self._promise is None:
            return False
        edge, there_s, until_s = self._promise
        if held != edge.base or now_s > until_s or any((e.base, e.version) == (edge.base, edge.version) for e in edges):
            self._promise = None
            return False
        if self.mode == "ask":
            return True
        promised = Edge(PROMISED, edge.base, edge.version, edge.bytes, max(0.0, there_s - now_s))
        rates = self.rates
        way = cheapest_path(
            held, [*edges, promised], cost=lambda e: rates.seconds(e, state_bytes) + self._refill_s(held, e)
        )
        return promised in way

    @staticmethod
    def _refill_s(held: Version | None, edge: Edge) -> float:
        """Extra seconds if a whole state replaces one that is already here."""
        return REFILL_S if edge.base is None and held is not None else 0.0


def _steps(edges: Iterable[Edge]) -> list[Edge]:
    """Leave out squashes: keep whole states, and for each version the delta from its newest base."""
    every = list(edges)
    newest: dict[Version, Version] = {}
    for edge in every:
        if edge.base is not None:
            newest[edge.version] = max(edge.base, newest.get(edge.version, edge.base))
    return [e for e in every if e.base is None or e.base == newest[e.version]]
