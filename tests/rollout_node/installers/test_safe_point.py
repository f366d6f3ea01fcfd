"""Switches that wait for the end of running requests, at a played vLLM server."""

from __future__ import annotations

import asyncio

import pytest
from installer_host import ONE, SHADOW, TWO, Host

from p2pcast.ground.errors import P2PCastError, RetryableError
from rollout_node.installers.engine_server import Deadlines


async def test_a_drain_lets_requests_end_before_the_weights_change(host: Host) -> None:
    installer = await host.installed(safe_point="drain")
    await installer.stage(TWO, SHADOW)
    host.engine.take_calls()
    host.engine.idle.clear()
    committing = asyncio.ensure_future(installer.commit(TWO))
    await host.engine.draining.wait()
    assert host.engine.take_calls() == ["note a pause", "drain"]
    assert (host.held(), installer.ready) == (["0.1", "0.1"], True)
    host.engine.idle.set()
    report = await committing
    assert host.engine.take_calls() == ["pause", "commit", "resume"]
    assert (host.held(), host.engine.paused, "drained_s" in report.detail) == (["0.2", "0.2"], False, True)


async def test_the_engine_core_switches_after_a_drain(host: Host) -> None:
    installer = await host.installed(safe_point="drain")
    host.engine.core = True
    await installer.stage(TWO, SHADOW)
    await installer.commit(TWO)
    assert host.engine.take_calls() == ["prepare", "note a pause", "drain", "switch"]
    assert (installer.committed, host.engine.paused) == (TWO, False)


async def test_an_endless_request_leaves_the_engine_at_its_old_version(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer = await host.installed(safe_point="drain")
    await installer.stage(TWO, SHADOW)
    host.engine.take_calls()
    host.engine.idle.clear()
    epoch = installer.abilities.serving_epoch()
    with monkeypatch.context() as patched:
        # For this drain alone: on a busy machine even a drain of an idle engine may take longer.
        patched.setattr(installer._server, "deadlines", Deadlines(drain=0.05))
        with pytest.raises(RetryableError, match=r"did not end within 0\.05 s \(--drain-timeout\)"):
            await installer.commit(TWO)
    assert host.engine.take_calls() == ["note a pause", "drain", "resume"]
    assert (installer.committed, installer.ready, host.held()) == (ONE, True, ["0.1", "0.1"])
    assert installer.abilities.serving_epoch() == epoch, "nothing was written"
    host.engine.idle.set()
    await installer.stage(TWO, SHADOW)
    await installer.commit(TWO)
    assert (installer.committed, host.engine.paused) == (TWO, False)


async def test_a_cancelled_drain_resumes_the_engine(host: Host) -> None:
    installer = await host.installed(safe_point="drain")
    await installer.stage(TWO, SHADOW)
    host.engine.idle.clear()
    committing = asyncio.ensure_future(installer.commit(TWO))
    await host.engine.draining.wait()
    committing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await committing
    assert (host.engine.paused, host.held()) == (False, ["0.1", "0.1"])


async def test_a_drain_never_begins_under_another_programs_pause(host: Host) -> None:
    installer = await host.installed(safe_point="drain")
    await installer.stage(TWO, SHADOW)
    host.engine.paused = True
    host.engine.take_calls()
    with pytest.raises(RetryableError, match="paused by another program"):
        await installer.commit(TWO)
    assert host.engine.take_calls() == []
    assert (host.engine.paused, host.held()) == (True, ["0.1", "0.1"])


async def test_a_repair_waits_for_no_request(host: Host) -> None:
    installer = await host.installed(safe_point="drain")
    host.engine.ranks[1].held = "0.7"
    host.engine.idle.clear()
    await installer.stage(TWO, SHADOW)
    assert "drain" not in host.engine.take_calls()
    assert host.held() == ["0.2", "0.2"]


async def test_a_serving_epoch_lasts_from_one_write_to_the_next(host: Host) -> None:
    installer = await host.installed(safe_point="drain")
    first = installer.abilities.serving_epoch()
    await installer.stage(TWO, SHADOW)
    host.engine.idle.clear()
    committing = asyncio.ensure_future(installer.commit(TWO))
    await host.engine.draining.wait()
    assert installer.abilities.serving_epoch() == first is not None, "requests end with the old weights"
    host.engine.before_commit = lambda: epochs.append(installer.abilities.serving_epoch())
    epochs: list[str | None] = []
    host.engine.idle.set()
    await committing
    assert epochs == [None, None], "at each rank"
    assert installer.abilities.serving_epoch() not in (None, first)


async def test_a_commit_that_was_taken_back_begins_a_new_serving_epoch(host: Host) -> None:
    installer = await host.installed(safe_point="drain")
    first = installer.abilities.serving_epoch()
    await installer.stage(TWO, SHADOW)
    host.engine.ranks[1].answers["commit"] = {"error": "by a test", "kind": "retryable"}
    with pytest.raises(P2PCastError, match="by a test"):
        await installer.commit(TWO)
    assert host.held() == ["0.1", "0.1"]
    assert installer.abilities.serving_epoch() not in (None, first)


async def test_between_two_steps_there_is_no_serving_epoch(host: Host) -> None:
    assert (await host.installed()).abilities.serving_epoch() is None
