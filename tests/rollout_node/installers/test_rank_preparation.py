"""Staging at the ranks of a played engine, and the proof of what they build on."""

from __future__ import annotations

from typing import Any

import pytest
from installer_host import ONE, TWO, Host
from played_vllm import digest_of

from p2pcast.ground.errors import IntegrityError, LocalError
from rollout_node.installers.rank_reports import FalseReportError

MARKS = {0: digest_of("0.2"), 1: digest_of("0.2")}


async def test_the_ranks_marks_are_kept_for_the_commit(host: Host) -> None:
    await host.installed()
    parts = host.parts()
    await parts.ranks.init()
    reports = await parts.preparation.prepare(TWO, 5.0)
    assert [r["install"] for r in reports] == ["sparse", "sparse"]
    assert (parts.state.marks, host.engine.take_calls()) == (MARKS, ["prepare"])


async def test_an_engine_in_doubt_is_staged_whole_at_once(host: Host) -> None:
    await host.installed()
    parts = host.parts()
    await parts.ranks.init()
    parts.state.doubt()
    reports = await parts.preparation.prepare(TWO, 5.0)
    assert [r["install"] for r in reports] == ["dense", "dense"]
    assert (parts.state.marks, host.engine.take_calls()) == (MARKS, ["prepare whole"])


@pytest.mark.parametrize(
    ("setup", "logged"),
    [
        ({"from": "0.0"}, "e: the ranks don't build 0.2 on the same version"),
        ({"expected": [[0, 5]]}, "e: the ranks don't build 0.2 on the same version"),
        ({"grown": [[0, 0, [4], [1], 7]]}, "(1 tensors in all): the ranks' live values differ from 0.1"),
    ],
)
async def test_ranks_that_do_not_hold_the_base_are_staged_whole(
    host: Host, caplog: Any, setup: dict[str, Any], logged: str
) -> None:
    await host.installed()
    parts = host.parts()
    await parts.ranks.init()
    host.engine.ranks[1].answers["prepare"] = setup
    await parts.preparation.prepare(TWO, 5.0)
    assert host.engine.take_calls() == ["prepare", "forget", "note a pause", "pause", "prepare whole"]
    assert logged in caplog.text
    assert parts.state.uncertain


async def test_a_fault_of_the_version_changes_nothing_at_the_engine(host: Host) -> None:
    await host.installed()
    parts = host.parts()
    await parts.ranks.init()
    host.engine.ranks[1].answers["prepare"] = {"error": "a patch is damaged", "kind": "integrity"}
    with pytest.raises(IntegrityError, match="e: rank 1, prepare: a patch is damaged") as raised:
        await parts.preparation.prepare(TWO, 5.0)
    assert not isinstance(raised.value, FalseReportError)
    assert (host.engine.take_calls(), parts.state.uncertain) == (["prepare"], False)


async def test_a_fault_at_ranks_without_a_common_version_is_repaired(host: Host) -> None:
    await host.installed()
    parts = host.parts()
    await parts.ranks.init()
    host.engine.ranks[0].held = "0.0"
    host.engine.ranks[1].answers["prepare"] = {"error": "another base", "kind": "integrity"}
    with pytest.raises(IntegrityError, match="another base"):
        await parts.preparation.prepare(TWO, 5.0)
    assert host.engine.take_calls() == ["prepare", "forget", "note a pause", "pause", "prepare whole"]


async def test_other_errors_cast_no_doubt_on_the_engine(host: Host) -> None:
    await host.installed()
    parts = host.parts()
    await parts.ranks.init()
    host.engine.ranks[1].answers["prepare"] = {"error": "no memory"}
    with pytest.raises(LocalError, match="no memory"):
        await parts.preparation.prepare(TWO, 5.0)
    assert (host.engine.take_calls(), parts.state.uncertain) == (["prepare"], False)


async def test_one_rank_that_is_written_whole_needs_no_proof_of_the_base(host: Host) -> None:
    await host.installed()
    parts = host.parts()
    await parts.ranks.init()
    host.engine.ranks[0].live = 7
    host.engine.ranks[1].answers["prepare"] = {"install": "dense"}
    reports = await parts.preparation.prepare(TWO, 5.0)
    assert [r["install"] for r in reports] == ["sparse", "dense"]
    assert host.held() == [str(ONE)] * 2
