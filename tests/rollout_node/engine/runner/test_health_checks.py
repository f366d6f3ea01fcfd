"""Engines are checked while they run: an engine that lost its weights, was restarted or is out of reach is not
ready.
"""

from __future__ import annotations

from scripted_target import ONE, TWO, Target

from rollout_node.engine import runner as module
from rollout_node.installers.installer import Abilities
from tests.support.until import until


async def test_an_engine_that_lost_its_weights_is_filled_again(owner, run):
    target = Target()
    runner = run(target)
    owner.move(ONE)
    await until(lambda: target.committed == ONE)
    target.ready = False
    runner.wake()
    await until(lambda: target.ready)
    assert target.calls.count(("stage", ONE)) == 2


async def test_an_engine_that_was_restarted_is_unready_at_once_and_filled_anew(owner, run, monkeypatch):
    monkeypatch.setattr(module, "CHECK_S", 0.001)
    target = Target()
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.ready)
    target.hang = "stage"
    target.holding = None
    await until(lambda: target.calls.count(("stage", ONE)) == 2)
    assert (runner.ready, runner.committed, runner.staged) == (False, None, None)
    assert runner.status()["ready"] is False
    target.hang = None
    owner.move_on(target)
    await until(lambda: runner.ready)
    assert target.calls.count(("audit", ONE)) == 2
    assert runner.committed == target.holding == ONE


async def test_an_engine_in_use_stays_ready_during_a_check(owner, run, monkeypatch):
    monkeypatch.setattr(module, "CHECK_S", 0.001)
    target = Target()
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.ready)
    seen: list[tuple[str, bool]] = []
    target.on_call = lambda what: seen.append((what, runner.ready))
    await until(lambda: len(seen) >= 3)
    assert seen[:3] == [("check", True)] * 3


async def test_an_engine_out_of_reach_is_unready_until_an_answer(owner, run, monkeypatch):
    monkeypatch.setattr(module, "CHECK_S", 0.001)
    target = Target()
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.ready)
    target.away = True
    await until(lambda: not runner.ready)
    assert runner.error == "no answer"
    target.away = False
    await until(lambda: runner.ready)
    assert runner.error is None
    assert target.calls.count(("audit", ONE)) == 1  # the weights were there all the time


async def test_an_engine_that_does_not_state_its_version_is_out_of_reach(owner, run, monkeypatch):
    monkeypatch.setattr(module, "CHECK_S", 0.001)
    monkeypatch.setattr(module, "CHECK_DEADLINE_S", 0.001)
    target = Target()
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.ready)
    target.hang = "check"
    await until(lambda: runner.error is not None and "did not say" in runner.error)
    assert not runner.ready
    target.hang = None
    await until(lambda: runner.ready)


async def test_a_target_without_signs_of_life_is_unready_until_signs_return(owner, run, monkeypatch):
    """Also while a version is being staged; the target's own check says nothing."""

    class Pulse:
        beats, silent = True, None

        async def fault(self) -> str | None:
            return self.silent

    monkeypatch.setattr(module, "CHECK_S", 0.001)
    target, pulse = Target(), Pulse()
    target.abilities = Abilities(pulse)
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.ready)
    target.hang = "stage"
    owner.move(TWO)
    await until(lambda: ("stage", TWO) in target.calls)
    assert runner.ready
    pulse.silent = "no sign of life of rank 0"
    await until(lambda: not runner.ready)
    assert runner.status()["error"] == "no sign of life of rank 0"
    pulse.silent = None
    await until(lambda: runner.ready)
