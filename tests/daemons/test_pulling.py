"""What a late joiner lacks, pulled from several peers at once, by real daemons."""

from __future__ import annotations

import numpy as np

from p2pcast.version import Version

MIB = 1 << 20


def large(seed: int, mib: int) -> dict:
    words = np.random.default_rng(seed).integers(0, 1 << 16, mib * MIB // 2, dtype=np.uint16)
    return {"w": ("bfloat16", (mib, MIB // 2), words.tobytes())}


async def started(swarm, *names: str, mib: int = 12, versions: int = 2):
    """A run whose versions all peers have: an anchor, then deltas in which all is new."""
    await swarm.hub_up(codec="flat")
    await swarm.peers_up(*names)
    for step in range(1, versions + 1):
        swarm.publish(step, large(step, mib))
        await swarm.live(f"0.{step}")


def sent(swarm, name: str) -> int:
    """Bytes that a peer has been asked for by one that pulls."""
    return sum(c.bytes_sent for c in swarm.peers[name].downstream.children.values() if not c.live)


async def test_a_late_joiner_pulls_from_several_at_once(swarm):
    await started(swarm, "a", "b", "c", "d")
    late = swarm.peer_begun("late")
    seen: dict[bytes, int] = {}

    def here() -> bool:
        if hasattr(late, "pulling"):
            for source in late.pulling.sources:
                seen[source.link.remote] = source.bytes_received
        return late.staged == Version(0, 2)

    await swarm.until(here, "all of it is here")
    await swarm.live("0.2")
    assert late.node.bytes_duplicate == 0
    assert sum(size > 0 for size in seen.values()) >= 3, seen
