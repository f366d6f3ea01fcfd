"""A run with TLS, from the first connection to evictions: a hub, peers and attackers."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from lost_answers import withholding
from unknown_nodes import NODE, Nobody, at, bought, knock, token_of

from p2pcast.artifact.run_key import RunKey
from p2pcast.ground.errors import LocalError, RefusedError, RetryableError, UntrustedError, UsageError
from p2pcast.process.events import Events
from p2pcast.transport.dial import dial
from p2pcast.transport.listener import Listener
from p2pcast.trust.certificates import new_key, request, valid_at
from p2pcast.trust.credentials import Credentials, pinned
from p2pcast.trust.dial_permissions import BOUGHT
from p2pcast.trust.join_token import JoinToken
from p2pcast.trust.tls_contexts import first_contact
from p2pcast.wire import messages
from p2pcast.wire.connection import Identity
from trainer_node.admission import trust_state
from trainer_node.admission.admission import Admission
from trainer_node.hub_config import HubConfig


async def test_a_run_behind_tls(tls, states):
    """Versions arrive in chains of peers, all links behind TLS, and a hub that comes back is known again by its
    authority.
    """
    hub = await tls.hub_up(chains=1)
    a, b = await tls.peers_up("a", "b")
    state = states.first()
    tls.publish(0, state)
    await tls.live("0.0")
    tls.publish(1, states.trained(state, 1))
    await tls.live("0.1")
    for daemon in (hub, a, b):
        for link in daemon.node.downstream.children:
            assert link.stripes[0]._transport.get_extra_info("ssl_object").version() == "TLSv1.3"
    token = str(hub.token)
    await tls.down(hub)
    again = await tls.hub_up(chains=1)
    assert str(again.token) == token
    tls.publish(2, states.trained(state, 2))
    await tls.live("0.2")
    document = await tls.status(again)
    assert document["security"] == "tls"
    assert (await tls.status(a))["certificate_until"] > time.time()


async def test_a_certificate_outlasts_its_token_and_is_issued_once(tls):
    hub = await tls.hub_up()
    peer = await tls.peer_up("a")
    before = (tls.folder / "a" / "link.pem").read_bytes()
    config = tls.peer_config("a")
    await tls.down(peer)
    (ident,) = (t["id"] for t in (await hub.state.admission.commands.list({}))["tokens"])
    await hub.state.admission.commands.revoke({"id": ident})
    again = tls.peer_begun("a", token=config.token)
    back = await tls.answers(again)
    assert (tls.folder / "a" / "link.pem").read_bytes() == before
    with pytest.raises(RefusedError, match=r"not one that|was revoked"):
        await bought(tls, token=config.token)
    assert token_of(tls) != config.token, "the hub has a new one, in the same file"
    await bought(tls)
    assert back.startup.certificate is not None


async def test_a_peer_whose_first_answer_is_lost_joins_with_its_key_and_one_admission(tls):
    """A proxy withholds the certificate that the hub has issued. The peer ends, and starts again."""
    hub = await tls.hub_up()
    records = hub.state.admission.trust.ledger
    async with withholding(tls.address, lambda: bool(records.holders), once=False) as proxy:
        daemon = tls.peer_begun("a", hub=proxy.address)
        await asyncio.wait_for(proxy.withheld.wait(), 60)
        await tls.down(daemon)
    [(node, known)] = records.holders.items()
    assert not (tls.folder / "a" / "link.pem").exists()
    peer = await tls.peer_up("a")
    await tls.until(lambda: peer.startup.hub_session.connected, "it has joined")
    assert [*records.holders] == [node]
    assert records.holders[node].key == known.key
    assert records.tokens[token_of(tls).ident.hex()].used == 1


@pytest.mark.parametrize(("days", "at_start"), [(30, False), (400, True)])
async def test_a_hub_whose_clock_was_ahead_takes_peers_once_the_clock_is_right(tls, monkeypatch, days, at_start):
    """The hub's certificate, or the authority of the run, was made by the wrong clock."""
    ahead = SimpleNamespace(time=lambda: time.time() + 86400.0 * days, monotonic=time.monotonic)
    hub = None if at_start else await tls.hub_up()
    with monkeypatch.context() as patched:
        first = None if hub is None else hub.state.admission.leaf
        patched.setattr(trust_state, "time", ahead)
        hub = hub or await tls.hub_up()
        admission = hub.state.admission
        await tls.until(lambda: admission.leaf != first, "the hub has a certificate by the wrong clock")
        wrong = admission.leaf
        assert not valid_at(wrong, time.time())
    assert admission.leaf != wrong or not admission.healthy()[0]
    await tls.until(lambda: admission.leaf != wrong, "it has one by the right clock")
    assert await tls.get(hub, "/healthz") == (200, "ok\n")
    peer = await tls.peer_up("a")
    await tls.until(lambda: peer.startup.hub_session.connected, "the peer has joined")


