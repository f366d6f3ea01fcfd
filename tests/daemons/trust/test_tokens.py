"""Tokens expire, and admitted nodes stay."""

from __future__ import annotations

import json
import time

import pytest
from unknown_nodes import NODE, Nobody, bought, joined, knock, token_of

from p2pcast.ground.errors import LocalError, RefusedError
from p2pcast.ledger_api.trainer_certificate import TrainerCertificate
from p2pcast.trust.certificates import new_key
from p2pcast.trust.credentials import Credentials
from p2pcast.wire import messages


def end(hub, token, at: float) -> None:
    """Set the token's expiry to ``at``."""
    hub.state.admission.trust.ledger.tokens[token.ident.hex()].expires = at


async def test_the_token_file_is_refreshed_long_before_expiry(tls):
    hub = await tls.hub_up()
    first = token_of(tls)
    (row,) = (await hub.state.admission.commands.list({}))["tokens"]
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
    await hub.state.admission.trust.save()
    await tls.down(hub)
    hub = await tls.hub_up()
    assert token_of(tls) == hub.token != second
    await bought(tls, node=b"3" * 16, token=second)


async def test_a_token_file_that_could_not_be_written_is_written_later(tls):
    """Otherwise a reader of the file would get a revoked token."""
    hub = await tls.hub_up()
    first, file = token_of(tls), tls.folder / "token"
    file.unlink()
    file.mkdir()
    with pytest.raises(LocalError):
        await hub.state.admission.commands.revoke({"id": first.ident.hex()})
    file.rmdir()
    hub.state.admission._maintain_at = 0.0
    await tls.until(lambda: file.exists() and token_of(tls) == hub.token != first, "it is there")


async def test_a_token_without_an_end_has_a_count(tls):
    hub = await tls.hub_up()
    made = await hub.state.admission.commands.create({"ttl_s": None, "uses": 2})
    row = next(r for r in (await hub.state.admission.commands.list({}))["tokens"] if r["id"] == made["id"])
    assert (row["expires"], row["uses"]) == (None, 2)


async def test_a_known_node_needs_only_its_key(tls):
    """Certificate and token both expired while the hub was away: the key alone readmits the peer. No other node is
    admitted by that token, or by that node's id.
    """
    hub = await tls.hub_up(certificate_s=10.0)
    a = await tls.peer_up("a")
    token, first = token_of(tls), a.startup.certificate.until
    await tls.down(hub)
    path = tls.folder / "hub" / "trust.json"
    document = json.loads(path.read_text())
    document["tokens"][token.ident.hex()]["expires"] = time.time() - 1
    path.write_text(json.dumps(document))
    await tls.until(lambda: time.time() > max(first, a.startup.certificate.until), "its certificate is over")
    hub = await tls.hub_up()
    assert token_of(tls) != token
    await tls.until(lambda: a.startup.hub_session.connected, "it is back")
    assert a.startup.certificate.until > first + 60
    for node, why in ((NODE, "has expired"), (a.ident, "belongs to another key")):
        with pytest.raises(RefusedError, match=why):
            await bought(tls, node=node, token=token)


async def test_the_key_of_an_evicted_node_is_refused(tls):
    hub = await tls.hub_up()
    key = new_key()
    await bought(tls, key=key)
    await hub.state.admission.commands.evict({"peer": NODE.hex()})
    with pytest.raises(RefusedError, match="evicted"):
        await bought(tls, key=key)


async def test_a_hub_that_lost_its_ledger_renews_its_certificates(tls):
    """The hub recognises certificates that it has issued."""
    hub = await tls.hub_up(certificate_s=40.0)
    a = await tls.peer_up("a")
    await tls.down(hub)
    (tls.folder / "hub" / "trust.json").unlink()
    hub = await tls.hub_up(certificate_s=40.0)
    before = a.startup.certificate.until
    await tls.until(lambda: a.startup.certificate.until > before, "it has been renewed")
    assert a.startup.hub_session.connected
    papers = Credentials.load(tls.folder / "a" / "link.pem")
    assert papers.until == a.startup.certificate.until
    with pytest.raises(RefusedError, match="belongs to another key"):
        await bought(tls, node=a.ident)


