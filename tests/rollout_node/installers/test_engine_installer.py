"""Installing into a vLLM server that an HTTP server plays, with ranks that report over the install socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from installer_host import ONE, SHADOW, TWO, Host
from played_vllm import LAYOUT, Engine, digest_of

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, RetryableError
from rollout_node.in_engine import tensor_accounts
from rollout_node.in_engine.tensor_accounts import Account
from rollout_node.installers.installer import Audit
from tests.support.until import until

Setup = Callable[[Engine], None]


def everywhere(phase: str, **found: Any) -> Setup:
    def setup(engine: Engine) -> None:
        for rank in engine.ranks:
            rank.answers[phase] = found

    return setup


def at_rank_1(phase: str, **found: Any) -> Setup:
    return lambda engine: engine.ranks[1].answers.update({phase: found})


async def test_the_whole_state_is_written_under_a_pause_while_staging(host: Host) -> None:
    installer = host.installer()
    await installer.start()
    await installer.stage(ONE, SHADOW)
    assert host.engine.take_calls() == ["prepare", "note a pause", "pause", "commit", "resume"]
    assert not installer.ready
    assert not installer.commit_needs_shadow, "it is written already"
    report = await installer.commit(ONE)
    assert report.dense
    assert (installer.committed, installer.ready, host.engine.label) == (ONE, True, "0.1")
    assert host.engine.take_calls() == []


async def test_a_delta_is_prepared_while_the_engine_runs(host: Host) -> None:
    installer = await host.installed()
    await installer.stage(TWO, SHADOW)
    assert host.engine.take_calls() == ["prepare"]
    assert (installer.committed, installer.ready) == (ONE, True)
    report = await installer.commit(TWO)
    assert host.engine.take_calls() == ["note a pause", "pause", "commit", "resume"]
    assert (report.dense, host.held(), host.engine.label) == (False, ["0.2", "0.2"], "0.2")


async def test_the_engine_core_switches_in_one_command(host: Host) -> None:
    installer = await host.installed()
    host.engine.core = True
    await installer.stage(TWO, SHADOW)
    report = await installer.commit(TWO)
    assert host.engine.take_calls() == ["prepare", "note a pause", "switch"]
    assert report.pause_s == 7e-6
    assert installer.committed == TWO


async def test_a_version_that_the_ranks_hold_is_not_written_again(host: Host) -> None:
    await host.installed()
    host.engine.label = "none"
    successor = host.installer()
    await successor.start()
    await successor.stage(ONE, SHADOW)
    await successor.commit(ONE)
    assert host.engine.take_calls() == []
    assert (successor.committed, successor.ready, host.engine.label) == (ONE, True, "0.1")


async def test_only_a_staged_version_is_committed(host: Host) -> None:
    installer = await host.installed()
    await installer.stage(TWO, SHADOW)
    with pytest.raises(LocalError, match=r"0\.1 isn't staged, 0\.2 is"):
        await installer.commit(ONE)


# -- versions that fail


@pytest.mark.parametrize("core", [False, True])
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (IntegrityError.wire_code, IntegrityError),
        (RetryableError.wire_code, RetryableError),
        (LocalError.wire_code, LocalError),
        (None, LocalError),
    ],
)
async def test_a_failed_commit_is_taken_back_on_all_ranks(
    host: Host, core: bool, kind: str | None, error: type[P2PCastError]
) -> None:
    installer = await host.installed()
    host.engine.core = core
    await installer.stage(TWO, SHADOW)
    at_rank_1("commit", error="by a test", kind=kind)(host.engine)
    with pytest.raises(error, match="e: rank 1, commit: by a test"):
        await installer.commit(TWO)
    assert host.held() == ["0.1", "0.1"]
    assert host.engine.take_calls()[-2:] == ["abort", "resume"]
    assert (installer.committed, installer.ready) == (ONE, False)
    assert not host.engine.paused
    with pytest.raises(LocalError, match="nothing is"):
        await installer.commit(TWO)


async def test_a_core_that_came_back_too_late_is_undone(host: Host) -> None:
    installer = await host.installed()
    host.engine.core, host.engine.resumes = True, False
    await installer.stage(TWO, SHADOW)
    with pytest.raises(RetryableError, match="took longer than"):
        await installer.commit(TWO)
    assert host.held() == ["0.1", "0.1"]
    assert host.engine.take_calls()[-2:] == ["abort", "resume"]


async def test_a_core_with_a_missing_report_is_undone(host: Host) -> None:
    installer = await host.installed()
    host.engine.core = True
    host.engine.ranks[1].silent.add("commit")
    await installer.stage(TWO, SHADOW)
    with pytest.raises(RetryableError, match="1 workers gave no report of the commit"):
        await installer.commit(TWO)
    assert host.held() == ["0.1", "0.1"]


async def test_foreign_changes_of_the_weights_are_overwritten(host: Host, caplog: Any) -> None:
    installer = await host.installed()
    host.engine.ranks[0].live = host.engine.ranks[1].live = 7
    await installer.stage(TWO, SHADOW)
    await installer.commit(TWO)
    assert "the ranks' live values differ from 0.1" in caplog.text
    assert host.engine.take_calls()[:4] == ["prepare", "forget", "note a pause", "pause"]
    assert (installer.committed, host.engine.paused) == (TWO, False)
    assert [rank.live for rank in host.engine.ranks] == [digest_of("0.2")] * 2


async def test_a_stage_notices_an_engine_that_lost_its_version(host: Host) -> None:
    installer = await host.installed()
    host.engine.restart()
    at_rank_1("prepare", error="no memory")(host.engine)
    with pytest.raises(LocalError, match="no memory"):
        await installer.stage(TWO, SHADOW)
    assert installer.committed is None


async def test_a_rank_that_does_not_report_is_named(host: Host) -> None:
    host.socket.elsewhere = lambda: "member m"
    host.engine.ranks[1].silent.add("init")
    with pytest.raises(RetryableError, match=r"1 of 2 workers did not report init within .* ranks 1 \(member m\)"):
        await host.installer().start()


async def test_workers_that_disagree_about_an_update_are_refused(host: Host) -> None:
    installer = await host.installed()
    host.engine.ranks[1].open = True
    with pytest.raises(LocalError, match="disagree whether an update is under way"):
        await installer.stage(TWO, SHADOW)


async def test_an_open_session_is_continued(host: Host) -> None:
    await host.installed()
    for rank in host.engine.ranks:
        rank.open = True
    host.engine.fails.add("start_weight_update")
    successor = host.installer()
    await successor.start()
    await successor.stage(TWO, SHADOW)
    await successor.commit(TWO)
    assert successor.committed == TWO


# -- pauses of others


async def test_with_an_external_driver_a_commit_needs_the_drivers_pause(host: Host) -> None:
    installer = await host.installed(driver="external", kv="recompute")
    host.engine.paused = False
    await installer.stage(TWO, SHADOW)
    with pytest.raises(RetryableError, match="pause the engine around the commit"):
        await installer.commit(TWO)
    host.engine.paused = True
    await installer.commit(TWO)
    assert host.engine.take_calls() == ["prepare", "clear caches", "commit"]
    assert host.engine.paused


async def test_with_an_external_driver_the_whole_state_waits_for_the_commit(host: Host) -> None:
    installer = host.installer(driver="external", kv="keep")
    await installer.start()
    await installer.stage(ONE, SHADOW)
    assert installer.commit_needs_shadow
    assert host.engine.take_calls() == ["prepare"]
    host.engine.paused = True
    assert (await installer.commit(ONE)).dense
    assert host.engine.take_calls() == ["commit"]


# -- checks and audits


async def test_a_check_finds_a_restarted_engine(host: Host) -> None:
    installer = await host.installed()
    await installer.check()
    assert installer.ready
    host.engine.restart()
    await installer.check()
    assert (installer.committed, installer.ready) == (None, False)
    await installer.check()
    assert installer.committed is None


async def test_a_check_restores_a_changed_label(host: Host) -> None:
    installer = await host.installed()
    host.engine.label = "mine"
    await installer.check()
    assert (installer.ready, host.engine.label) == (True, "0.1")


async def test_an_engine_out_of_reach_is_ready_again_after_a_check(host: Host) -> None:
    installer = await host.installed()
    host.engine.fails.add("weight_info")
    with pytest.raises(RetryableError):
        await installer.check()
    assert not installer.ready
    host.engine.fails.clear()
    await installer.check()
    assert (installer.ready, installer.committed) == (True, ONE)


async def test_an_audit_compares_the_live_weights(host: Host) -> None:
    installer = await host.installed()
    assert await installer.audit(LAYOUT, {0: digest_of("0.1")}) == Audit(ONE, [], [])
    assert installer.ready
    host.engine.ranks[0].live = host.engine.ranks[1].live = 7
    assert await installer.audit(LAYOUT, {0: digest_of("0.1")}) == Audit(ONE, ["w"], [])
    assert (installer.committed, installer.ready, host.engine.paused) == (None, False, True)
    with pytest.raises(LocalError, match="nothing to audit"):
        await installer.audit(LAYOUT, {})


async def test_an_engine_without_adapters_names_the_missing_adapter(host: Host) -> None:
    """The adapter's tensors are not among the unreadable ones: the engine does not claim to hold them."""
    for rank in host.engine.ranks:
        rank.answers["init"] = {"lacks": ["phi"]}
    installer = await host.installed()
    await installer.stage(TWO, SHADOW)
    assert (await installer.commit(TWO)).detail["lacks"] == "phi"
    both = Layout([*LAYOUT.tensors, *(Tensor(f"{a}/x.lora_A.weight", "U8", (4,)) for a in ("phi", "psi"))])
    audit = await installer.audit(both, {})
    assert "psi/x.lora_A.weight" in audit.unknown
    assert "phi/x.lora_A.weight" not in audit.unknown
    assert audit.lacks == ("phi",)


