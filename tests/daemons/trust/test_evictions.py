"""Evictions when files are lost, old or of an earlier release, and when peers lie about them."""

from __future__ import annotations

import json
import shutil

import pytest
from unknown_nodes import NODE, Nobody, bought, joined, knock, token_of

from p2pcast.artifact.run_key import RunKey
from p2pcast.ground.errors import RefusedError
from p2pcast.trust.credentials import Credentials
from p2pcast.trust.evictions import NO_TOKEN, Statement
from p2pcast.wire import messages
from p2pcast.wire.messages import Type

TRUST = ("trust.json", "evictions.log", "token.key")


def papers_of(swarm, name: str) -> Credentials:
    return Credentials.load(swarm.folder / name / "link.pem")


@pytest.mark.parametrize("lost", [("trust.json",), ("trust.json", "evictions.log"), TRUST])
async def test_a_hub_that_lost_its_files_learns_evictions_from_its_peers(tls, lost):
    """No peer ends because of the loss, and the hub saves the learned evictions."""
    hub = await tls.hub_up()
    a, b = await tls.peers_up("a", "b")
    await hub.state.admission.commands.evict({"peer": "b"})
    assert isinstance(await tls.ended(b), RefusedError)
    await tls.until(lambda: b.ident in a.startup.eviction_log.evictions.nodes, "a has heard")
    await tls.down(hub)
    for name in lost:
        (tls.folder / "hub" / name).unlink()
    hub = await tls.hub_up()
    await tls.until(lambda: b.ident in hub.state.admission.evicted, "the hub has learnt it again")
    with pytest.raises(RefusedError, match="evicted"):
        await knock(tls, papers_of(tls, "b"))
    log = tls.folder / "hub" / "evictions.log"
    await tls.until(lambda: log.exists() and b.ident.hex() in log.read_text(), "it is on disk")
    await tls.down(a)
    await tls.down(hub)
    hub = await tls.hub_up()
    assert hub.state.admission.evicted == {b.ident}


async def test_a_hub_with_an_older_copy_of_its_files_revokes_the_tokens_again(tls):
    """Otherwise an evicted node could return under another id, with the token of the time of the copy."""
    hub = await tls.hub_up()
    a, b = await tls.peers_up("a", "b")
    await tls.down(hub)
    for name in TRUST[::2]:
        shutil.copy2(tls.folder / "hub" / name, tls.folder / name)
    hub = await tls.hub_up()
    await tls.until(lambda: len(hub.state.sessions) == 2, "both are back")
    thiefs = token_of(tls)
    await hub.state.admission.commands.evict({"peer": "b"})
    assert isinstance(await tls.ended(b), RefusedError)
    await tls.until(lambda: b.ident in a.startup.eviction_log.evictions.nodes, "a has heard")
    await tls.down(hub)
    (tls.folder / "hub" / "evictions.log").unlink()
    for name in TRUST[::2]:
        shutil.copy2(tls.folder / name, tls.folder / "hub" / name)
    hub = await tls.hub_up()
    await tls.until(lambda: b.ident in hub.state.admission.evicted, "the hub has learnt it again")
    with pytest.raises(RefusedError, match="was revoked"):
        await bought(tls, token=thiefs)
    await tls.until(lambda: token_of(tls) != thiefs, "another token is in the file")
    await bought(tls)
    assert a.startup.hub_session.connected


async def test_a_stolen_peer_cannot_evict(tls):
    """A stolen peer may send any statement: only those signed by the run's key count."""
    hub = await tls.hub_up()
    victim = await tls.peer_up("a")
    papers = await bought(tls)
    claim = Statement(victim.ident, NO_TOKEN, 1 << 60, evicted=True)
    for forged in (claim.signed(RunKey.generate().sign), Statement(victim.ident, NO_TOKEN, 1 << 60, True, bytes(64))):
        owner = Nobody()
        link = await joined(tls, papers, owner=owner)
        link.send(messages.Report(parent=None, staged=None, committed=None, evicted=[forged.packed]))
        assert "not signed by this run's key" in str(await owner.over)
    assert not hub.state.admission.evicted
    assert victim.startup.hub_session.connected


async def test_an_old_statement_readmits_no_node(tls):
    """An eviction was undone once, and came again: a stolen peer that brings back the undoing changes nothing."""
    hub = await tls.hub_up()
    papers = await bought(tls)
    evicted = b"e" * 16
    for undo in (False, True):
        await hub.state.admission.commands.evict({"peer": evicted.hex(), "undo": undo})
    undone = hub.state.admission.trust.evictions.packed()
    await hub.state.admission.commands.evict({"peer": evicted.hex()})
    owner = Nobody()
    link = await joined(tls, papers, owner=owner)
    link.send(messages.Report(parent=None, staged=None, committed=None, evicted=undone))
    link.send(messages.Squash((0, 0)))
    await tls.until(lambda: any(e.type is Type.SQUASHING for e in owner.said), "the hub has read it")
    assert hub.state.admission.evicted == {evicted}


