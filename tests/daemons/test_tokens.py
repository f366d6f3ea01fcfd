"""Tokens end, and nodes that are in stay in."""

from __future__ import annotations

import json
import time

import pytest
from strangers import NODE, Nobody, bought, joined, knock, token_of

from p2pcast.errors import LocalError, RefusedError
from p2pcast.trust.certificates import new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.wire.messages import Type
from trainer_node.badge import Badge


def end(hub, token, at: float) -> None:
    """As if its time had come."""
    hub.admission._ledger.grants[token.ident.hex()].expires = at


async def test_the_token_file_gets_a_fresh_token_long_before_the_last_one_ends(tls):
    hub = await tls.hub_up()
    first = token_of(tls)
    (row,) = (await hub.admission._list({}))["tokens"]
    assert row["expires"] - row["created"] == 24 * 3600
    end(hub, first, time.time() + 11 * 3600)
    await tls.until(lambda: token_of(tls) != first, "another one is in the file")
    await bought(tls, token=first)
    end(hub, first, time.time())
    with pytest.raises(RefusedError, match="has expired"):
        await bought(tls, node=b"2" * 16, token=first)
    await bought(tls, node=b"2" * 16)
    second = token_of(tls)
    await tls.down(hub)
    hub = await tls.hub_up()
    assert token_of(tls) == hub.token == second, "a restart alone changes nothing"
    end(hub, second, time.time() + 60)
    await hub.admission._save()
    await tls.down(hub)
    hub = await tls.hub_up()
    assert token_of(tls) == hub.token != second
    await bought(tls, node=b"3" * 16, token=second)


async def test_a_token_file_that_could_not_be_written_is_written_later(tls):
    """Else whoever reads it would have a token that was revoked."""
    hub = await tls.hub_up()
    first, file = token_of(tls), tls.folder / "token"
    file.unlink()
    file.mkdir()
    with pytest.raises(LocalError):
        await hub.admission._revoke({"id": first.ident.hex()})
    file.rmdir()
    hub.admission._tend_at = 0.0
    await tls.until(lambda: file.exists() and token_of(tls) == hub.token != first, "it is there")


async def test_a_token_without_an_end_has_a_count(tls):
    hub = await tls.hub_up()
    made = await hub.admission._create({"ttl_s": None, "uses": 2})
    row = next(r for r in (await hub.admission._list({}))["tokens"] if r["id"] == made["id"])
    assert (row["expires"], row["uses"]) == (None, 2)


async def test_a_node_is_in_for_good_by_its_key(tls):
    """Certificate and token have both ended while the hub was away: the key alone brings the peer back. Nobody else gets in by that token, or by that node's id."""
    hub = await tls.hub_up(certificate_s=2.0)
    a = await tls.peer_up("a")
    token, first = token_of(tls), a.papers.until
    await tls.down(hub)
    path = tls.folder / "hub" / "trust.json"
    document = json.loads(path.read_text())
    document["tokens"][token.ident.hex()]["expires"] = time.time() - 1
    path.write_text(json.dumps(document))
    await tls.until(lambda: time.time() > max(first, a.papers.until), "its certificate is over")
    hub = await tls.hub_up()
    assert token_of(tls) != token
    await tls.until(lambda: a.control.connected, "it is back")
    assert a.papers.until > first + 60
    for node, why in ((NODE, "has expired"), (a.ident, "belongs to another key")):
        with pytest.raises(RefusedError, match=why):
            await bought(tls, node=node, token=token)


async def test_the_key_of_an_evicted_node_opens_nothing(tls):
    hub = await tls.hub_up()
    key = new_key()
    await bought(tls, key=key)
    await hub.admission._evict({"peer": NODE.hex()})
    with pytest.raises(RefusedError, match="evicted"):
        await bought(tls, key=key)


async def test_a_hub_that_lost_its_ledger_renews_what_it_has_issued(tls):
    """It knows its own certificates when it sees them."""
    hub = await tls.hub_up(certificate_s=40.0)
    a = await tls.peer_up("a")
    await tls.down(hub)
    (tls.folder / "hub" / "trust.json").unlink()
    hub = await tls.hub_up(certificate_s=40.0)
    before = a.papers.until
    await tls.until(lambda: a.papers.until > before, "it has been renewed")
    assert a.control.connected
    papers = Credentials.load(tls.folder / "a" / "link.pem")
    assert papers.until == a.papers.until
    with pytest.raises(RefusedError, match="belongs to another key"):
        await bought(tls, node=a.ident)