async def test_a_tensor_that_no_rank_reads_refuses_the_run_by_name(host: Host) -> None:
    installer = await host.installed()
    unknown, skips = tensor_accounts.pack([Account.UNKNOWN]), tensor_accounts.pack([Account.SKIPPED])
    everywhere("init", accounts=unknown)(host.engine)
    with pytest.raises(LocalError, match=r"refused: the engine reads nothing from 1 of its tensors, the first w;"):
        await installer.stage(TWO, SHADOW)
    assert (installer.ready, installer.committed, host.engine.label) == (False, ONE, "0.1")
    assert host.engine.take_calls() == []
    at_rank_1("init", accounts=tensor_accounts.pack([Account.COVERED]))(host.engine)  # a later stage of a pipeline
    await installer.stage(TWO, SHADOW)
    await installer.commit(TWO)
    everywhere("init", accounts=skips)(host.engine)
    everywhere("audit", digests=[])(host.engine)
    assert await installer.audit(LAYOUT, {0: 1}) == Audit(TWO, [], [])
    everywhere("init", accounts=b"")(host.engine)
    with pytest.raises(P2PCastError, match="1 tensors"):
        await installer.audit(LAYOUT, {0: 1})


async def test_an_engine_keeps_its_version_while_a_run_with_other_tensors_is_refused(host: Host) -> None:
    installer = await host.installed()
    everywhere("init", held=None, before="0.1")(host.engine)
    everywhere("prepare", error="0.2 is refused", kind="internal")(host.engine)
    with pytest.raises(LocalError, match="is refused"):
        await installer.stage(TWO, SHADOW)
    with pytest.raises(RetryableError, match=r"other tensors since 0\.1"):
        await installer.audit(LAYOUT, {})
    assert (installer.ready, installer.committed, host.engine.paused) == (False, ONE, False)
    everywhere("init", held=None, before="0.0")(host.engine)
    with pytest.raises(LocalError):
        await installer.stage(TWO, SHADOW)
    assert installer.committed is None