@pytest.mark.parametrize("days", [400, -400])
async def test_a_clock_that_is_wrong_for_a_moment_forgets_no_admission(tls, monkeypatch, days):
    """A token is made meanwhile, at which records are looked through; it does not live as long as the clock was off."""
    hub = await tls.hub_up()
    peer = await tls.peer_up("a")
    ident, commands, ledger = peer.ident.hex(), hub.state.admission.commands, hub.state.admission.trust.ledger
    first = (await commands.create({"ttl_s": 3600}))["id"]
    await tls.down(peer)
    wrong = SimpleNamespace(time=lambda: time.time() + 86400.0 * days, monotonic=time.monotonic)
    with monkeypatch.context() as patched:
        patched.setattr(trust_state, "time", wrong)
        made = (await commands.create({"ttl_s": 60}))["id"]
        assert {ident} <= ledger.holders.keys()
        assert {first, made} <= ledger.tokens.keys()
        [said] = (await tls.status(hub))["unready"]
        assert (said["level"], "clock has jumped" in said["words"]) == ("watch", True)
    await commands.create({})
    assert (await tls.status(hub))["unready"] == []
    jumps = [dict(e.facts) for e in hub.state.events.after(0, 1000)[1] if e.kind == "clock_jumped"]
    assert [round((jump["shown"] - jump["expected"]) / 86400) for jump in jumps] == [days, -days]
    rows = {row["id"]: row for row in (await commands.list({}))["tokens"]}
    assert rows[first]["usable"]
    assert made not in rows or rows[made]["expires"] <= time.time() + 60
    back = await tls.peer_up("a")
    await tls.until(lambda: back.startup.hub_session.connected, "the peer is back")
    assert hub.state.admission.trust.ledger.holders[ident].key


async def test_certificates_are_renewed_while_running(tls):
    """Links begun afterwards are with the new ones of hub and peer."""
    hub = await tls.hub_up(certificate_s=24.0)
    peer = await tls.peer_up("a")
    first, session = peer.startup.certificate.until, peer.startup.hub_session

    def shown() -> set[bytes]:
        sessions = hub.state.sessions.values() if session.connected else ()
        return {link.certificate for one in sessions for link in (one.link, session._link)}

    old = shown()
    await tls.until(lambda: peer.startup.certificate.until > first, "the peer's certificate is renewed")
    await tls.until(lambda: hub.state.admission.leaf not in old, "the hub's is renewed")
    assert shown() == old, "the link stays"
    session._link.abort(RetryableError("cut"))
    await tls.until(lambda: len(shown() - old) == 2, "it is back with other certificates")
    assert Credentials.load(tls.folder / "a" / "link.pem").until > first
    assert hub.state.admission.trust.ledger.tokens[token_of(tls).ident.hex()].used == 1


async def test_a_peer_with_an_expired_certificate_enrols_again(tls):
    """The hub was away for longer than a certificate lasts."""
    hub = await tls.hub_up(certificate_s=10.0)
    peer = await tls.peer_up("a")
    first = peer.startup.certificate.until
    await tls.down(hub)
    await tls.until(lambda: time.time() > first, "its certificate is over")
    await tls.hub_up()
    await tls.until(lambda: peer.startup.hub_session.connected, "it is back")
    assert peer.startup.certificate.until > first + 60


