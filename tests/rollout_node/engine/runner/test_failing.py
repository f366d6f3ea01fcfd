"""Installers that fail, hang or are missing are retried, and do not delay other engines."""

from __future__ import annotations

import pytest
from scripted_target import ONE, TWO, Target

from p2pcast.ground.errors import LocalError, RetryableError
from rollout_node.engine import runner as module
from tests.support.until import until


@pytest.mark.parametrize(
    "error", [RetryableError("not there yet"), LocalError("no folder"), OSError("a fault of its own")]
)
@pytest.mark.parametrize("call", ["start", "stage", "commit"])
async def test_failed_calls_are_retried(owner, run, call, error):
    target = Target()
    target.faults = [(call, error), (call, error)]
    runner = run(target)
    owner.move(ONE)
    await until(lambda: target.committed == ONE and runner.error is None)
    assert [c for c in target.calls if c[0] == call] == [(call, None if call == "start" else ONE)] * 3
    assert runner.versions == [ONE]


async def test_an_error_is_shown_and_does_not_hold_up_the_shadow(owner, run, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 3600.0)
    target = Target()
    target.faults = [("stage", LocalError("the disk is full"))]
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.error == "the disk is full")
    assert runner.settled(ONE)
    assert runner.status()["error"] == "the disk is full"
    owner.move(TWO)
    await until(lambda: target.committed == TWO)
    assert ("commit", ONE) not in target.calls
    assert runner.error is None


async def test_a_target_that_is_not_there_holds_up_nothing(owner, run, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 3600.0)
    target = Target()
    target.faults = [("start", RetryableError("no listener"))]
    runner = run(target)
    await until(lambda: runner.error == "no listener")
    assert runner.settled(ONE)
    owner.move(ONE)
    await until(lambda: target.committed == ONE)


@pytest.mark.parametrize("call", ["start", "commit"])
async def test_a_hanging_engine_does_not_stop_the_others(owner, run, call):
    hung, good = Target("hung"), Target("good")
    hung.hang = call
    run(hung)
    run(good)
    for version in (ONE, TWO):
        await until(lambda: not owner.readers)
        owner.move(version)
        await until(lambda v=version: good.committed == v)
    assert hung.committed is None


async def test_staging_that_hangs_is_given_up(owner, run, monkeypatch):
    monkeypatch.setattr(module, "STAGE_S", 0.01)
    hung, good = Target("hung"), Target("good")
    hung.hang = "stage"
    runner = run(hung)
    run(good)
    owner.move(ONE)
    await until(lambda: runner.error is not None and "took longer" in runner.error)
    assert runner.settled(ONE)
    hung.hang = None
    await until(lambda: good.committed == hung.committed == ONE)
