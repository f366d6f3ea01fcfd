"""Members whose lead is lost, silent, or back at another place."""

from __future__ import annotations

import asyncio

from engine_hosts import LIMIT_S, ONE, THREE, TWO, seen, together

from rollout_node.engine import multi_host_leader, multi_host_member
from tests.support.until import until


async def test_without_a_lead_members_go_on_after_a_while(hosts, monkeypatch):
    lead, b = await together(hosts, "b")
    monkeypatch.setattr(multi_host_member, "STAND_S", 0.05)
    await lead.down()
    await asyncio.wait_for(b.move(TWO), LIMIT_S)
    assert b.member.status()["still"] is None
    assert not b.member.ready


async def test_a_shadow_that_a_worker_may_be_reading_stays_much_longer(hosts, monkeypatch):
    lead, b = await together(hosts, "b")
    monkeypatch.setattr(multi_host_member, "STAND_S", 0.0)
    await b.ask(lambda c: c.patches(None, ONE).__exit__(None, None, None))
    await lead.down()
    await until(lambda: not b.member.connected)
    moving = asyncio.create_task(b.move(TWO))
    await b.says()
    assert b.member.status()["still"] == "0.1"
    assert not moving.done()
    again = await hosts("lead", "a2", THREE, node=lead.identity.node)
    b.member.set_lead(again.place)
    await until(lambda: "b" in seen(again))
    await b.says()
    assert not moving.done()  # the engine has not answered yet, so the worker may still be reading
    again.lead.begin()
    await asyncio.wait_for(moving, LIMIT_S)
    await b.move(THREE)
    await asyncio.wait_for(again.lead.meet(THREE), LIMIT_S)


async def test_members_find_a_lead_that_came_back_elsewhere(hosts):
    lead, b = await together(hosts, "b")
    lead.lead.set_serving(ONE, True)
    await until(lambda: b.member.serves == ONE and b.member.ready)
    again = await hosts("lead", "new", ONE)
    again.lead.begin()
    b.member.set_lead(None)
    assert b.member.connected
    b.member.set_lead(again.place)
    await until(lambda: "b" in seen(again) and "b" not in seen(lead))
    await asyncio.wait_for(again.lead.meet(ONE), LIMIT_S)
    await until(lambda: b.member.serves is None)
    assert not b.member.ready
    again.lead.set_serving(TWO, True)
    await until(lambda: b.member.serves == TWO and b.member.ready)


async def test_a_lead_that_falls_silent_is_left(hosts, monkeypatch):
    monkeypatch.setattr(multi_host_member, "SILENCE_S", 0.2)
    monkeypatch.setattr(multi_host_member, "CHECK_S", 0.01)
    monkeypatch.setattr(multi_host_leader, "BEAT_S", 3600.0)
    lead = await hosts("lead", "a", ONE)
    b = await hosts("member", "b", ONE)
    b.member.set_lead(lead.place)
    await until(lambda: "silent" in str(b.member.status()["error"]))