def admission(folder: Path, key: RunKey, ident: bytes) -> Admission:
    """Another hub's, without its hub."""
    return Admission(
        HubConfig(state=folder, shadow=folder / "shadow", certificate_s=60), key, ident, Events(),
        is_joined=lambda node: False, later=lambda work, name, *, vital=True: work.close(), in_thread=asyncio.to_thread,
    )  # fmt: skip


async def test_an_impostor_at_the_hubs_address_ends_no_peer(tls):
    """Another node answers at the hub's address: the peer keeps running, and reconnects when the hub returns."""
    hub = await tls.hub_up()
    peer = await tls.peer_up("a")
    await tls.down(hub)
    other = admission(tls.folder, RunKey.generate(), b"o" * 16)
    tries = 0

    class Impostor(Nobody):
        def accept_link(self, link, hello): ...

    listener = Listener(Impostor(), other.identity, other.tls.server)
    made = listener._protocol

    def factory():
        nonlocal tries
        tries += 1
        return made()

    listener._protocol = factory
    await listener.start(*tls.address)
    await tls.until(lambda: tries >= 3, "it has tried, and tried again")
    await listener.stop()
    again = await tls.hub_up()
    await tls.until(lambda: bool(again.state.sessions), "it is back")
    assert peer.startup.hub_session.connected


# -- refused strangers


async def test_a_peer_publishes_nothing_and_is_no_hub(tls):
    await tls.hub_up()
    peer = await tls.peer_up("a")
    papers = await bought(tls)
    with pytest.raises(RefusedError, match="a peer's certificate is not for a publish connection"):
        await knock(tls, papers, purpose="publish", role="rank")
    with pytest.raises(UntrustedError, match="a peer answers"):
        await knock(tls, papers, at=at(peer), purpose="control", role="peer")
    with pytest.raises(RefusedError, match="another node's"):
        await knock(tls, papers, node=peer.ident, purpose="control", role="peer")


async def test_a_trainer_publishes_and_does_nothing_else(tls):
    await tls.hub_up()
    papers = await bought(tls, role="trainer")
    link = await knock(tls, papers, purpose="publish", role="rank")
    assert not link.closed
    link.close()
    for purpose, role in (("control", "peer"), ("data", "child")):
        with pytest.raises(RefusedError, match="a trainer's certificate"):
            await knock(tls, papers, purpose=purpose, role=role)


async def test_a_made_token_is_for_its_role_alone(tls):
    """This holds on the hub's own machine too, where the hub's own token serves peers and trainers."""
    hub = await tls.hub_up()
    made = {r: JoinToken.parse((await hub.state.admission.commands.create({"role": r}))["token"]) for r in BOUGHT}
    for role, other in zip(BOUGHT, (*BOUGHT[1:], BOUGHT[0]), strict=True):
        await bought(tls, node=role.encode().ljust(16), role=role, token=made[role])
        with pytest.raises(RefusedError, match=f"admits as {role}, not as {other}"):
            await bought(tls, node=b"z" * 16, role=other, token=made[role])


async def test_a_stolen_name_is_not_given_twice(tls):
    hub = await tls.hub_up()
    peer = await tls.peer_up("a")
    with pytest.raises(RefusedError, match="belongs to another key"):
        await bought(tls, node=peer.ident)
    with pytest.raises(RefusedError, match="hub's own name"):
        await bought(tls, node=hub.ident)


async def test_renewal_is_for_the_same_key(tls):
    await tls.hub_up()
    papers, owner = await bought(tls), Nobody()
    link = await knock(tls, papers, purpose="control", role="peer", owner=owner)
    link.send(messages.Join(name="x", region="", listen=("", 1), held=None, engine=None))
    other = Credentials(new_key(), papers.certificate, papers.authority, papers.begun)
    link.send(messages.Enrol(other.request))
    assert "belongs to another key" in str(await owner.over)