async def test_a_refused_renewal_leads_to_a_new_certificate_and_ends_nobody(tls):
    """A hub of an earlier release that has lost its ledger refuses to renew; the token still admits."""
    hub = await tls.hub_up(certificate_s=30.0)
    a = await tls.peer_up("a")
    ledger = hub.admission._ledger
    first, refused = a.papers.until, 0
    renew = ledger.renew

    def old(*given):
        nonlocal refused
        if not refused:
            refused += 1
            ledger.holders.clear()
        renew(*given)

    ledger.renew = old
    await tls.until(lambda: a.papers.until > first, "it has another certificate")
    assert refused
    await tls.until(lambda: a.control.connected, "it is back")
    assert ledger.holders[a.ident.hex()].token == a.config.token.ident.hex()


async def test_a_peer_without_renewal_and_without_a_token_stays_while_its_certificate_lasts(tls, caplog):
    hub = await tls.hub_up(certificate_s=30.0)
    a = await tls.peer_up("a")
    await hub.admission._revoke({"id": a.config.token.ident.hex()})
    ledger = hub.admission._ledger
    held = ledger.holders[a.ident.hex()]

    def old(*_):
        ledger.holders.pop(a.ident.hex(), None)
        raise RefusedError("this hub knows of no certificate of that node: join with a token")

    renew, ledger.renew = ledger.renew, old
    await tls.until(lambda: "no new certificate" in caplog.text, "both were refused")
    await tls.until(lambda: a.control.connected, "it is in")
    ledger.renew = renew
    ledger.holders[a.ident.hex()] = held
    first = a.papers.until
    await tls.until(lambda: a.papers.until > first, "it was renewed after all")


async def test_no_loss_ends_a_peer_that_was_in(tls, caplog):
    """The hub has lost its ledger and its token, and the certificate is over: nothing admits the peer. It goes on all the same, and is in when the files are back."""
    hub = await tls.hub_up(certificate_s=2.0)
    a = await tls.peer_up("a")
    await tls.down(hub)
    state = tls.folder / "hub"
    kept = {name: (state / name).read_bytes() for name in ("trust.json", "token.key")}
    for name in kept:
        (state / name).unlink()
    await tls.until(lambda: time.time() > a.papers.until, "its certificate is over")
    hub = await tls.hub_up()
    await tls.until(lambda: "not one that this hub gave out" in caplog.text, "it was refused")
    await tls.down(hub)
    for name, contents in kept.items():
        (state / name).write_bytes(contents)
    await tls.hub_up()
    await tls.until(lambda: a.control.connected, "it is in")


async def test_a_ledger_of_a_run_in_plain_text_does_not_stand_in_the_way_of_certificates(swarm):
    hub = await swarm.hub_up()
    a = await swarm.peer_up("a")
    await swarm.until(lambda: (swarm.folder / "hub" / "trust.json").exists(), "names are on disk")
    await swarm.down(a)
    await swarm.down(hub)
    swarm.plaintext = False
    await swarm.hub_up()
    await swarm.peer_up("a")


async def test_a_trainer_goes_on_by_its_key(tls):
    """Its token has ended, then the ledger is lost: what it holds is renewed, or used as long as it lasts."""
    hub = await tls.hub_up()
    badge = Badge(token_of(tls))
    assert await badge.show(tls.address, "host rank 0") is not None
    first = badge._held
    end(hub, badge.token, time.time())
    badge._held = Credentials(first.key, first.certificate, first.authority, 0.0)
    assert badge._held.due(time.time())
    await badge.show(tls.address, "host rank 0")
    assert badge._held.certificate != first.certificate
    hub.admission._ledger.holders.clear()
    badge._held = held = Credentials(first.key, badge._held.certificate, first.authority, 0.0)
    assert await badge.show(tls.address, "host rank 0") is not None
    assert badge._held is held
    other = Badge(badge.token)
    with pytest.raises(RefusedError, match="has expired"):
        await other.show(tls.address, "host rank 0")


async def test_renewal_over_a_stolen_connection_is_for_the_key_of_its_certificate(tls):
    """Also at a hub that has lost its ledger: it goes by the certificate."""
    hub = await tls.hub_up()
    papers, owner = await bought(tls), Nobody()
    hub.admission._ledger.holders.clear()
    link = await joined(tls, papers, owner=owner)
    other = Credentials(new_key(), papers.certificate, papers.authority, papers.begun)
    link.send(Type.ENROL, {"request": other.request})
    assert "belongs to another key" in str(await owner.over)
    assert not (await knock(tls, papers)).closed
