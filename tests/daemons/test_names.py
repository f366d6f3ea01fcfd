"""Names of peers: whose they are, and that no name shields a node from its eviction."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest
from strangers import NODE, Nobody, bought, joined

from p2pcast.errors import RefusedError
from rollout_node.peer import Peer


def names(hub) -> dict[str, str]:
    """Node → what it goes by, of those that are connected."""
    return {ident: session.peer.name for ident, session in hub.sessions.items() if session.peer is not None}


async def test_a_name_that_looks_like_an_id_is_refused_by_the_hub(tls):
    """When a certificate is asked for, and when a peer joins that asked for it by another name."""
    hub = await tls.hub_up()
    victim = await tls.peer_up("a")
    for name in (victim.ident.hex(), victim.ident.hex()[:8], "hub", "a~12345678"):
        with pytest.raises(RefusedError, match=r"choose another one \(--name\)"):
            await bought(tls, name=name)
    assert NODE.hex() not in hub.admission._ledger.holders
    papers = await bought(tls, name="honest")
    for name in (victim.ident.hex(), victim.ident.hex().upper(), "deadbeef"):
        owner = Nobody()
        await joined(tls, papers, name, owner)
        assert "choose another one (--name)" in str(await owner.over)
    assert list(names(hub)) == [victim.ident.hex()]


async def test_whoever_calls_itself_as_another_is_evicted_and_not_the_other(tls):
    """A hub that took such a name in an earlier release: the id wins."""
    hub = await tls.hub_up()
    a, b = await tls.peers_up("a", "b")
    for called, of in ((b.ident.hex(), a), (a.ident.hex(), b)):
        hub.sessions[of.ident.hex()].peer.name = called
        holder = hub.admission._ledger.holders[of.ident.hex()]
        holder.name = holder.called = called
    hub.admission._ledger._names = {h.called: n for n, h in hub.admission._ledger.holders.items()}
    assert (await hub.admission._evict({"peer": b.ident.hex()}))["node"] == b.ident.hex()
    assert isinstance(await tls.ended(b), RefusedError)
    assert hub.admission.evicted == {b.ident}
    assert a.control.connected


async def up(swarm, folder: str) -> Peer:
    """A peer of the name a."""
    peer = Peer(replace(swarm.peer_config(folder), name="a"))
    swarm._start(peer)
    await swarm.until(lambda: (swarm.folder / folder / "daemon.json").exists(), f"{folder} answers")
    return peer


@pytest.mark.parametrize("plaintext", [True, False])
async def test_a_name_stays_with_the_node_that_took_it_first(swarm, plaintext, caplog):
    """Another node is in under a name of the hub's making, which it is told; so it is after restarts of the hub, whoever comes first, until the other is evicted."""
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
    done = await hub.admission._evict({"peer": "a"})
    assert (done["node"], done["others"]) == (first.ident.hex(), [second.ident.hex()])
    assert isinstance(await swarm.ended(first), RefusedError)
    second.control._link.abort()
    await swarm.until(lambda: names(hub).get(second.ident.hex()) == "a", "it has the name that it asked for")


async def test_a_node_that_the_hub_has_never_seen_is_evicted_by_its_id(tls):
    """The ledger may have been lost since it was here."""
    hub = await tls.hub_up()
    papers = await bought(tls)
    hub.admission._ledger.holders.clear()
    assert (await hub.admission._evict({"peer": NODE.hex()}))["peer"] == NODE.hex()
    with pytest.raises(RefusedError, match="evicted"):
        await joined(tls, papers)
    with pytest.raises(RefusedError, match="hub itself"):
        await hub.admission._evict({"peer": hub.ident.hex()})
    with pytest.raises(RefusedError, match="no node"):
        await hub.admission._evict({"peer": secrets.token_hex(8)})