async def test_a_list_that_is_empty_or_short_makes_no_peer_forget(tls):
    """The hub has lost its files, or is of an earlier release, which signs no evictions. Undone evictions are
    forgotten.
    """
    hub = await tls.hub_up()
    a = await tls.peer_up("a")
    papers = await bought(tls)
    await hub.state.admission.commands.evict({"peer": NODE.hex()})
    await tls.until(lambda: NODE in a.startup.eviction_log.evictions.nodes, "it has heard")
    link = hub.state.sessions[a.ident.hex()].link
    other = b"o" * 16
    for evicted in (messages.Evicted([]), messages.Evicted([], signed=[]), messages.Evicted([other])):
        link.send(evicted)
    await tls.until(lambda: other in a.startup.eviction_log.evictions.nodes, "it has heard those too")
    assert a.startup.eviction_log.evictions.nodes == {NODE, other}
    await tls.down(a)
    a = await tls.peer_up("a")
    assert a.startup.eviction_log.evictions.nodes == {NODE, other}
    for node in (NODE, other):
        await hub.state.admission.commands.evict({"peer": node.hex()})
        await hub.state.admission.commands.evict({"peer": node.hex(), "undo": True})
    await tls.until(lambda: not a.startup.eviction_log.evictions.nodes, "all of it is undone")
    assert not (await knock(tls, papers, at=("127.0.0.1", a.startup.listener.address[1]))).closed


async def test_an_eviction_leaves_the_rest_of_the_fleet_alone(tls):
    """All came by one token, which is revoked: those that are in stay in, restart, renew; the token file serves those
    that are still to come.
    """
    hub = await tls.hub_up(certificate_s=30.0)
    a, b = await tls.peers_up("a", "b")
    config = a.config
    made = await hub.state.admission.commands.create({"uses": 5})
    done = await hub.state.admission.commands.evict({"peer": "b"})
    assert isinstance(await tls.ended(b), RefusedError)
    assert done["revoked_tokens"] == [config.token.ident.hex()]
    assert done["token_file"] == str(tls.folder / "token")
    assert token_of(tls) == hub.token != config.token
    rows = {r["id"]: r["fault"] for r in (await hub.state.admission.commands.list({}))["tokens"]}
    assert rows == {config.token.ident.hex(): "was revoked", hub.token.ident.hex(): None, made["id"]: None}
    first = a.startup.certificate.until
    await tls.until(lambda: a.startup.certificate.until > first, "a has renewed")
    await tls.down(a)
    tls.peer_begun("a", token=config.token)
    await tls.until(lambda: len(hub.state.sessions) == 1, "a is back with the token that it was started with")
    await tls.peer_up("c")
    with pytest.raises(RefusedError, match="was revoked"):
        await bought(tls, token=config.token)


async def test_an_eviction_revokes_no_token_that_is_of_no_use_to_the_evicted(tls):
    """No used-up token, no token that the node has not had, and none with --keep-token."""
    hub = await tls.hub_up()
    before = hub.token
    made = await hub.state.admission.commands.create({"uses": 1})
    once = type(before).parse(made["token"])
    await bought(tls, token=once)
    done = await hub.state.admission.commands.evict({"peer": NODE.hex()})
    assert (done["revoked_tokens"], done["revoked_token"], done["token_file"]) == ([], None, None)
    await bought(tls, node=b"2" * 16)
    done = await hub.state.admission.commands.evict({"peer": (b"2" * 16).hex(), "keep_token": True})
    assert done["revoked_tokens"] == []
    assert hub.token == before


async def test_an_eviction_revokes_the_tokens_of_the_nodes_restarts(tls):
    """Tokens of restarts are revoked beside the node's first token."""
    hub = await tls.hub_up()
    a = await tls.peer_up("a")
    made = await hub.state.admission.commands.create({"uses": 5})
    await tls.down(a)
    again = await tls.peer_up("a", token=type(hub.token).parse(made["token"]))
    done = await hub.state.admission.commands.evict({"peer": "a"})
    assert sorted(done["revoked_tokens"]) == sorted([made["id"], a.config.token.ident.hex()])
    assert isinstance(await tls.ended(again), RefusedError)


async def test_evictions_of_an_earlier_release_are_taken_over(tls):
    """trust.json had them, unsigned; so had peer.json."""
    hub = await tls.hub_up()
    a = await tls.peer_up("a")
    token = token_of(tls)
    papers = await bought(tls)
    await tls.down(hub)
    await tls.down(a)
    path = tls.folder / "hub" / "trust.json"
    now = json.loads(path.read_text())
    for token_ in now["tokens"].values():
        token_["expires"] = None
    for holder in now["holders"].values():
        for key in ("shown", "called", "seen"):
            del holder[key]
    old = {"tokens": now["tokens"], "holders": now["holders"], "evicted": {NODE.hex(): "x"}}
    path.write_text(json.dumps(old))
    facts = json.loads((tls.folder / "a" / "peer.json").read_text())
    (tls.folder / "a" / "peer.json").write_text(json.dumps(facts | {"evicted": [(b"2" * 16).hex()]}))
    hub = await tls.hub_up()
    assert hub.state.admission.evicted == {NODE}
    with pytest.raises(RefusedError, match="evicted"):
        await knock(tls, papers)
    a = await tls.peer_up("a", token=token)
    await tls.until(
        lambda: a.startup.eviction_log.evictions.nodes == {NODE, b"2" * 16}, "a has heard, and kept what it knew"
    )
    assert token_of(tls) != token, "a token that ends is in the file"
    await bought(tls, node=b"3" * 16, token=token)
    assert "evicted" not in json.loads(path.read_text())
    await hub.state.admission.commands.evict({"peer": "x", "undo": True})
    await tls.down(hub)
    path.write_text(json.dumps(old))
    hub = await tls.hub_up()
    assert not hub.state.admission.evicted, "what was undone since is not evicted again by an old copy"