async def test_one_connection_gives_one_certificate(tls):
    hub = await tls.hub_up()
    owner, key = Nobody(), new_key()
    token = token_of(tls)

    def verify_authority(leaf, shown):
        return pinned(leaf, shown, token.authority, token.run, time.time())

    identity = Identity(NODE, "x", token, verify_authority=verify_authority)
    link = await dial(owner, *tls.address, identity, purpose="enrol", role="peer", tls=first_contact())
    for _ in range(2):
        link.send(messages.Enrol(request(key)))
    assert "one connection, one certificate" in str(await owner.over)
    assert len(hub.state.admission.trust.ledger.holders) <= 1


async def test_a_token_is_made_on_the_hubs_own_machine_alone(tls):
    """Elsewhere its secret would go over HTTP; the bearer does not help."""
    hub = await tls.hub_up()
    (route,) = (r for r in hub.http._app.router.routes() if r.resource.canonical == "/token/create")
    here = SimpleNamespace(get_extra_info=lambda _: ("192.0.2.1", 7078))
    for transport in (here, None):
        with pytest.raises(RefusedError, match="HTTP is not encrypted"):
            await route.handler(SimpleNamespace(remote="192.0.2.7", transport=transport))


async def test_an_address_of_the_hubs_machine_is_the_hubs_own_machine(tls):
    hub = await tls.hub_up()
    (route,) = (r for r in hub.http._app.router.routes() if r.resource.canonical == "/token/create")

    async def parts():
        yield b"{}"

    here = SimpleNamespace(get_extra_info=lambda _: ("192.0.2.7", 7078))
    body = {"content_length": 2, "content": SimpleNamespace(iter_any=parts)}
    assert (await route.handler(SimpleNamespace(remote="192.0.2.7", transport=here, **body))).status == 200


@pytest.mark.parametrize(
    "body",
    [{"role": "hub"}, {"role": "root"}, {"ttl_s": -1}, {"ttl_s": "x"}, {"uses": 0}, {"uses": True}, {"ttl_s": None}],
)
async def test_tokens_that_make_no_sense_are_not_made(tls, body):
    hub = await tls.hub_up()
    assert (await tls.post(hub, "/token/create", body))[0] == 400


async def test_tokens_expire_are_used_up_and_revoked(tls):
    hub = await tls.hub_up()
    status, text = await tls.post(hub, "/token/create", {"uses": 1})
    assert status == 200
    once = JoinToken.parse(json.loads(text)["token"])
    await bought(tls, token=once)
    with pytest.raises(RefusedError, match="used up"):
        await bought(tls, node=b"2" * 16, token=once)
    short = JoinToken.parse(json.loads((await tls.post(hub, "/token/create", {"ttl_s": 0.05}))[1])["token"])
    made = time.time()
    await tls.until(lambda: time.time() > made + 0.05, "it has expired")
    with pytest.raises(RefusedError, match="has expired"):
        await bought(tls, node=b"3" * 16, token=short)
    made_ = json.loads((await tls.post(hub, "/token/create", {"ttl_s": None, "uses": 9}))[1])
    assert (await tls.post(hub, "/token/revoke", {"id": made_["id"][:8]}))[0] == 200
    with pytest.raises(RefusedError, match="revoked"):
        await bought(tls, node=b"4" * 16, token=JoinToken.parse(made_["token"]))
    rows = json.loads((await tls.post(hub, "/token/list", {}))[1])["tokens"]
    assert {r["fault"] for r in rows} >= {None, "is used up", "was revoked"}


# -- evictions


