"""Workers' reports from every host reach the lead, however late; a lost member loses its reports."""

from __future__ import annotations

import asyncio

import pytest
from engine_hosts import LIMIT_S, ONE, seen, together

from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError, RetryableError
from rollout_node.engine import multi_host_leader, multi_host_member
from tests.support.until import until


async def test_reports_of_every_host_are_collected(hosts):
    lead, b, c = await together(hosts, "b", "c")
    with lead.socket.expect(lambda r: r["phase"] == "commit", 3) as expectation:
        await b.says(rank=1, digests=[[1, 2]] * 3)
        await c.says(rank=2, phase="prepare")
        await lead.says(rank=0)
        await until(lambda: expectation.missing == 1)
        assert expectation.missing_ranks == [2]
        await c.says(rank=2)
        reports = await expectation.wait(LIMIT_S)
    assert [r["rank"] for r in reports] == [0, 1, 2]
    assert reports[1]["digests"] == [[1, 2]] * 3
    assert {n: m["ranks"] for n, m in seen(lead).items()} == {"b": [1], "c": [2]}
    assert lead.socket.elsewhere() == "connected members of big: b (rank 1); c (rank 2)"
    await lead.says(rank=2)  # the server came back with its workers elsewhere
    assert seen(lead)["c"]["ranks"] == []


async def test_reports_made_without_a_lead_arrive_later_with_their_age(hosts):
    lead, b = await together(hosts, "b")
    port = lead.listener.address[1]
    await lead.down()
    await until(lambda: not b.member.connected)
    await b.says(rank=1)
    await b.says(rank=1, phase="init")
    # The age of a report leaves out its transit: a second is more than a busy machine takes.
    b.member._kept = type(b.member._kept)((made_at - 1.0, report) for made_at, report in b.member._kept)
    again = await hosts("lead", "a2", ONE, node=lead.identity.node, port=port)
    with again.socket.expect(lambda r: True, 2) as expectation:
        await until(lambda: len(again.reports) == 2)
        assert expectation.missing == 2  # these reports answer another lead's request
        await b.says(rank=1)
        await until(lambda: expectation.missing == 1)
    assert [r["phase"] for r in again.reports] == ["commit", "init", "commit"]


async def test_old_reports_and_too_many_are_not_kept(hosts, monkeypatch):
    b = await hosts("member", "b", ONE)
    monkeypatch.setattr(limits, "MAX_KEPT_REPORTS_BYTES", 10_000)
    for rank in range(5):
        await b.says(rank=rank, filler="x" * 3000)
    lead = await hosts("lead", "a", ONE)
    b.member.set_lead(lead.place)
    await until(lambda: [r["rank"] for r in lead.reports] == [2, 3, 4])
    await lead.down()
    await until(lambda: not b.member.connected)
    await b.says(rank=5)
    monkeypatch.setattr(multi_host_member, "KEPT_S", 0.0)
    again = await hosts("lead", "a2", ONE, node=lead.identity.node)
    b.member.set_lead(again.place)
    await until(lambda: b.member.connected)
    monkeypatch.setattr(multi_host_member, "KEPT_S", 60.0)
    await b.says(rank=6)
    await until(lambda: again.reports)
    assert [r["rank"] for r in again.reports] == [6]


async def test_a_lost_member_loses_the_reports_expected_of_its_workers(hosts, monkeypatch):
    monkeypatch.setattr(multi_host_leader, "LOST_S", 0.05)
    lead, b, c = await together(hosts, "b", "c")
    await b.says(rank=1)
    await c.says(rank=2)
    await until(lambda: len(lead.reports) == 2)
    lead.lead.require()
    with lead.socket.expect(lambda r: True, 3) as all_three, lead.socket.expect(lambda r: r["rank"] == 2, 3) as of_c:
        await b.down()
        with pytest.raises(RetryableError, match="member b, of rank 1, was lost before all was reported"):
            await all_three.wait(LIMIT_S)
        await c.says(rank=2)
        with pytest.raises(RetryableError, match="was lost"):
            await of_c.wait(LIMIT_S)
    with pytest.raises(RetryableError, match=r"member b is gone; connected members of big: c \(rank 2\)"):
        lead.lead.require()


async def test_a_member_back_in_time_loses_no_report(hosts):
    lead, b = await together(hosts, "b")
    await b.says(rank=1)
    await until(lambda: lead.reports)
    with lead.socket.expect(lambda r: True, 2) as expectation:
        link = b.member._link
        link.abort()
        await lead.says(rank=0)
        await b.says(rank=1)
        assert [r["rank"] for r in await expectation.wait(LIMIT_S)] == [0, 1]
    await until(lambda: b.member._link is not link and seen(lead)["b"]["still"])
    assert lead.lead.status()["members"][0]["ranks"] == [1]


async def test_a_restarted_member_loses_its_workers_reports(hosts):
    lead, b = await together(hosts, "b")
    await b.says(rank=1)
    await until(lambda: lead.reports)
    with lead.socket.expect(lambda r: True, 1) as expectation:
        await b.down()
        again = await hosts("member", "b2", ONE, node=b.identity.node)
        again.member.set_lead(lead.place)
        with pytest.raises(RetryableError, match="member b, of rank 1, was restarted"):
            await expectation.wait(LIMIT_S)
    await asyncio.wait_for(lead.lead.meet(ONE), LIMIT_S)


async def test_a_rank_that_the_engine_does_not_have_counts_for_none(hosts):
    """Otherwise the report would count for a missing rank, and an install would continue without that rank."""
    lead, b = await together(hosts, "b")
    with lead.socket.expect(lambda r: True, 2) as expectation:
        await lead.says(rank=0, ranks=2)
        link = b.member._link
        await b.says(rank=7, ranks=8)
        await until(lambda: link.closed)
        assert "rank 7: this engine has 2 workers" in str(b.member.status()["error"])
        with pytest.raises(RemoteError, match="others say 2"):
            await lead.says(rank=1, ranks=3)
        assert expectation.missing_ranks == [1]
        await until(lambda: b.member._link is not link and b.member.connected)
        await b.says(rank=1, ranks=2)
        assert [r["rank"] for r in await expectation.wait(LIMIT_S)] == [0, 1]
