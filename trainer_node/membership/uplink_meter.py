"""Measures the hub's uplink from the bytes that children acknowledge, for the planner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from p2pcast.relay.child import Child
from p2pcast.transport.link import Link
from topology.hub_uplink import WINDOW_S, Uplink


class UplinkMeter:
    """Measures until ``run`` is cancelled. ``measured(bps)`` is called with each new estimate, in bit/s."""

    def __init__(self, children: Mapping[Link, Child], measured: Callable[[float], None]) -> None:
        self.uplink = Uplink()
        self._children = children
        self._measured = measured

    async def run(self) -> None:
        while True:
            await asyncio.sleep(WINDOW_S)
            self.measure(asyncio.get_running_loop().time())

    def measure(self, now: float) -> None:
        """Evaluate one window, which ends at ``now`` by the loop's clock."""
        attached = {str(id(link)): child for link, child in self._children.items() if child.attached}
        waiting = {name for name, child in attached.items() if child.schedules.waiting}
        # A window counts only if several children wait both at its start and at its end.
        read = attached if len(waiting) > 1 else {}
        sent = {name: sum(s.acked_bytes for s in child.link.stripes.values()) for name, child in read.items()}
        if self.uplink.sample(now, sent, waiting) and self.uplink.bps is not None:
            self._measured(self.uplink.bps)
