"""Certificates, names, tokens and evictions of a hub, without its sockets."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from parts import HUB, Background, FakeLink, emitted, ident, in_thread, node, record_of

from p2pcast.artifact.run_key import RunKey
from p2pcast.ground import limits
from p2pcast.ground.errors import IntegrityError, LocalError, RefusedError, RemoteError, UsageError
from p2pcast.process.events import Events
from p2pcast.trust.certificates import new_key, request
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire.messages import Type
from trainer_node.admission import admission, trust_state
from trainer_node.admission.admission import Admission
from trainer_node.hub_config import HubConfig
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.peer_session import PeerSession


class Hub:
    """Starts an admission on one folder, as often as a test likes."""

    def __init__(self, folder: Path, background: Background) -> None:
        self.folder, self.background = folder, background
        self.key = RunKey.generate()
        self.joined: set[str] = set()
        self.enforced: list[tuple[frozenset[bytes], list[bytes]]] = []
        self.events = Events()

    def start(self, **options: Any) -> Admission:
        given: dict[str, Any] = {"certificate_s": 1000.0, "token_file": self.folder / "token"}
        config = HubConfig(state=self.folder, shadow=self.folder / "shadow", **given | options)
        joined, later = self.joined.__contains__, self.background
        made = Admission(config, self.key, HUB, self.events, is_joined=joined, later=later, in_thread=in_thread)
        made.trust.observers.append(lambda nodes, signed: self.enforced.append((nodes, signed)))
        return made

    async def enrol(self, made: Admission, name: str = "a", token: JoinToken | None = None) -> FakeLink:
        """A first connection; its certificate, if any, is its link's from then on."""
        link, key = FakeLink(name), new_key()
        link.key = key  # type: ignore[attr-defined]
        hello = record_of(Type.HELLO, token=(token or made.token).ident, role="peer", name=name)
        made.accept(link, hello)
        link.hears(Type.ENROL, request=request(key))
        await self.background.settle()
        if found := link.bodies(Type.ISSUED):
            link.certificate = found[0]["certificate"]
        return link


@pytest.fixture
async def hub(tmp_path: Path, background: Background) -> Hub:
    return Hub(tmp_path, background)


def session(link: FakeLink, token: bytes = b"") -> PeerSession:
    made = PeerSession(link, None, token)
    made.peer = PeerRecord(link.remote.hex(), link.name, "", "host", 1, 0.0)
    return made


# -- certificates


async def test_a_token_buys_a_certificate_that_is_on_disk_first(hub: Hub) -> None:
    made = hub.start()
    link = await hub.enrol(made)
    assert link.certificate is not None
    assert ident("a") in json.loads((hub.folder / "trust.json").read_text())["holders"]
    link.hears(Type.ENROL, request=b"")
    assert "one certificate" in str(link.error)


async def test_no_certificate_without_a_valid_token_or_for_the_hub(hub: Hub) -> None:
    made = hub.start()
    stranger = JoinToken(made.token.run, bytes(len(made.token.secret)), made.token.authority)
    assert isinstance((await hub.enrol(made, token=stranger)).error, RefusedError)
    assert "own name" in str((await hub.enrol(made, "h")).error)
    broken = FakeLink()
    made.accept(broken, record_of(Type.HELLO, token=made.token.ident, role="peer", name="a"))
    broken.hears(Type.ENROL, request=b"?")
    await hub.background.settle()
    assert broken.error is not None


async def test_a_full_disk_costs_the_certificate(hub: Hub, monkeypatch, caplog) -> None:
    made = hub.start()

    async def full() -> None:
        raise LocalError("no space is left")

    monkeypatch.setattr(made.trust, "save", full)
    link = await hub.enrol(made)
    assert link.certificate is None
    assert "no certificate for a: no space is left" in caplog.text


async def test_a_bug_in_issuing_ends_the_link_and_is_raised(hub: Hub, monkeypatch) -> None:
    made = hub.start()

    def broken(*_: object) -> None:
        raise KeyError("by a test")

    monkeypatch.setattr(made._authority, "issue", broken)
    with pytest.raises(KeyError):
        await hub.enrol(made)


async def test_a_peer_renews_its_certificate(hub: Hub) -> None:
    made = hub.start()
    link = await hub.enrol(made)
    renewing = session(link)
    link.owner, renewing._renewing = renewing, True
    made.renew_later(renewing, request(link.key))
    await hub.background.settle()
    assert len(link.bodies(Type.ISSUED)) == 2
    assert not renewing._renewing


