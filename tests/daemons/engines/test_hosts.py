"""An engine on several hosts, with a real hub and real peers but no server: meeting, leads, members and their
permissions. With a server: tests/rollout_node/vllm/test_two_hosts.py.
"""

from __future__ import annotations

import asyncio

import pytest

from p2pcast.ground.errors import P2PCastError, RefusedError
from p2pcast.ground.version import Version
from p2pcast.transport.dial import dial
from p2pcast.transport.link import QuietOwner
from p2pcast.wire import messages
from p2pcast.wire.connection import Identity
from rollout_node.engine import multi_host_member as module
from trainer_node.membership.multi_host_engines import MultiHostEngines

DEADLINE_S = 600.0
NOBODY = ("vllm:http://127.0.0.1:9",)
"""A server that is not there: the lead of its engine has no word from its workers."""


async def pair(swarm):
    await swarm.hub_up()
    member = await swarm.peer_up("b", engine=("big", "member"))
    assert member.engine.member.status()["lead"] is None
    lead = await swarm.peer_up("a", engine=("big", "lead"), targets=NOBODY)
    await met(swarm, lead)
    return lead, member


async def met(swarm, lead, *names: str):
    wanted = list(names or ("b",))
    await swarm.until(
        lambda: [m["name"] for m in lead.engine.lead.status()["members"]] == wanted, f"{wanted} are with {lead}"
    )


async def reported(swarm, lead, version: Version):
    """Lead and member are at the version, and the lead has heard that from the member ``b``."""
    await swarm.until(
        lambda: (
            lead.staged == version
            and ("b", str(version)) in [(m["name"], m["staged"]) for m in lead.engine.lead.status()["members"]]
        ),
        f"both are at {version}",
    )


async def installed(swarm, peer, version: str):
    await swarm.until(lambda: peer.runners[0].holds(Version.parse(version)), f"{version} is installed")


async def test_a_member_finds_its_lead_through_the_hub_and_holds_its_version(swarm, states):
    lead, member = await pair(swarm)
    state = states.first()
    swarm.publish(1, state)
    await installed(swarm, member, "0.1")  # the lead has not said yet how far
    lead.engine.lead.begin()
    await swarm.until(lambda: member.engine.member.status()["still"] == "0.1", "it stands")
    for step in (2, 3, 4):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.until(lambda s=step: lead.staged == member.staged == Version(0, s), "both are there")
    await installed(swarm, member, "0.4")
    swarm.check(member, 4)
    await swarm.until(lambda: member.engine.member.status()["still"] == "0.4", "it stands again")
    assert lead.engine.lead.status()["members"][0]["staged"] == "0.4"


async def test_lead_and_member_show_the_engines_state(swarm, states):
    lead, member = await pair(swarm)
    swarm.publish(1, states.first())
    await installed(swarm, member, "0.1")
    assert await swarm.get(member, "/readyz") == (503, "not ready: engine big: no verified weights yet\n")
    code, _ = await swarm.get(member, "/wait?version=0.1&what=live&timeout_s=0")
    assert code == 408
    say, lead.engine.lead.set_serving = (
        lead.engine.lead.set_serving,
        lambda *_: None,
    )  # the runner, which finds no server, would report otherwise
    say(Version(0, 1), True)
    await swarm.until(lambda: member.engine.member.ready, "the member knows")
    assert (await swarm.get(member, "/readyz"))[0] == 200
    assert (await swarm.get(member, "/wait?version=0.1&what=live&timeout_s=0"))[0] == 200
    shown = (await swarm.status(member))["engine"]
    assert (shown["role"], shown["connected"], shown["serves"], shown["lead"]["node"]) == (
        "member",
        True,
        "0.1",
        lead.ident.hex(),
    )
    shown = (await swarm.status(lead))["engine"]
    assert (shown["role"], [m["name"] for m in shown["members"]]) == ("lead", ["b"])
    await swarm.until(
        lambda: next(p for p in swarm.hub.control.view.status()["peers"] if p["name"] == "b")["committed"] == "0.1",
        "the hub knows",
    )
    await swarm.down(lead)
    await swarm.until(lambda: not member.engine.member.connected, "the lead is missed")
    assert await swarm.get(member, "/readyz") == (503, "not ready: engine big: its lead is out of reach\n")


