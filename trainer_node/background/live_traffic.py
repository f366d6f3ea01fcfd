"""Whether the hub is making or sending a version at this moment: background work then gives way."""

from __future__ import annotations

from collections.abc import Iterable

from p2pcast.relay.child import Child
from p2pcast.relay.holding import Holding


def live_traffic(holdings: Iterable[Holding], children: Iterable[Child]) -> bool:
    """True while an artifact is incomplete, or a child waits for pieces."""
    return any(h.incomplete for h in holdings) or any(child.schedules.waiting for child in children)