async def test_an_evicted_node_is_disconnected_and_refused(tls, states):
    """Children and parent refuse the node too, across restarts of hub and peers, with any token."""
    hub = await tls.hub_up(chains=1)
    a, b, c = await tls.peers_up("a", "b", "c")
    state = states.first()
    tls.publish(0, state)
    await tls.live("0.0")
    token, papers = token_of(tls), Credentials.load(tls.folder / "b" / "link.pem")
    answer = await hub.state.admission.commands.evict({"peer": "b"})
    assert isinstance(await tls.ended(b), RefusedError)
    assert answer["revoked_token"] == token.ident.hex()
    await tls.until(lambda: all(b.ident in p.startup.eviction_log.evictions.nodes for p in (a, c)), "all have heard")
    assert [e.facts["peer"] for e in hub.events.after(0)[1] if e.kind == "evicted"] == ["b"]
    for place in (tls.address, at(a), at(c)):
        with pytest.raises(RefusedError, match="evicted"):
            await knock(tls, papers, at=place)
    with pytest.raises(RefusedError, match=r"not one that|revoked"):
        await bought(tls, node=b"m" * 16, token=token)
    tls.publish(1, states.trained(state, 1))
    await tls.live("0.1", a, c)
    await tls.down(a)
    await tls.down(hub)
    hub = await tls.hub_up(chains=1)
    a = await tls.peer_up("a")
    for place in (tls.address, at(a)):
        with pytest.raises(RefusedError, match="evicted"):
            await knock(tls, papers, at=place)
    with pytest.raises(RefusedError, match="evicted"):
        await bought(tls, node=b.ident)
    assert (await tls.status(hub))["evicted"] == [b.ident.hex()]
    await hub.state.admission.commands.evict({"peer": "b", "undo": True})
    await tls.until(lambda: not a.startup.eviction_log.evictions.nodes, "all have heard")
    assert not (await knock(tls, papers, at=at(a))).closed


async def test_peers_refuse_the_evicted_while_the_hub_is_away(tls, states):
    """A peer that starts meanwhile, from the mirror, refuses them too."""
    mirror = f"file://{tls.folder}/mirror"
    hub = await tls.hub_up(mirror=mirror)
    tls.publish(0, states.first())
    a = await tls.peer_up("a", mirror=mirror)
    await tls.live("0.0")
    papers, standing = await bought(tls), Nobody()
    await knock(tls, papers, at=at(a), owner=standing)
    await hub.state.admission.commands.evict({"peer": papers.who.node.hex()})
    assert "evicted" in str(await standing.over), "what it had with others than the hub is closed too"
    await tls.until(lambda: NODE.hex() in (tls.folder / "a" / "evictions.log").read_text(), "it has kept it")
    await tls.down(hub)
    with pytest.raises(RefusedError, match="evicted"):
        await knock(tls, papers, at=at(a))
    await tls.down(a)
    again = await tls.peer_up("a", mirror=mirror)
    with pytest.raises(RefusedError, match="evicted"):
        await knock(tls, papers, at=at(again))


async def test_an_eviction_in_plain_text_states_its_limits(swarm):
    hub = await swarm.hub_up()
    a, b = await swarm.peers_up("a", "b")
    status, text = await swarm.post(hub, "/evict", {"peer": "b"})
    assert status == 200
    assert "plain text" in json.loads(text)["note"]
    assert isinstance(await swarm.ended(b), RefusedError)
    await swarm.until(lambda: b.ident in a.startup.eviction_log.evictions.nodes, "it has heard")
    assert (await swarm.post(hub, "/token/create", {}))[0] == 400


async def test_evicting_an_unknown_node(tls):
    hub = await tls.hub_up()
    assert (await tls.post(hub, "/evict", {"peer": "who"}))[0] == 409
    assert (await tls.post(hub, "/evict", {}))[0] == 400


# -- secrets


async def test_a_plaintext_peer_and_a_tls_hub_do_not_mix(tls):
    await tls.hub_up()
    error = await tls.ended(tls.peer_begun("a", plaintext=True))
    assert isinstance(error, UsageError)
    assert "leave --plaintext out" in str(error)