async def test_a_peer_without_an_engine_refuses_members(swarm):
    _, member = await pair(swarm)

    class Nobody(QuietOwner):
        closed: list[P2PCastError | None]

        def on_link_closed(self, link, error):
            self.closed.append(error)

    for listener in (swarm.hub.control.listener, member.startup.listener):
        nobody = Nobody()
        nobody.closed = []
        identity = Identity(b"n" * 16, "nobody", listener._identity.token)
        try:
            await dial(nobody, *listener.address, identity, purpose="engine", role="member")
        except P2PCastError as error:  # before the dialler has noticed that it is through
            nobody.closed = [error]
        await swarm.until(lambda n=nobody: n.closed, "it is shown out")
        assert isinstance(nobody.closed[0], RefusedError)
        assert "leads no engine" in str(nobody.closed[0])


async def test_a_second_lead_is_refused_and_the_first_goes_on(swarm):
    lead, member = await pair(swarm)
    second = swarm.peer_begun("c", engine=("big", "lead"), targets=NOBODY)
    error = await swarm.ended(second)
    assert isinstance(error, RefusedError)
    assert "engine big has a lead already" in str(error)
    assert member.engine.member.connected
    other = await swarm.peer_up("c", engine=("small", "lead"), targets=NOBODY)
    assert other.engine.lead.status()["members"] == []
    await met(swarm, lead)


async def test_lead_and_member_stay_together_without_the_hub(swarm):
    lead, member = await pair(swarm)
    link = member.engine.member._link
    await swarm.down(swarm.hub)
    await swarm.until(
        lambda: not member.startup.hub_session.connected and not lead.startup.hub_session.connected, "the hub is missed"
    )
    await swarm.hub_up()
    await swarm.until(
        lambda: member.startup.hub_session.connected and lead.startup.hub_session.connected, "both are back"
    )
    await met(swarm, lead)
    assert member.engine.member._link is link
    assert not link.closed


async def test_a_member_started_without_the_hub_dials_its_saved_lead(swarm):
    lead, member = await pair(swarm)
    await swarm.down(swarm.hub)
    await swarm.down(member)
    await swarm.until(lambda: not lead.engine.lead.status()["members"], "the lead has lost it")
    await swarm.peer_up("b", engine=("big", "member"))
    await met(swarm, lead)


async def test_a_lead_that_comes_back_elsewhere_is_found_again(swarm):
    lead, member = await pair(swarm)
    before = member.engine.member.status()["lead"]
    await swarm.down(lead)
    lead = await swarm.peer_up("a", engine=("big", "lead"), targets=NOBODY)
    await met(swarm, lead)
    after = member.engine.member.status()["lead"]
    assert (before["node"], before["address"] != after["address"]) == (after["node"], True)


@pytest.mark.parametrize("given", [False, True])
async def test_without_a_lead_a_member_follows_the_run_unless_its_shadow_is_being_read(
    swarm, states, monkeypatch, given
):
    monkeypatch.setattr(module, "STAND_S", 0.05)
    lead, member = await pair(swarm)
    state = states.first()
    swarm.publish(1, state)
    await installed(swarm, member, "0.1")
    await swarm.until(lambda: lead.staged == Version(0, 1), "the lead is there")
    lead.engine.lead.begin()
    await swarm.until(lambda: member.engine.member.status()["still"] == "0.1", "it stands")
    if given:
        assert member.engine.provider.patches(None, Version(0, 1)) == member.shadow.path
    await swarm.down(lead)
    swarm.publish(2, states.trained(state, 2))
    if given:
        await swarm.until(
            lambda: any(h.finished and h.open.version.step == 2 for h in member.node.holdings.values()), "it came in"
        )
        assert member.staged == Version(0, 1)
        monkeypatch.setattr(module, "READ_S", 0.0)
        member.engine.member.moved()
    await installed(swarm, member, "0.2")
    swarm.check(member, 2)


# -- a stolen peer


REPORT = {"engine": "e", "rank": 0, "phase": "init", "version": None, "error": None}


async def worked(swarm, lead, *members):
    """Each member's worker answers its server's question: ranks 0, 1, …"""
    with lead.engine.socket.expect(lambda r: r["phase"] == "init", len(members)):
        for rank, member in enumerate(members):
            member.engine.member.report(REPORT | {"rank": rank})
        ranks = [[rank] for rank, _ in enumerate(members)]
        await swarm.until(
            lambda: [m["ranks"] for m in lead.engine.lead.status()["members"] if m["ranks"]] == ranks, "ranks are known"
        )


