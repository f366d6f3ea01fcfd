"""Names of peers: their owners, and that no name protects a node from eviction."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest
from unknown_nodes import NODE, Nobody, bought, joined

from p2pcast.ground.errors import RefusedError
from rollout_node.peer import Peer
from rollout_node.peer_daemon import PeerDaemon


def names(hub) -> dict[str, str]:
    """Node → what it goes by, of those that are connected."""
    return {ident: session.peer.name for ident, session in hub.state.sessions.items() if session.peer is not None}


async def test_a_name_that_looks_like_an_id_is_refused_by_the_hub(tls):
    """When a certificate is asked for, and when a peer joins that asked for it by another name."""
    hub = await tls.hub_up()
    victim = await tls.peer_up("a")
    for name in (victim.ident.hex(), victim.ident.hex()[:8], "hub", "a~12345678"):
        with pytest.raises(RefusedError, match=r"choose another one \(--name\)"):
            await bought(tls, name=name)
    assert NODE.hex() not in hub.state.admission.trust.ledger.holders
    papers = await bought(tls, name="honest")
    for name in (victim.ident.hex(), victim.ident.hex().upper(), "deadbeef"):
        owner = Nobody()
        await joined(tls, papers, name, owner)
        assert "choose another one (--name)" in str(await owner.over)
    assert list(names(hub)) == [victim.ident.hex()]


async def test_eviction_by_name_hits_the_node_with_that_name(tls):
    """A hub that took such a name in an earlier release: the id wins."""
    hub = await tls.hub_up()
    a, b = await tls.peers_up("a", "b")
    for called, of in ((b.ident.hex(), a), (a.ident.hex(), b)):
        hub.state.sessions[of.ident.hex()].peer.name = called
        holder = hub.state.admission.trust.ledger.holders[of.ident.hex()]
        holder.name = holder.called = called
    hub.state.admission.trust.ledger._names = {h.called: n for n, h in hub.state.admission.trust.ledger.holders.items()}
    assert (await hub.state.admission.commands.evict({"peer": b.ident.hex()}))["node"] == b.ident.hex()
    assert isinstance(await tls.ended(b), RefusedError)
    assert hub.state.admission.evicted == {b.ident}
    assert a.startup.hub_session.connected


async def up(swarm, folder: str) -> Peer:
    """A peer of the name a."""
    daemon = PeerDaemon(replace(swarm.peer_config(folder), name="a"))
    swarm._start(daemon)
    return await swarm.answers(daemon)


@pytest.mark.parametrize("plaintext", [True, False])
async def test_a_name_stays_with_its_first_node(swarm, plaintext, caplog):
    """The hub gives a second node of the same name another name. This holds after restarts of the hub, in any order of
    joining, until the first node is evicted.
    """
    swarm.plaintext = plaintext
    hub = await swarm.hub_up()
    first = await up(swarm, "first")
    second = await up(swarm, "second")
    made = f"a~{second.ident.hex()[:8]}"
    assert names(hub) == {first.ident.hex(): "a", second.ident.hex(): made}
    assert f"the hub calls this peer {made}" in caplog.text
    for peer in (first, second):
        await swarm.down(peer)
    await swarm.down(hub)
    hub = await swarm.hub_up()
    second = await up(swarm, "second")
    assert names(hub) == {second.ident.hex(): made}, "the other one is away, and keeps it"
    first = await up(swarm, "first")
    assert names(hub)[first.ident.hex()] == "a"
    done = await hub.state.admission.commands.evict({"peer": "a"})
    assert (done["node"], done["others"]) == (first.ident.hex(), [second.ident.hex()])
    assert isinstance(await swarm.ended(first), RefusedError)
    second.startup.hub_session._link.abort()
    await swarm.until(lambda: names(hub).get(second.ident.hex()) == "a", "it has the name that it asked for")


async def test_a_node_that_the_hub_has_never_seen_is_evicted_by_its_id(tls):
    """The ledger may have been lost since it was here."""
    hub = await tls.hub_up()
    papers = await bought(tls)
    hub.state.admission.trust.ledger.holders.clear()
    assert (await hub.state.admission.commands.evict({"peer": NODE.hex()}))["peer"] == NODE.hex()
    with pytest.raises(RefusedError, match="evicted"):
        await joined(tls, papers)
    with pytest.raises(RefusedError, match="hub itself"):
        await hub.state.admission.commands.evict({"peer": hub.ident.hex()})
    with pytest.raises(RefusedError, match="no node"):
        await hub.state.admission.commands.evict({"peer": secrets.token_hex(8)})