async def test_there_are_no_certificates_over_plain_text(hub: Hub) -> None:
    made, link = hub.start(plaintext=True), FakeLink()
    await made.renew(link, b"")
    assert isinstance(link.error, RemoteError)
    assert made.tls is None


async def test_too_many_first_connections_end_the_oldest(hub: Hub, monkeypatch) -> None:
    monkeypatch.setattr(limits, "MAX_HANDSHAKES", 1)
    made, links = hub.start(), [FakeLink("a"), FakeLink("b")]
    for link in links:
        made.accept(link, {})
    assert [link.closed for link in links] == [True, False]


# -- names


async def test_a_peer_is_admitted_by_its_certificate_under_a_free_name(hub: Hub, caplog) -> None:
    made = hub.start()
    first, second = await hub.enrol(made, "a"), await hub.enrol(made, "b")
    assert made.admit(session(first), "x") == "x"
    hub.joined.add(ident("a"))
    assert made.admit(session(second), "x") != "x"
    assert "another node has the name x" in caplog.text
    with pytest.raises(RefusedError, match="no certificate"):
        made.admit(session(FakeLink("c")), "y")
    await hub.background.settle()


async def test_a_certificate_that_the_ledger_lost_is_recorded_again(hub: Hub, caplog) -> None:
    caplog.set_level("INFO")
    made = hub.start()
    link = await hub.enrol(made)
    made.close()
    (hub.folder / "trust.json").unlink()
    again = hub.start()
    again.admit(session(link), "a")
    await hub.background.settle()
    assert "now recorded there" in caplog.text
    assert ident("a") in json.loads((hub.folder / "trust.json").read_text())["holders"]


async def test_over_plain_text_names_alone_are_known(hub: Hub) -> None:
    made = hub.start(plaintext=True)
    assert made.admit(session(FakeLink("a")), "x") == "x"
    await hub.background.settle()


# -- tokens


async def test_a_restart_keeps_the_own_token_until_half_of_its_life(hub: Hub, monkeypatch) -> None:
    made = hub.start(token_ttl_s=100.0)
    first = made.token
    made.own_token.write_now()
    assert (hub.folder / "token").read_text() == f"{first}\n"
    assert hub.start(token_ttl_s=100.0).token == first
    now = own_token_clock(monkeypatch, 60.0)
    assert made.own_token.is_due(now)
    made.beat()
    made.beat()
    await hub.background.settle()
    assert made.token != first
    assert (hub.folder / "token").read_text() == f"{made.token}\n"
    assert not made.own_token.stale


def own_token_clock(monkeypatch, ahead_s: float) -> float:
    """Move the admission's clock."""
    import time

    now = time.time() + ahead_s
    monkeypatch.setattr(trust_state, "time", SimpleNamespace(time=lambda: now, monotonic=time.monotonic))
    return now


async def test_a_token_older_than_its_ledger_is_granted_for_the_rest_of_its_life(hub: Hub) -> None:
    first = hub.start(token_ttl_s=100.0).token
    (hub.folder / "trust.json").unlink()
    again = hub.start(token_ttl_s=100.0)
    assert again.token == first
    assert again.trust.ledger.tokens[first.ident.hex()].own


async def test_a_plain_text_token_never_changes(hub: Hub) -> None:
    made = hub.start(plaintext=True)
    assert not made.own_token.is_due(1e12)
    assert hub.start(plaintext=True).token == made.token
    for work in (made.commands.create, made.commands.list, made.commands.revoke):
        with pytest.raises(UsageError, match="--plaintext"):
            await work({})


async def test_tokens_are_created_listed_and_revoked(hub: Hub) -> None:
    made = hub.start()
    created = await made.commands.create({"role": "trainer", "ttl_s": 60, "uses": 1})
    token = JoinToken.parse(created["token"])
    assert token.ident.hex() == created["id"]
    assert created["id"] in {row["id"] for row in (await made.commands.list({}))["tokens"]}
    answer = await made.commands.revoke({"id": created["id"][:6]})
    assert answer == {"id": created["id"], "revoked": True, "token_file": None}


async def test_revoking_the_own_token_makes_another_token(hub: Hub) -> None:
    made = hub.start()
    first = made.token
    answer = await made.commands.revoke({"id": first.ident.hex()})
    assert answer["token_file"] == str(hub.folder / "token")
    assert made.token != first
    assert (hub.folder / "token").read_text() == f"{made.token}\n"