@pytest.mark.parametrize("joined", [False, True])
async def test_a_peer_that_joined_as_no_member_is_none(swarm, joined):
    swarm.plaintext = not joined
    lead, member = await pair(swarm)
    thief = await swarm.peer_up("t") if joined else None
    identity = (
        thief.startup.listener._identity
        if thief
        else Identity(b"n" * 16, "thief", lead.startup.listener._identity.token)
    )
    tls = thief.startup.certificate.tls.client if thief else None

    class Thief(QuietOwner):
        error: P2PCastError | None = None

        def on_link_closed(self, link, error):
            self.error = error

    nobody = Thief()
    try:
        await dial(nobody, *lead.startup.listener.address, identity, purpose="engine", role="member", tls=tls)
    except P2PCastError as error:
        nobody.error = error
    await swarm.until(lambda: nobody.error is not None, "it is shown out")
    assert isinstance(nobody.error, RefusedError)
    assert "the hub names no such member of engine big" in str(nobody.error)
    shown = (await swarm.status(lead))["engine"]
    assert shown["named"] == [member.ident.hex()]
    assert [m["node"] for m in shown["members"]] == [member.ident.hex()]


async def test_a_peer_that_claims_to_be_a_member_neither_stalls_nor_speaks_for_the_engine(swarm, states):
    """The peer joined with the engine's name and without a worker, has no version, reports ranks, and leaves."""
    lead, member = await pair(swarm)
    await worked(swarm, lead, member)
    thief = await swarm.peer_up("t", engine=("big", "member"))
    await met(swarm, lead, "b", "t")
    swarm.publish(1, states.first())
    await reported(swarm, lead, Version(0, 1))
    lead.engine.lead.begin()
    thief.engine.member._send_standing = lambda: None
    thief.engine.member._link.send(messages.Held(version=(0, 7), still=False, round=0))
    thief.engine.member.report(REPORT)
    with lead.engine.socket.expect(lambda r: r.get("nonce") == "secret", 1) as expectation:
        thief.engine.member.report(REPORT | {"nonce": "guess"})
        async with asyncio.timeout(DEADLINE_S):
            await lead.engine.lead.meet(Version(0, 1))
        await swarm.down(thief)
        await met(swarm, lead, "b")
        lead.engine.lead.require()
        assert lead.engine.lead.status()["members"][0]["ranks"] == [0]
        member.engine.member.report(REPORT | {"nonce": "secret"})
        assert len(await expectation.wait(DEADLINE_S)) == 1


async def test_a_lead_knows_its_members_without_the_hub(swarm, monkeypatch):
    lead, member = await pair(swarm)
    await swarm.until(lambda: lead.startup.state_file["members"] is not None, "it is told")
    await swarm.down(lead)
    monkeypatch.setattr(MultiHostEngines, "changed_rosters", lambda self: iter(()))
    lead = await swarm.peer_up("a", engine=("big", "lead"), targets=NOBODY)
    assert lead.engine.lead.status()["named"] == [member.ident.hex()]
    await met(swarm, lead)
    assert not lead.engine.lead._any_node


async def test_a_hub_without_lead_addresses_is_of_an_older_release(swarm, monkeypatch):
    monkeypatch.setattr(MultiHostEngines, "changed_rosters", lambda self: iter(()))
    lead, _ = await pair(swarm)
    assert lead.engine.lead.status()["named"] is None
    assert lead.engine.lead._any_node


async def test_the_place_of_a_lead_that_is_away_is_kept_also_by_a_hub_that_was_restarted(swarm):
    swarm.plaintext = False
    lead, member = await pair(swarm)
    await swarm.until(lambda: swarm.hub.state.state_file["leads"] == {"big": lead.ident.hex()}, "it is written")
    await swarm.down(lead)
    for restart in (False, True):
        if restart:
            await swarm.down(swarm.hub)
            await swarm.hub_up()
        thief = swarm.peer_begun("t", engine=("big", "lead"), targets=NOBODY)
        error = await swarm.ended(thief)
        assert isinstance(error, RefusedError)
        assert "its name is kept" in str(error)
    lead = await swarm.peer_up("a", engine=("big", "lead"), targets=NOBODY)
    await met(swarm, lead)
    await swarm.down(lead)
    code, _ = await swarm.post(swarm.hub, "/evict", {"peer": lead.ident.hex(), "keep_token": True})
    assert code == 200
    other = await swarm.peer_up("c", engine=("big", "lead"), targets=NOBODY)
    await met(swarm, other)
    assert member.engine.member.status()["lead"]["node"] == other.ident.hex()
