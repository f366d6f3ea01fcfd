"""This peer's pause of a played engine, beside pauses of others."""

from __future__ import annotations

from typing import Any

import pytest
from installer_host import ONE, Host

from p2pcast.ground.errors import RetryableError
from p2pcast.rollouts.kv_policy import KV_POLICIES, KvPolicy, recomputes


async def test_ranks_note_a_pause_before_its_begin(host: Host) -> None:
    parts = host.parts()
    await parts.pause.begin()
    assert host.engine.take_calls() == ["note a pause", "pause"]
    await parts.pause.begin()
    assert host.engine.take_calls() == ["pause"], "the ranks know already"
    await parts.pause.end()
    assert host.engine.take_calls() == ["resume"]
    await parts.pause.end()
    assert (host.engine.take_calls(), parts.state.pausing) == ([], False)


async def test_a_pause_that_the_ranks_noted_is_not_noted_again(host: Host) -> None:
    parts = host.parts()
    await parts.pause.begin(ours=True)
    assert (host.engine.take_calls(), parts.state.pausing) == (["pause"], True)


async def test_a_pause_of_another_process_is_never_ended(host: Host) -> None:
    parts = host.parts()
    host.engine.paused = True
    await parts.pause.begin()
    await parts.pause.end()
    assert (host.engine.take_calls(), host.engine.paused, parts.state.pausing) == (["pause"], True, False)


async def test_a_failed_resume_leaves_the_pause_this_peers(host: Host) -> None:
    parts = host.parts()
    await parts.pause.begin()
    host.engine.fails.add("resume")
    with pytest.raises(RetryableError):
        await parts.pause.end()
    assert parts.state.pausing


@pytest.mark.parametrize("kv", KV_POLICIES)
async def test_a_pause_empties_the_caches_as_the_kv_policy_says(host: Host, kv: KvPolicy) -> None:
    await host.parts(kv=kv).pause.begin()
    assert host.engine.clears is recomputes(kv)


async def test_a_pause_that_the_core_ended_is_over(host: Host) -> None:
    parts = host.parts()
    parts.pause.note(ours=True)
    parts.pause.ended_by_core()
    await parts.pause.end()
    assert host.engine.take_calls() == []


@pytest.mark.parametrize(("driver", "calls"), [("peer", ["forget", "note a pause", "pause"]), ("external", ["forget"])])
async def test_an_engine_in_doubt_is_paused_by_its_own_driver_alone(host: Host, driver: Any, calls: list[str]) -> None:
    parts = host.parts(driver=driver)
    parts.state.committed, parts.state.ready = ONE, True
    await parts.pause.distrust()
    assert host.engine.take_calls() == calls
    assert (parts.state.committed, parts.state.ready, parts.state.uncertain) == (None, False, True)


async def test_the_pause_of_a_peer_that_died_ends_where_all_ranks_agree(host: Host, caplog: Any) -> None:
    await host.installed()
    parts = host.parts()
    host.engine.paused = host.engine.ranks[1].pausing = True
    host.engine.label = "none"
    await parts.pause.settle(await parts.ranks.init(), ONE)
    assert (host.engine.take_calls(), host.engine.paused, host.engine.label) == (["resume"], False, "0.1")
    assert "e: was left paused, and is resumed at 0.1" in caplog.text


async def test_the_pause_of_a_peer_that_died_stays_while_ranks_differ(host: Host) -> None:
    parts = host.parts()
    host.engine.paused = host.engine.ranks[1].pausing = True
    await parts.pause.settle(await parts.ranks.init(), None)
    assert (host.engine.take_calls(), host.engine.paused, parts.state.pausing) == ([], True, True)


async def test_an_unknown_pause_stays(host: Host) -> None:
    parts = host.parts()
    host.engine.paused = True
    await parts.pause.settle(await parts.ranks.init(), ONE)
    assert (host.engine.take_calls(), host.engine.paused, parts.state.pausing) == ([], True, False)


async def test_a_rank_in_doubt_pauses_the_engine(host: Host, caplog: Any) -> None:
    parts = host.parts()
    parts.state.doubt()
    await parts.pause.settle(await parts.ranks.init(), ONE)
    assert host.engine.take_calls() == ["note a pause", "pause"]
    assert "e: its ranks don't hold one version; it is paused until they do" in caplog.text
