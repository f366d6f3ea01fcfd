"""The user's callbacks around a switch, and what they put off."""

from __future__ import annotations

from scripted_target import ONE, TWO, Target

from p2pcast.ground.errors import LocalError
from rollout_node.engine.callbacks import Callbacks
from tests.support.until import until


class Hooks:
    def __init__(self, *defers: float) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.defers = list(defers)

    def before_commit(self, version: str) -> float | None:
        self.calls.append(("before", version))
        return self.defers.pop(0) if self.defers else None

    async def after_commit(self, version: str, error: str | None) -> None:
        self.calls.append(("after", version, error or "fine"))


async def test_callbacks_stand_around_every_switch(owner, run):
    hooks, target = Hooks(), Target()
    target.faults = [("commit", LocalError("no"))]
    runner = run(target, None, Callbacks(hooks, max_defer_s=10))
    owner.move(ONE)
    await until(lambda: runner.ready)
    owner.move(TWO)
    await until(lambda: len(hooks.calls) == 6)
    pairs = [("before", "0.1"), ("after", "0.1", "no"), ("before", "0.1"), ("after", "0.1", "fine")]
    assert hooks.calls == [*pairs, ("before", "0.2"), ("after", "0.2", "fine")]


async def test_a_deferred_version_is_asked_about_again_until_the_sum_is_reached(owner, run):
    hooks, target = Hooks(0.01, 0.01, 5.0, 5.0), Target()
    runner = run(target, None, Callbacks(hooks, max_defer_s=0.03))
    owner.move(ONE)
    await until(lambda: runner.ready)
    assert hooks.calls == [("before", "0.1")] * 4 + [("after", "0.1", "fine")]
    owner.move(TWO)  # a budget of its own
    hooks.defers = [0.01]
    await until(lambda: runner.holds(TWO))
    assert hooks.calls.count(("before", "0.2")) == 2


async def test_a_deferral_is_not_cut_short_by_news(owner, run):
    hooks, target = Hooks(3600.0), Target()
    runner = run(target, None, Callbacks(hooks, max_defer_s=3600.0))
    owner.move(ONE)
    await until(lambda: runner.waits_for == "before_commit")
    steps = runner.steps
    runner.wake()
    await until(lambda: runner.steps > steps)
    assert hooks.calls == [("before", "0.1")]
    assert target.committed is None


async def test_a_deferred_version_that_is_superseded_is_skipped(owner, run):
    hooks, target = Hooks(3600.0), Target()
    runner = run(target, None, Callbacks(hooks, max_defer_s=3600.0))
    owner.move(ONE)
    await until(lambda: runner.waits_for == "before_commit")
    assert runner.settled(ONE)
    owner.move(TWO)
    await until(lambda: runner.holds(TWO))
    assert ("commit", ONE) not in target.calls
