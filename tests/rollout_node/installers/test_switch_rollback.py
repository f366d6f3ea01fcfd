"""The old values of a played engine come back after a switch that failed."""

from __future__ import annotations

from typing import Any

import pytest
from installer_host import ONE, TWO, Host, Parts

from p2pcast.ground.errors import RetryableError
from rollout_node.installers.rank_reports import FalseReportError

CAUSE = RetryableError("by a test")


async def half_switched(host: Host, **options: Any) -> Parts:
    """The engine is paused. Rank 0 has committed 0.2, rank 1 has kept 0.1."""
    await host.installed()
    parts = host.parts(**options)
    parts.state.committed, parts.state.ready = ONE, True
    await parts.ranks.init()
    await parts.server.begin()
    if options.get("driver") == "external":
        host.engine.paused = True
    else:
        await parts.pause.begin()
    first, second = host.engine.ranks
    first.commit("0.2")
    second.before = second.held
    host.engine.take_calls()
    return parts


async def test_all_ranks_take_their_old_values_back_and_the_engine_goes_on(host: Host) -> None:
    parts = await half_switched(host, safe_point="drain")
    await parts.rollback.roll_back(TWO, CAUSE)
    assert host.engine.take_calls() == ["abort", "resume"]
    assert (host.held(), host.engine.paused) == (["0.1", "0.1"], False)
    assert (parts.state.committed, parts.state.uncertain) == (ONE, False)
    assert parts.state.stretch is not None, "one version is in use again"
    assert [rank.open for rank in host.engine.ranks] == [False, False]


async def test_a_pause_of_another_program_outlasts_the_roll_back(host: Host) -> None:
    parts = await half_switched(host, driver="external")
    await parts.rollback.roll_back(TWO, CAUSE)
    assert (host.engine.take_calls(), host.engine.paused, parts.state.committed) == (["abort"], True, ONE)


async def test_ranks_that_agree_on_another_version_go_on_unready(host: Host) -> None:
    """All ranks had committed, and none could take its values back: their proofs are in order."""
    parts = await half_switched(host)
    for rank in host.engine.ranks:
        rank.answers["abort"] = {"held": "0.2"}
    await parts.rollback.roll_back(TWO, CAUSE)
    assert host.engine.take_calls() == ["abort", "resume"]
    assert (host.engine.label, host.engine.paused) == ("0.2", False)
    assert (parts.state.committed, parts.state.ready, parts.state.uncertain) == (None, False, False)


@pytest.mark.parametrize(
    ("held", "cause"), [(["0.1", "0.2"], CAUSE), ([None, None], CAUSE), (["0.2", "0.2"], FalseReportError("a lie"))]
)
async def test_ranks_in_doubt_keep_the_engine_paused(
    host: Host, caplog: Any, held: list[str | None], cause: Exception
) -> None:
    parts = await half_switched(host)
    for rank, each in zip(host.engine.ranks, held, strict=True):
        rank.answers["abort"] = {"held": each}
    await parts.rollback.roll_back(TWO, cause)
    assert host.engine.take_calls() == ["abort", "forget", "pause"]
    assert (host.engine.paused, parts.state.committed, parts.state.uncertain) == (True, None, True)
    assert (
        "e: 0.2 could not be taken back (its ranks hold different versions): it stays paused until it is repaired"
        in caplog.text
    )


@pytest.mark.parametrize(("driver", "stays"), [("peer", "it stays paused"), ("external", "it must stay paused")])
async def test_a_server_that_refuses_the_roll_back_stays_paused(
    host: Host, caplog: Any, driver: str, stays: str
) -> None:
    parts = await half_switched(host, driver=driver)
    host.engine.fails.add("update_weights")
    await parts.rollback.roll_back(TWO, CAUSE)
    assert f": {stays} until it is repaired" in caplog.text
    assert (host.engine.take_calls(), host.engine.paused) == ([], True)
    assert (parts.state.committed, parts.state.ready, parts.state.uncertain) == (None, False, False)
