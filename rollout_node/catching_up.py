"""A late peer's choice: which way to the newest version is the quickest, and whether a squash of its own is worth asking the hub for. Pure: time is passed in.

``none``: every delta by itself, or a whole state. ``kept``: squashes too that the hub has. ``auto``: one from exactly here is asked for where that should
save time, and waited for as long as it still should. ``ask``: it is always asked for, and waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Literal

from p2pcast.limits import MIB
from p2pcast.relay.catchup import MIN_GAIN_S, Edge, Rates, cheapest_path, expected_bytes, seconds
from p2pcast.version import Version
from p2pcast.wire.messages import Body

Squashes = Literal["none", "kept", "auto", "ask"]

ANSWER_S = 2.0
"""The hub may take so long to say whether there will be one."""
PATIENCE = 3.0
"""Times what it said that making it would take, and ANSWER_S: then the peer goes without."""
MEASURED_FROM_BYTES = MIB
REFILL_S = 2.0
PROMISED = b""


class CatchingUp:
    def __init__(self, mode: Squashes, cores: int) -> None:
        self.mode = mode
        self._cores = cores
        self._took: deque[float] = deque(maxlen=8)
        """Bits a second of the last transfers."""
        self._asked: Version | None = None
        """From here; once for each version that this peer stands still at."""
        self._answer_by_s = 0.0
        self._promise: tuple[Edge, float, float] | None = None
        """The squash, when it should be there, and until when it is waited for."""

    @property
    def asks(self) -> bool:
        """Whether the hub may be asked for squashes."""
        return self.mode in ("auto", "ask")

    def transferred(self, size: int, took_s: float) -> None:
        """An artifact came in. What is small, or was still being made, says little: the best of the last ones counts."""
        if size >= MEASURED_FROM_BYTES and took_s > 0:
            self._took.append(8 * size / took_s)

    @property
    def rates(self) -> Rates:
        known = Rates()
        return Rates(max(self._took, default=known.link_bps), known.stage_bytes_s * self._cores / 2, known.fill_bytes_s)

    def answered(self, body: Body, now_s: float) -> None:
        """SQUASHING."""
        base = Version.of(body["base"])
        self._answer_by_s = 0.0
        if body["version"] is not None and base == self._asked:
            wait_s = body["wait_us"] / 1e6
            edge = Edge(PROMISED, base, Version.of(body["version"]), body["bytes"])
            self._promise = edge, now_s + wait_s, now_s + PATIENCE * wait_s + ANSWER_S

    def way(self, held: Version | None, edges: Collection[Edge], state_bytes: int) -> list[Edge]:
        """The quickest, by what is there."""
        rates = self.rates
        usable = _steps(edges) if self.mode == "none" else edges
        return cheapest_path(held, usable, cost=lambda e: rates.seconds(e, state_bytes) + self._refill_s(held, e))

    def should_ask(self, held: Version | None, missing: Collection[Edge], state_bytes: int) -> Version | None:
        """The base of a squash to ask the hub for, or None. ``missing``: artifacts of the way that have still to come, in order."""
        if not self.asks or held is None or held == self._asked or len(missing) < 2:
            return None
        rates = self.rates
        one = Edge(
            PROMISED, held, max(e.version for e in missing), expected_bytes(sum(e.bytes for e in missing), len(missing), 0.3)
        )
        if self.mode == "auto" and seconds(missing, rates, state_bytes) - rates.seconds(one, state_bytes) < MIN_GAIN_S:
            return None
        return held

    def asked(self, base: Version, now_s: float) -> None:
        self._asked, self._answer_by_s, self._promise = base, now_s + ANSWER_S, None

    def waits(self, held: Version | None, edges: Collection[Edge], state_bytes: int, now_s: float) -> bool:
        """Whether nothing should be asked of others yet, since a squash is on its way that is worth the wait."""
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
        way = cheapest_path(held, [*edges, promised], cost=lambda e: rates.seconds(e, state_bytes) + self._refill_s(held, e))
        return promised in way

    @staticmethod
    def _refill_s(held: Version | None, edge: Edge) -> float:
        """A whole state in place of one that is held goes whole into every engine, too."""
        return REFILL_S if edge.base is None and held is not None else 0.0


def _steps(edges: Iterable[Edge]) -> list[Edge]:
    """Without squashes: of the deltas to one version only the one from the newest base; and whole states."""
    every = list(edges)
    newest: dict[Version, Version] = {}
    for edge in every:
        if edge.base is not None:
            newest[edge.version] = max(edge.base, newest.get(edge.version, edge.base))
    return [e for e in every if e.base is None or e.base == newest[e.version]]
