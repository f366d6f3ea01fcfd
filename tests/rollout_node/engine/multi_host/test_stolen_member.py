"""A stolen peer at an engine's lead: its powers as a member, self-declared or named by the hub, and their limits."""

from __future__ import annotations

import asyncio
import dataclasses

import msgpack
import pytest
from engine_hosts import LIMIT_S, ONE, REPORT, THREE, TWO, seen, together, work
from test_joining import HELD, knock, member_of

from p2pcast.ground import limits
from p2pcast.ground.errors import P2PCastError, RefusedError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.wire import messages
from rollout_node.engine import multi_host_leader
from tests.support.until import until

THIEF = b"t" * 16


def reported(**report):
    return messages.WorkerReport(msgpack.packb(REPORT | report), 0)


async def refusal(lead, node: bytes = THIEF) -> P2PCastError:
    try:
        knocker, _ = await knock(lead, node)
    except P2PCastError as error:
        return error
    await until(lambda: knocker.closed)
    assert knocker.error is not None
    return knocker.error


async def inside(lead, **held):
    """A thief that the hub names, as far as it gets: its link."""
    knocker, link = await knock(lead, THIEF)
    link.send(member_of())
    link.send(dataclasses.replace(HELD, **held))
    await until(lambda: seen(lead).get("knocker", {}).get("staged"))
    return knocker, link


async def test_a_peer_that_the_hub_does_not_name_is_no_member(hosts):
    lead, b = await together(hosts, "b")
    lead.lead._any_node = False
    assert "has not named the members of engine big yet" in str(await refusal(lead))
    lead.lead.set_members([b.identity.node])
    error = await refusal(lead)
    assert isinstance(error, RefusedError)
    assert "the hub names no such member of engine big" in str(error)
    assert lead.lead.status()["named"] == [b.identity.node.hex()]
    lead.lead.set_members([b.identity.node, THIEF])
    await inside(lead)


async def test_a_member_that_the_hub_has_lost_stays(hosts):
    lead, b = await together(hosts, "b")
    lead.lead._any_node = False
    lead.lead.set_members([])
    link = b.member._link
    assert not link.closed
    link.abort()
    await until(lambda: b.member._link is not link and b.member.connected)
    await asyncio.wait_for(lead.lead.meet(ONE), LIMIT_S)


@pytest.mark.parametrize("held", [{"still": False}, {"version": Version(0, 9)}])
async def test_a_member_without_a_worker_is_not_waited_for(hosts, held):
    lead, b = await together(hosts, "b")
    await inside(lead, **held)
    await asyncio.wait_for(lead.lead.meet(ONE), LIMIT_S)
    await lead.move(TWO)
    await b.move(TWO)
    await asyncio.wait_for(lead.lead.meet(TWO), LIMIT_S)


async def test_an_unasked_report_is_no_claim_to_a_rank(hosts, monkeypatch):
    """The thief claims rank 1 and leaves."""
    monkeypatch.setattr(multi_host_leader, "LOST_S", 0.0)
    lead, b = await together(hosts, "b")
    _, link = await inside(lead)
    with lead.socket.expect(lambda r: r.get("nonce") == "secret", 2) as expectation:
        for nonce in ("", "guess"):
            link.send(reported(rank=1, nonce=nonce))
        await until(lambda: len(lead.reports) == 2)
        assert (seen(lead)["b"]["ranks"], seen(lead)["knocker"]["ranks"]) == ([1], [])
        link.close()
        await until(lambda: set(seen(lead)) == {"b"} and not lead.lead._lost)
        lead.lead.require()
        await lead.says(rank=0, nonce="secret")
        await b.says(rank=1, nonce="secret")
        assert [r["nonce"] for r in await expectation.wait(LIMIT_S)] == ["secret", "secret"]


async def test_no_rank_is_claimed_by_two_members(hosts):
    """A member with workers, which knows the nonce, cannot claim another's rank either."""
    lead, _, c = await together(hosts, "b", "c")
    link = c.member._link
    with lead.socket.expect(lambda r: True, 3) as expectation:
        await c.says(rank=1)
        with pytest.raises(RetryableError, match="c reports for rank 1, which belongs to b"):
            await expectation.wait(LIMIT_S)
    await until(lambda: link.closed and set(seen(lead)) == {"b", "c"})
    assert {n: m["ranks"] for n, m in seen(lead).items()} == {"b": [1], "c": [2]}


async def test_the_leads_own_ranks_are_its_own(hosts):
    lead, b = await together(hosts, "b")
    await lead.says(rank=0)
    with lead.socket.expect(lambda r: True, 3) as expectation:
        await b.says(rank=0)
        with pytest.raises(RetryableError, match="b reports for rank 0, which belongs to this host"):
            await expectation.wait(LIMIT_S)


async def test_workers_move_to_other_hosts_with_their_server(hosts):
    lead, b, _ = await together(hosts, "b", "c")
    lead.lead.loosen()
    await work(lead, c=1, b=2)
    assert {n: m["ranks"] for n, m in seen(lead).items()} == {"b": [2], "c": [1]}
    with lead.socket.expect(lambda r: True, 3) as expectation:
        await b.says(rank=1)
        with pytest.raises(RetryableError, match="belongs to c"):
            await expectation.wait(LIMIT_S)


async def test_a_rank_of_a_lost_host_may_move_to_another(hosts):
    lead, b, _ = await together(hosts, "b", "c")
    await b.down()
    await until(lambda: set(seen(lead)) == {"c"})
    await work(lead, c=1)
    assert seen(lead)["c"]["ranks"] == [1, 2]


async def test_one_node_takes_one_seat(hosts, monkeypatch):
    monkeypatch.setattr(limits, "MAX_MEMBERS", 2)
    lead = await hosts("lead", "a", ONE)
    knockers = [await knock(lead, THIEF) for _ in range(10)]
    await until(lambda: sum(not knocker.closed for knocker, _ in knockers) == 1)
    b = await hosts("member", "b", ONE)
    b.member.set_lead(lead.place)
    await until(lambda: set(seen(lead)) == {"b"})


async def test_a_thiefs_holdings_cause_no_report_to_the_hub(hosts):
    """Each change that the lead tells the hub costs a report."""
    lead, b = await together(hosts, "b")
    told = []
    lead.lead._changed = lambda: told.append(1)
    _, link = await inside(lead)
    told.clear()
    for number in range(100):
        link.send(dataclasses.replace(HELD, still=bool(number % 2)))
    link.send(dataclasses.replace(HELD, version=THREE))
    await until(lambda: seen(lead)["knocker"]["staged"] == "0.3")
    assert told == []
    await lead.move(TWO)
    await b.move(TWO)
    await until(lambda: told)
