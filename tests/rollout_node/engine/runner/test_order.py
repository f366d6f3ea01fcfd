"""One installer's driver: the order of staging and commits."""

from __future__ import annotations

import asyncio

from scripted_target import ONE, THREE, TWO, Target

from p2pcast.ground.errors import LocalError
from rollout_node.engine import runner as module
from rollout_node.engine.runner import Runner
from tests.support.until import until


async def test_versions_are_staged_and_committed_in_order(owner, run):
    target = Target()
    runner = run(target)
    await until(lambda: target.calls == [("start", None)])
    for version in (ONE, TWO):
        owner.move(version)
        await until(lambda v=version: target.committed == v)
    staged_and_audited_once = [
        ("start", None),
        ("stage", ONE),
        ("commit", ONE),
        ("audit", ONE),
        ("stage", TWO),
        ("commit", TWO),
    ]
    assert target.done == staged_and_audited_once
    assert runner.versions == [ONE, TWO]
    assert runner.settled(TWO)
    assert not runner.settled(THREE)
    assert runner.status()["error"] is None


async def test_waking_without_news_does_nothing(owner, run):
    target = Target()
    runner = run(target)
    owner.move(ONE)
    await until(lambda: target.committed == ONE)
    calls, told = list(target.calls), owner.installed
    runner.wake()
    await until(lambda: owner.installed > told)
    assert target.calls == calls
    assert target.ready


async def test_manual_mode_installs_requested_versions_alone(owner, run):
    owner.manual = True
    target = Target()
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.staged == ONE)
    assert runner.settled(ONE)
    owner.move(TWO)
    await until(lambda: runner.staged == TWO)
    owner.target = ONE
    told = owner.installed
    runner.wake()
    await until(lambda: owner.installed > told)
    assert target.committed is None  # superseded: not gone back to
    owner.target = TWO
    runner.wake()
    await until(lambda: target.committed == TWO)
    owner.move(THREE)
    await until(lambda: runner.staged == THREE)
    assert target.committed == TWO
    assert runner.versions == [TWO]


async def test_a_version_that_was_superseded_while_commit_failed_is_not_gone_back_to(owner, run, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 3600.0)
    target = Target()
    target.faults = [("commit", LocalError("no"))]
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.error == "no")
    owner.move(TWO)
    await until(lambda: target.committed == TWO)
    assert target.calls.count(("commit", ONE)) == 1
    assert runner.versions == [TWO]


async def test_the_shadow_stands_still_for_a_commit_from_the_shadow(owner, run):
    target = Target()
    target.needs_shadow = True
    held: list[int] = []
    target.on_call = lambda what: held.append(owner.readers) if what == "commit" else None
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.ready)
    target.needs_shadow = False
    owner.move(TWO)
    await until(lambda: runner.holds(TWO))
    assert held == [1, 0]


async def test_at_the_end_the_installer_is_closed(owner):
    target = Target()
    runner = Runner(target, owner, owner, owner.on_changed, owner.on_wrong_weights)
    task = asyncio.create_task(runner.run())
    await until(lambda: runner.started)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert target.calls[-1] == ("close", None)
