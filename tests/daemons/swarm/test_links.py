"""Links as daemons show them: socket options as configured, and stripes by the rule where no number is given."""

from __future__ import annotations

from p2pcast.transport.socket_options import Sockets


async def test_both_ends_of_a_link_show_its_kind(swarm, states):
    swarm.publish(1, states.first())
    hub = await swarm.hub_up(sockets=Sockets("reno"))
    one = await swarm.peer_up("one", stripes=None, sockets=Sockets("reno"))
    two = await swarm.peer_up("two", stripes=3)
    await swarm.live("0.1")
    plan = hub.fleet.membership.plan
    links = [
        link for daemon in (hub, one, two) for link in (await swarm.status(daemon))["links"] if link["role"] == "child"
    ]
    assert len(links) == 2
    stripes = {link["node"]: link["stripes"] for link in links}
    assert stripes[two.ident.hex()] == 3
    # One stripe, unless this machine's round trip looked as long as a remote site's at that moment.
    assert stripes[one.ident.hex()] in (1, 4)
    for peer in (one, two):
        (above,) = [link for link in (await swarm.status(peer))["links"] if link["role"] == "parent"]
        assert above["node"] == (plan.parent[peer.ident.hex()] or hub.ident.hex())
        assert above["received_bytes"] > 0
        assert above["rtt_ms"] > 0
    (below,) = [link for link in links if link["node"] == one.ident.hex()]
    assert below["congestion"] == "reno"
    assert below["sent_bytes"] >= below["received_bytes"] > 0
