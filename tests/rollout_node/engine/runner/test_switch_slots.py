"""``--rolling K``: engines take turns at switching."""

from __future__ import annotations

from collections.abc import Callable

from scripted_target import ONE, THREE, TWO, Owner, Target

from p2pcast.ground.errors import LocalError, RetryableError
from rollout_node.engine import runner as module
from rollout_node.engine.runner import Runner
from rollout_node.engine.switch_slots import SwitchSlots
from tests.support.until import until


def rolling(
    owner: Owner, run: Callable[..., Runner], count: int, turns: SwitchSlots
) -> tuple[list[Target], list[Runner]]:
    targets = [Target(f"engine {n}") for n in range(count)]
    return targets, [run(t, turns) for t in targets]


async def test_rolling_switches_one_engine_at_a_time(owner, run):
    targets, runners = rolling(owner, run, 3, SwitchSlots(1))
    owner.move(ONE)
    await until(lambda: all(r.ready for r in runners))
    unready: list[int] = []
    for target in targets:
        target.unready_while_committing = True
        target.on_call = lambda what: unready.append(sum(not r.ready for r in runners))
    for version in (TWO, THREE):
        owner.move(version)
        await until(lambda v=version: all(r.holds(v) for r in runners))
    assert max(unready) == 1


async def test_rolling_waits_for_an_engine_that_rejects_a_version(owner, run, monkeypatch):
    """Otherwise a version that every engine rejects would take one engine after the other out of use."""
    targets, runners = rolling(owner, run, 3, SwitchSlots(1))
    owner.move(ONE)
    await until(lambda: all(r.ready for r in runners))
    monkeypatch.setattr(module, "RETRY_S", 3600.0)
    for target in targets:
        target.faults = [("commit", LocalError("a bad version"))]
    owner.move(TWO)
    await until(lambda: sum(r.waits_for == "turn" for r in runners) == 2)
    assert sorted(r.ready for r in runners) == [False, True, True]
    for target in targets:
        target.faults = []
    owner.move(THREE)
    await until(lambda: all(r.holds(THREE) for r in runners))


async def test_rolling_does_not_wait_for_an_engine_that_is_gone(owner, run, monkeypatch):
    targets, runners = rolling(owner, run, 3, SwitchSlots(1))
    owner.move(ONE)
    await until(lambda: all(r.ready for r in runners))
    monkeypatch.setattr(module, "RETRY_S", 3600.0)
    targets[0].faults = [("commit", RetryableError("connection refused"))]
    owner.move(TWO)
    await until(lambda: [r.holds(TWO) for r in runners] == [False, True, True])


async def test_rolling_does_not_wait_for_an_engine_that_never_was_ready(owner, run, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 3600.0)
    targets, runners = rolling(owner, run, 3, SwitchSlots(1))
    targets[0].faults = [("commit", LocalError("not for me"))]
    owner.move(ONE)
    await until(lambda: [r.ready for r in runners] == [False, True, True])


async def test_rolling_fills_one_engine_at_a_time(owner, run):
    targets, runners = rolling(owner, run, 3, SwitchSlots(1))
    for target in targets:
        target.hang = "stage"
    owner.move(ONE)
    await until(
        lambda: (
            sum(t.calls.count(("stage", ONE)) for t in targets) == 1
            and sum(r.waits_for == "turn" for r in runners) == 2
        )
    )
    assert sum(r.settled(ONE) for r in runners) == 3  # none of them holds up the shadow
    for target in targets:
        target.hang = None
        owner.move_on(target)
    await until(lambda: all(r.ready for r in runners))


async def test_all_at_once_unless_told_otherwise(owner, run):
    targets, _ = rolling(owner, run, 3, SwitchSlots())
    for target in targets:
        target.hang = "commit"
    owner.move(ONE)
    await until(lambda: all(("commit", ONE) in t.calls for t in targets))
