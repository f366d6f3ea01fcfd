"""Reachability with real daemons on loopback: an address without a listener stands for a NAT."""

from __future__ import annotations

import pytest

from netem.fleet.processes import free_port


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", ""])
async def test_an_unreachable_parent_dials_its_child(swarm, states, host):
    first = states.first()
    swarm.publish(0, first)
    swarm.address = (host, 0)
    hub = await swarm.hub_up(chains=1)
    swarm.address = (host or "localhost", hub.control.listener.address[1])
    shut = await swarm.peer_up("shut", listen=(host, 0), advertise=(("127.0.0.1", free_port()),))
    await swarm.live("0.0", shut)
    await swarm.until(
        lambda: hub.fleet.membership.reach.answers(shut.ident.hex())[0][1] is False, "the hub has dialled it back"
    )
    below = await swarm.peer_up("below", listen=(host, 0))
    await swarm.live("0.0")
    await swarm.until(lambda: below.relay.parent_failover.parent == shut.ident, "it hangs below the other")
    assert not below.relay.parent_failover.live.link.dialled
    assert len(below.relay.parent_failover.live.link.stripes) == 2
    swarm.publish(1, states.trained(first, 1))
    await swarm.live("0.1")
    await swarm.until(
        lambda: (
            {p.name: p.dialled_by_parent for p in hub.fleet.membership.peers.values()} == {"shut": False, "below": True}
        ),
        "the hub hears how the links were made",
    )
    rows = {p["name"]: p for p in (await swarm.status(hub))["peers"]}
    assert (rows["shut"]["reachable"], rows["below"]["reachable"]) == (False, True)
    assert {a["answers"] for a in rows["below"]["addresses"]} == {True}
    assert rows["below"]["link"]["dialled_by"] == "parent"
    assert (await swarm.status(below))["link"] == rows["below"]["link"]


async def test_two_unreachable_peers_are_fed_by_the_hub(swarm, states):
    swarm.publish(0, states.first())
    hub = await swarm.hub_up(chains=1)
    shut = [await swarm.peer_up(name, advertise=(("127.0.0.1", free_port()),)) for name in ("a", "b")]
    # Both are at one site (this machine), so the hub waits until both have tried.
    await swarm.until(lambda: all(p.relay.parent_failover.parent == hub.ident for p in shut), "both hang below the hub")
    await swarm.until(lambda: set(hub.fleet.membership.plan.parent.values()) == {""}, "and that is the plan")
    swarm.publish(1, states.trained(states.first(), 1))
    await swarm.live("0.1")
