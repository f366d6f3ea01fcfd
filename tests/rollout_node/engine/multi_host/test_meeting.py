"""Members of an engine go where the lead is and no further, and stand still there. Real sockets on both sides."""

from __future__ import annotations

import asyncio

import pytest
from engine_hosts import LIMIT_S, ONE, THREE, TWO, Host, seen, together, work

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.wire import messages
from p2pcast.wire.connection import Message
from p2pcast.wire.messages import Type
from rollout_node.engine import multi_host_leader
from tests.support.until import until


async def test_members_go_where_the_lead_is_and_no_further(hosts):
    lead, b, c = await together(hosts, "b", "c")
    ahead = asyncio.create_task(b.move(TWO))
    await asyncio.gather(b.says(), c.says())  # all possible moves have happened by now
    assert (b.staged, c.staged) == (ONE, ONE)
    await lead.move(TWO)
    behind = asyncio.create_task(lead.lead.meet(TWO))
    await ahead
    await until(lambda: seen(lead)["b"]["still"])
    assert not behind.done()
    await c.move(TWO)
    await asyncio.wait_for(behind, LIMIT_S)
    assert {n: (m["staged"], m["still"]) for n, m in seen(lead).items()} == {"b": ("0.2", True), "c": ("0.2", True)}
    assert (b.member.status()["still"], lead.lead.status()["meets_at"]) == ("0.2", "0.2")


async def test_hosts_stay_together_under_a_fast_trainer(hosts):
    lead, b, c = await together(hosts, "b", "c")

    async def follow(host: Host) -> None:
        for step in range(2, 40):
            await host.move(Version(0, step))

    followers = [asyncio.create_task(follow(h)) for h in (b, c)]
    for step in range(2, 40):
        version = Version(0, step)
        await lead.move(version)
        await asyncio.wait_for(lead.lead.meet(version), LIMIT_S)
        assert (b.staged, c.staged) == (version, version)
        await b.ask(lambda c, v=version: c.patches(None, v).__exit__(None, None, None))
    await asyncio.gather(*followers)


async def test_a_member_waiting_to_move_obeys_the_latest_order(hosts):
    _, b = await together(hosts, "b")

    def say(version: Version | None, number: int) -> None:
        still = Message(Type.FREEZE, messages.Freeze(version, number))
        b.member.on_link_event(b.member._link, None, still)

    say(None, 50)
    await until(lambda: b.member.status()["still"] is None)
    moving = asyncio.create_task(b.move(TWO))  # runs first, and meets the first order
    asyncio.get_running_loop().call_soon(say, TWO, 52)
    say(ONE, 51)
    await asyncio.wait_for(moving, LIMIT_S)


async def test_a_member_that_is_further_waits_for_the_lead(hosts):
    lead = await hosts("lead", "a", ONE)
    b = await hosts("member", "b", THREE)
    c = await hosts("member", "c", ONE)
    lead.lead.begin()
    for each in (b, c):
        each.member.set_lead(lead.place)
    await until(lambda: all(m["staged"] for m in seen(lead).values()) and len(seen(lead)) == 2)
    await work(lead, b=1, c=2)
    with pytest.raises(RetryableError, match=r"member b \(62626262\) is at version 0.3 already, so 0.1 is skipped"):
        await lead.lead.meet(ONE)
    await c.move(THREE)
    await lead.move(TWO)
    with pytest.raises(RetryableError, match=r"so 0\.2 is skipped"):
        await lead.lead.meet(TWO)
    await lead.move(THREE)
    await asyncio.wait_for(lead.lead.meet(THREE), LIMIT_S)
    assert b.staged == c.staged == THREE


async def test_a_member_without_a_version_is_named(hosts):
    lead, _ = await together(hosts, "b")
    c = await hosts("member", "c")
    c.member.set_lead(lead.place)
    await until(lambda: len(seen(lead)) == 2)
    await work(lead, c=2)
    with pytest.raises(RetryableError, match=r"member c \(63636363\) has no version yet"):
        await asyncio.wait_for(lead.lead.meet(ONE), LIMIT_S)
    await c.move(ONE)
    await until(lambda: seen(lead)["c"]["staged"] == "0.1")
    await asyncio.wait_for(lead.lead.meet(ONE), LIMIT_S)


async def test_a_member_that_does_not_come_is_given_up_and_named(hosts, monkeypatch):
    lead, _, _ = await together(hosts, "b", "c")
    monkeypatch.setattr(multi_host_leader, "PATIENCE_S", 0.05)
    await lead.move(TWO)
    with pytest.raises(
        RetryableError,
        match=r"its members did not reach 0\.2 within 0 s: b \(62626262\) at 0\.1, c \(63636363\) at 0\.1",
    ):
        await lead.lead.meet(TWO)


async def test_workers_get_the_shadow_only_while_held_still(hosts):
    lead, b = await together(hosts, "b")
    with await b.ask(lambda c: c.patches(None, ONE)) as found:
        assert found.dense
    with pytest.raises(RetryableError, match=r"not held still at 0\.2"):
        await b.ask(lambda c: c.patches(None, TWO))
    await lead.move(TWO)
    await until(lambda: b.member.status()["still"] is None)
    with pytest.raises(RetryableError, match=r"not held still at 0\.1"):
        await b.ask(lambda c: c.patches(None, ONE))