@pytest.mark.parametrize(("first", "second"), [(False, False), (False, True), (True, True)])
async def test_engine_with_one_sparse_rank_follows_schedules(host: Host, *, first: bool, second: bool) -> None:
    """A pipeline's first rank may have dense layers alone."""
    for rank, follows in zip(host.engine.ranks, (first, second), strict=True):
        rank.answers["init"] = {"follows": follows}
    assert (await host.installed()).abilities.follows_schedules() == second


async def test_an_audit_of_an_engine_that_lost_its_version_is_refused(host: Host) -> None:
    installer = await host.installed()
    host.engine.ranks[1].held = "0.0"
    with pytest.raises(RetryableError, match=r"no longer holds 0\.1"):
        await installer.audit(LAYOUT, {})
    assert installer.committed is None


async def test_an_engine_whose_server_is_gone_has_no_version(host: Host) -> None:
    """The successor of that server answers from the weights on its disk."""
    installer = await host.installed()
    installer._server.url = "http://127.0.0.1:1"  # where nothing listens
    with pytest.raises(RetryableError, match="is the server up"):
        await installer.check()
    assert (installer.ready, installer.committed) == (False, None)


async def test_a_cancelled_stage_leaves_nothing_staged(host: Host) -> None:
    installer = await host.installed()
    host.engine.ranks[1].silent.add("prepare")
    staging = asyncio.create_task(installer.stage(TWO, SHADOW))
    await until(lambda: "prepare" in host.engine.calls)
    staging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await staging
    assert (installer.committed, installer.ready) == (ONE, False)
    with pytest.raises(LocalError, match="isn't staged"):
        await installer.commit(TWO)