async def test_no_secret_is_shown_and_key_files_are_private(tls, states, caplog):
    """Logs, /status, /metrics, /events and the ledger's rows of hub and peers against every secret there is; then every
    file that holds one.
    """
    caplog.set_level("DEBUG")
    hub = await tls.hub_up()
    a = await tls.peer_up("a")
    tls.publish(0, states.first())
    await tls.live("0.0")
    made = json.loads((await tls.post(hub, "/token/create", {}))[1])["token"]
    await bought(tls, role="trainer")
    before = hub.token
    await hub.state.admission.commands.evict({"peer": NODE.hex()})
    shown = caplog.text + json.dumps(hub.state.state_file.facts) + json.dumps(a.startup.state_file.facts)
    for daemon in (hub, a):
        for path in ("/status", "/metrics", "/healthz", "/readyz"):
            shown += (await tls.get(daemon, path))[1]
        shown += "".join(repr(vars(e)) if hasattr(e, "__dict__") else repr(e) for e in daemon.events.after(0)[1])
    shown += (await tls.post(hub, "/token/list", {}))[1]
    secret = set()
    for token in (JoinToken.parse(made), before, hub.token, token_of(tls)):
        secret |= {str(token), token.secret.hex(), str(token).split("-")[2], repr(token.secret)[2:-1]}
    secret |= {hub.state.admission.bearer, a.http.access.bearer, (tls.folder / "hub" / "run.key").read_bytes().hex()}
    for path in ("hub/authority.pem", "a/link.pem"):
        secret |= set((tls.folder / path).read_text().splitlines()[1:4])
    assert not [s for s in secret if s in shown]
    for state in ("hub", "a"):
        for file in (
            "authority.pem",
            "link.pem",
            "run.key",
            "token.key",
            "trust.json",
            "evictions.log",
            "http.key",
            "http.token",
            "token",
            "hub.json",
            "published.log",
            "peer.json",
        ):
            path = tls.folder / state / file
            if path.exists():
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((tls.folder / "token").stat().st_mode) == 0o600


async def test_a_peers_bearer_token_does_not_open_the_hub(tls):
    hub = await tls.hub_up()
    a, b = await tls.peers_up("a", "b")
    written = (tls.folder / "a" / "http.token").read_text().strip()
    assert a.http.access.bearer == hub.state.admission.bearer_of(a.ident) == written
    assert len({hub.http.access.bearer, a.http.access.bearer, b.http.access.bearer}) == 3


@pytest.mark.parametrize("name", ["authority.pem", "trust.json", "http.key", "token.key"])
async def test_a_readable_or_damaged_key_file_is_named(tls, name):
    key = RunKey.generate()

    def start() -> Admission:
        return admission(tls.folder, key, NODE)

    token = start().token
    assert start().token == token
    path = tls.folder / name
    path.chmod(0o644)
    with pytest.raises(LocalError, match=f"{name} can be read by others"):
        start()
    path.chmod(0o600)
    path.write_bytes(b"?")
    with pytest.raises(LocalError, match=f"{name} is damaged"):
        start()


async def test_the_commands(tls):
    """As a user types them; the token goes to a file, its secret is on no command line."""
    hub = await tls.hub_up()
    b = await tls.peer_up("b")

    async def p2pcast(*words: object, code: int = 0) -> str:
        command = [sys.executable, "-m", "p2pcast.cli", *map(str, words)]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, env=dict(os.environ), timeout=600
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    state = ("--state", tls.folder / "hub")
    file = tls.folder / "made"
    said = json.loads(await p2pcast("token", "create", *state, "--ttl", "1h", "--uses", 1, "-o", file, "--json"))
    assert "token" not in said
    made = JoinToken.parse(file.read_text())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    await bought(tls, token=made)
    assert made.ident.hex() in await p2pcast("token", "list", *state)
    assert "revoked" in await p2pcast("token", "revoke", said["id"][:6], *state)
    said = await p2pcast("evict", "b", *state)
    assert "is evicted" in said
    assert f"a new token is in {tls.folder / 'token'}" in said
    assert isinstance(await tls.ended(b), RefusedError)
    assert "no node of this run" in await p2pcast("evict", "b2", *state, code=3)
    assert "may join again" in await p2pcast("evict", "b", "--undo", *state)
    assert "no span of time" in await p2pcast("token", "create", *state, "--ttl", "soon", code=2)
    assert hub.state.admission.trust.ledger.rows(time.time())
