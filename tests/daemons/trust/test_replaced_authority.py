"""The hub's authority is replaced because its key leaked: nodes keep ids and keys, and the thief keeps nothing."""

from __future__ import annotations

import time

import pytest
from unknown_nodes import NODE, at, bought, knock, node, token_for, token_of

from p2pcast.ground.errors import P2PCastError, RefusedError
from p2pcast.trust.certificate_authority import Authority
from p2pcast.trust.certificates import key_print, new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.dial_permissions import Certified


def forged(stolen: Authority, run: bytes, role) -> Credentials:
    """A certificate that the thief has issued."""
    key = new_key()
    issued = stolen.issue(key.public_key(), Certified(run, NODE, role), time.time(), 86400.0)
    return Credentials(key, issued, stolen.certificate, time.time())


async def test_peers_stay_and_a_stolen_authority_opens_nothing(tls, states):
    hub = await tls.hub_up()
    peer, evicted = await tls.peers_up("a", "b")
    state = states.first()
    tls.publish(0, state)
    await tls.live("0.0")
    await hub.state.admission.commands.evict({"peer": "b"})
    await tls.ended(evicted)
    folder, run = tls.folder / "hub", token_of(tls).run
    stolen = Authority.load_or_create(folder / "authority.pem", run, time.time())
    (await knock(tls, forged(stolen, run, "peer"), purpose="control", role="peer")).close()
    before, was = Credentials.load(tls.folder / "a" / "link.pem"), peer.node.ident
    old_token = token_of(tls)
    await tls.down(hub)
    (folder / "authority.pem").unlink()
    hub = await tls.hub_up()
    assert token_of(tls).authority != old_token.authority
    await tls.down(peer)
    peer = await tls.peer_up("a")
    tls.publish(1, states.trained(state, 1))
    await tls.live("0.1", peer)
    after = Credentials.load(tls.folder / "a" / "link.pem")
    assert peer.node.ident == was
    assert key_print(after.key.public_key()) == key_print(before.key.public_key())
    assert after.authority != before.authority
    for role in ("hub", "peer"):
        for where in (tls.address, at(peer)):
            with pytest.raises(P2PCastError):
                await knock(tls, forged(stolen, run, role), at=where)
    with pytest.raises(P2PCastError):
        await knock(tls, before, at=at(peer))
    with pytest.raises(P2PCastError):
        await bought(tls, token=old_token)
    with pytest.raises(RefusedError, match="evicted"):
        await bought(tls, node=evicted.node.ident)


async def test_workers_and_ledgers_stay_the_same_nodes(tls):
    hub = await tls.hub_up()
    for role in ("worker", "ledger"):
        first = node(tls, await token_for(hub, role), role, role)
        await first.ready()
        await tls.down(hub)
        (tls.folder / "hub" / "authority.pem").unlink()
        hub = await tls.hub_up()
        second = node(tls, await token_for(hub, role), role, role)
        assert second.until is None, "the certificate of the old authority is not used"
        await second.ready()
        assert second.who == first.who
