"""The region of each worker's engine: the worker names the engine's peer when it asks for leases, and the hub knows the
peer's region. Pure.

Guarantee: memory is bounded. Nothing but what is shown depends on a region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trainer_node.scheduling.served_versions import EngineId

MOST_SESSIONS: Final = 16384
"""As many as workers may be registered."""


class EngineRegions:
    """``region_of``: region of a node in hex, None where the hub does not know the node."""

    def __init__(self, region_of: Callable[[str], str | None]) -> None:
        self._region_of = region_of
        self._nodes: dict[bytes, str] = {}

    def note(self, session: bytes, engine: EngineId) -> None:
        """The session of a worker has leased for this engine."""
        self._nodes.pop(session, None)
        self._nodes[session] = engine.node
        while len(self._nodes) > MOST_SESSIONS:
            del self._nodes[next(iter(self._nodes))]

    def region(self, session: bytes) -> str | None:
        """None for a worker that has named no engine of a known peer."""
        node = self._nodes.get(session)
        return None if node is None else self._region_of(node)
