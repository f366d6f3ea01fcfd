"""A switch of a played engine: pause, commit on all ranks, confirm, resume."""

from __future__ import annotations

from typing import Any

import pytest
from installer_host import ONE, TWO, Host, Parts

from p2pcast.ground.errors import IntegrityError, RetryableError
from p2pcast.rollouts.kv_policy import KvPolicy
from rollout_node.installers.safe_point import StillRunningError


async def prepared(host: Host, **options: Any) -> Parts:
    """The engine holds 0.1 and has 0.2 staged."""
    await host.installed()
    parts = host.parts(**options)
    parts.state.committed, parts.state.ready = ONE, True
    await parts.ranks.recount()
    await parts.ranks.init()
    await parts.server.begin()
    await parts.preparation.prepare(TWO, 5.0)
    host.engine.take_calls()
    return parts


async def test_a_switch_over_routes_ends_at_the_new_version(host: Host) -> None:
    parts = await prepared(host)
    report = await parts.switch.switch(TWO, 5.0)
    assert host.engine.take_calls() == ["note a pause", "pause", "commit", "resume"]
    assert (host.held(), host.engine.label, host.engine.paused) == (["0.2", "0.2"], "0.2", False)
    assert list(report.detail) == ["began_unix_s", "paused_s", "pausing_s", "writing_s", "resuming_s", "worker_s"]
    assert (report.dense, parts.state.pausing) == (False, False)
    assert [rank.open for rank in host.engine.ranks] == [False, False]


async def test_a_switch_in_the_core_ends_at_the_new_version(host: Host) -> None:
    parts = await prepared(host, given=None)
    host.engine.core = True
    report = await parts.switch.switch(TWO, 5.0)
    assert host.engine.take_calls() == ["note a pause", "switch"]
    assert host.held() == ["0.2", "0.2"]
    assert list(report.detail) == ["began_unix_s", "paused_s", "command_s", "worker_s"]
    assert (report.pause_s, parts.state.pausing) == (7e-6, False)


@pytest.mark.parametrize("options", [{"given": 2}, {"given": None, "driver": "external"}])
async def test_the_core_does_not_switch_for_other_ranks_and_other_drivers(host: Host, options: dict[str, Any]) -> None:
    parts = await prepared(host, **options)
    host.engine.core = host.engine.paused = True
    await parts.switch.switch(TWO, 5.0)
    assert "switch" not in host.engine.take_calls()


async def test_a_confirmed_switch_ends_doubts(host: Host) -> None:
    parts = await prepared(host)
    parts.state.doubt()
    await parts.switch.switch(TWO, 5.0)
    assert not parts.state.uncertain


@pytest.mark.parametrize(
    ("kv", "tokens", "clears"), [("recompute", None, True), ("salt", 0, False), ("keep", 0, False)]
)
async def test_the_kv_policy_decides_on_caches_and_counts(
    host: Host, kv: KvPolicy, tokens: int | None, clears: bool
) -> None:
    """The played server's metrics are empty, so a count is unknown."""
    parts = await prepared(host, kv=kv)
    report = await parts.switch.switch(TWO, 5.0)
    assert (report.recomputed_tokens, host.engine.clears) == (tokens, clears)


@pytest.mark.parametrize(("kv", "calls"), [("recompute", ["clear caches", "commit"]), ("keep", ["commit"])])
async def test_under_another_drivers_pause_nothing_is_paused_or_resumed(
    host: Host, kv: KvPolicy, calls: list[str]
) -> None:
    parts = await prepared(host, driver="external", kv=kv)
    host.engine.paused = True
    await parts.switch.switch(TWO, 5.0)
    assert (host.engine.take_calls(), host.engine.paused) == (calls, True)


@pytest.mark.parametrize("lost", [{"prepared": None}, {"prepared": "0.1"}, {"open": False}])
async def test_a_rank_that_is_not_prepared_prevents_the_switch(host: Host, lost: dict[str, Any]) -> None:
    parts = await prepared(host)
    host.engine.ranks[1].answers["init"] = lost
    with pytest.raises(RetryableError, match=r"e: rank 1 isn't prepared for 0\.2 any more; it is staged again"):
        await parts.switch.switch(TWO, 5.0)
    assert (host.engine.take_calls(), host.engine.paused) == (["note a pause"], False)


@pytest.mark.parametrize("wrong", [{"mark": 7}, {"mark": None}, {"held": "0.1"}])
async def test_a_rank_without_the_prepared_values_is_not_confirmed(host: Host, wrong: dict[str, Any]) -> None:
    parts = await prepared(host)
    host.engine.ranks[1].answers["commit"] = wrong
    with pytest.raises(IntegrityError, match=r"e: rank 1 says that it holds .*prepared for 0\.2 are not there"):
        await parts.switch.switch(TWO, 5.0)
    assert host.engine.take_calls() == ["note a pause", "pause", "commit", "abort", "resume"]
    assert host.held() == ["0.1", "0.1"]


async def test_an_engine_with_an_old_label_is_resumed_all_the_same(host: Host) -> None:
    parts = await prepared(host)
    host.engine.fails.add("update_weight_version")
    with pytest.raises(RetryableError, match="update_weight_version"):
        await parts.switch.switch(TWO, 5.0)
    assert (host.engine.paused, host.held()) == (False, ["0.2", "0.2"])


async def test_a_session_that_stays_open_does_not_fail_the_switch(host: Host, caplog: Any) -> None:
    parts = await prepared(host)
    host.engine.fails.add("finish_weight_update")
    await parts.switch.switch(TWO, 5.0)
    assert "finish_weight_update" in caplog.text


async def test_no_stretch_is_named_while_weights_are_written(host: Host) -> None:
    parts = await prepared(host, safe_point="drain")
    parts.point.written()
    assert parts.state.stretch is not None
    await parts.switch.switch(TWO, 5.0)
    assert parts.state.stretch is None, "the installer names the next one with the commit"


@pytest.mark.parametrize("doubtful", [False, True])
async def test_a_switch_that_changed_nothing_is_not_taken_back(
    host: Host, monkeypatch: pytest.MonkeyPatch, doubtful: bool
) -> None:
    """Of weights in doubt nothing may be sampled, so that pause stays."""
    parts = await prepared(host, safe_point="drain")

    async def busy(order: Any, deadline_s: float) -> Any:
        if doubtful:
            parts.state.doubt()
            parts.state.lose_version()
        raise StillRunningError("busy")

    monkeypatch.setattr(parts.switch, "_in_core", lambda reports: True)
    monkeypatch.setattr(parts.server, "switch", busy)
    with pytest.raises(StillRunningError):
        await parts.switch.switch(TWO, 5.0)
    assert host.engine.take_calls() == ["note a pause", "drain", *([] if doubtful else ["resume"])]
    assert (parts.state.pausing, parts.state.stretch is None) == (doubtful, doubtful)