async def test_a_refused_renewal_leads_to_a_new_certificate_and_keeps_the_link(tls):
    """A hub of an earlier release that has lost its ledger refuses to renew; the token still admits."""
    hub = await tls.hub_up(certificate_s=30.0)
    a = await tls.peer_up("a")
    ledger = hub.state.admission.trust.ledger
    first, refused = a.startup.certificate.until, 0
    renew = ledger.renew

    def old(*given):
        nonlocal refused
        if not refused:
            refused += 1
            ledger.holders.clear()
        renew(*given)

    ledger.renew = old
    await tls.until(lambda: a.startup.certificate.until > first, "it has another certificate")
    assert refused
    await tls.until(lambda: a.startup.hub_session.connected, "it is back")
    assert ledger.holders[a.ident.hex()].token == a.config.token.ident.hex()


async def test_a_peer_without_renewal_and_without_a_token_stays_while_its_certificate_lasts(tls, caplog):
    hub = await tls.hub_up(certificate_s=30.0)
    a = await tls.peer_up("a")
    await hub.state.admission.commands.revoke({"id": a.config.token.ident.hex()})
    ledger = hub.state.admission.trust.ledger
    held = ledger.holders[a.ident.hex()]

    def old(*_):
        ledger.holders.pop(a.ident.hex(), None)
        raise RefusedError("this hub knows of no certificate of that node: join with a token")

    renew, ledger.renew = ledger.renew, old
    await tls.until(lambda: "no new certificate" in caplog.text, "both were refused")
    await tls.until(lambda: a.startup.hub_session.connected, "it is in")
    ledger.renew = renew
    ledger.holders[a.ident.hex()] = held
    first = a.startup.certificate.until
    await tls.until(lambda: a.startup.certificate.until > first, "it was renewed after all")


async def test_no_loss_of_files_ends_an_admitted_peer(tls, caplog):
    """The hub has lost its ledger and its token, and the peer's certificate has expired, so the hub cannot admit the
    peer. The peer continues, and is readmitted once the files are restored.
    """
    hub = await tls.hub_up(certificate_s=10.0)
    a = await tls.peer_up("a")
    await tls.down(hub)
    state = tls.folder / "hub"
    kept = {name: (state / name).read_bytes() for name in ("trust.json", "token.key")}
    for name in kept:
        (state / name).unlink()
    await tls.until(lambda: time.time() > a.startup.certificate.until, "its certificate is over")
    hub = await tls.hub_up()
    await tls.until(lambda: "not one that this hub gave out" in caplog.text, "it was refused")
    await tls.down(hub)
    for name, contents in kept.items():
        (state / name).write_bytes(contents)
    await tls.hub_up()
    await tls.until(lambda: a.startup.hub_session.connected, "it is in")


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
    """The trainer's token expires, then the ledger is lost: its certificate is renewed, or used until it expires."""
    hub = await tls.hub_up()
    badge = TrainerCertificate(token_of(tls))
    assert await badge.show(tls.address, "host rank 0") is not None
    first = badge._held
    end(hub, badge.token, time.time())
    badge._held = Credentials(first.key, first.certificate, first.authority, 0.0)
    assert badge._held.due(time.time())
    await badge.show(tls.address, "host rank 0")
    assert badge._held.certificate != first.certificate
    hub.state.admission.trust.ledger.holders.clear()
    badge._held = held = Credentials(first.key, badge._held.certificate, first.authority, 0.0)
    assert await badge.show(tls.address, "host rank 0") is not None
    assert badge._held is held
    other = TrainerCertificate(badge.token)
    with pytest.raises(RefusedError, match="has expired"):
        await other.show(tls.address, "host rank 0")


async def test_renewal_over_a_stolen_connection_is_for_the_key_of_its_certificate(tls):
    """A hub that has lost its ledger also renews by the certificate's key."""
    hub = await tls.hub_up()
    papers, owner = await bought(tls), Nobody()
    hub.state.admission.trust.ledger.holders.clear()
    link = await joined(tls, papers, owner=owner)
    other = Credentials(new_key(), papers.certificate, papers.authority, papers.begun)
    link.send(messages.Enrol(other.request))
    assert "belongs to another key" in str(await owner.over)
    assert not (await knock(tls, papers)).closed