@pytest.mark.parametrize(
    "body", [{"ttl_s": 0}, {"ttl_s": True}, {"ttl_s": 1e12}, {"uses": 0}, {"uses": 1.5}, {"ttl_s": None}]
)
async def test_tokens_without_sensible_limits_are_not_made(hub: Hub, body) -> None:
    with pytest.raises(UsageError):
        await hub.start().commands.create(body)


# -- evictions


async def test_an_eviction_is_enforced_before_its_write(hub: Hub) -> None:
    made = hub.start()
    link = await hub.enrol(made)
    made.admit(session(link), "a")
    await hub.background.settle()
    order = []
    made.trust.observers.append(lambda nodes, signed: order.append((hub.folder / "evictions.log").exists()))
    answer = await made.commands.evict({"peer": "a"})
    assert order == [False]
    assert (answer["node"], answer["evicted"]) == (ident("a"), True)
    assert answer["revoked_tokens"] == [answer["revoked_token"]], "the token that it had is revoked"
    assert hub.enforced[0][0] == frozenset([node("a")])
    assert node("a") in hub.start().evicted
    assert made.evictions()[0].nodes == [node("a")]
    await made.commands.evict({"peer": "a", "undo": True})
    assert not made.evicted
    assert [e["undone"] for e in emitted(hub.events, "evicted")] == [False, True]


async def test_an_eviction_may_keep_the_token(hub: Hub) -> None:
    made = hub.start()
    made.admit(session(await hub.enrol(made)), "a")
    assert (await made.commands.evict({"peer": "a", "keep_token": True}))["revoked_tokens"] == []


async def test_an_eviction_over_plain_text_states_its_limits(hub: Hub) -> None:
    made = hub.start(plaintext=True)
    made.admit(session(FakeLink("a")), "a")
    assert "can come back under another id" in (await made.commands.evict({"peer": "a"}))["note"]


@pytest.mark.parametrize(("body", "error"), [({}, UsageError), ({"peer": HUB.hex()}, RefusedError)])
async def test_an_eviction_needs_a_peer_that_is_not_the_hub(hub: Hub, body, error) -> None:
    with pytest.raises(error):
        await hub.start().commands.evict(body)


async def test_evictions_that_the_hub_lost_come_back_with_a_peer(hub: Hub, caplog) -> None:
    made = hub.start()
    made.admit(session(await hub.enrol(made)), "a")
    await made.commands.evict({"peer": "a"})
    signed = made.trust.evictions.packed()
    made.close()
    for name in ("evictions.log", "trust.json"):
        (hub.folder / name).unlink()
    again = hub.start()
    assert not again.evicted
    hub.enforced.clear()
    again.learn_evictions(signed)
    assert again.evicted == {node("a")}
    assert len(hub.enforced) == 1
    assert "this hub had lost a statement" in caplog.text
    again.learn_evictions(signed)
    assert len(hub.enforced) == 1, "what is known is no news"
    await hub.background.settle()
    assert node("a") in hub.start().evicted


async def test_a_forged_eviction_is_refused(hub: Hub) -> None:
    other = hub.start()
    other.trust.decide(node("b"), bytes(8), evicted=True, name="b")
    signed = other.trust.evictions.packed()
    hub.key = RunKey.generate()
    hub.folder = hub.folder / "another"
    hub.folder.mkdir()
    with pytest.raises(IntegrityError):
        hub.start().learn_evictions(signed)


# -- in time


async def test_connected_peers_are_noted_and_the_own_certificate_is_renewed(hub: Hub, monkeypatch) -> None:
    made = hub.start(certificate_s=100.0)
    made.admit(session(await hub.enrol(made)), "a")
    await hub.background.settle()
    hub.joined.add(ident("a"))
    leaf = made.leaf
    own_token_clock(monkeypatch, 2 * admission.SEEN_S)
    made.beat()
    await hub.background.settle()
    assert made.leaf != leaf
    assert made.authority
    assert made.secret(made.token.ident) == made.token.secret


async def test_failed_writes_are_retried(hub: Hub, monkeypatch, caplog) -> None:
    made = hub.start()

    async def full() -> None:
        raise LocalError("no space is left")

    monkeypatch.setattr(made.trust, "save", full)
    made.own_token.stale = True
    made.beat()
    await hub.background.settle()
    assert "could not be written to disk" in caplog.text
    made._save_later()
    made._save_later()
    await hub.background.settle()
    assert hub.background.names.count("trust") == 1
    assert made.own_token.stale
