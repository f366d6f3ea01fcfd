"""One installer's driver: what is staged and committed when, and what happens when the installer fails or hangs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.errors import LocalError, RefusedError, RetryableError
from p2pcast.version import Version
from rollout_node import runner as module
from rollout_node.callbacks import Callbacks
from rollout_node.installers.base import Audit, CommitReport
from rollout_node.marks import Marks
from rollout_node.runner import Runner
from rollout_node.turns import Turns

ONE, TWO, THREE = (Version(0, n) for n in (1, 2, 3))
NOWHERE = Path("shadow")
LAYOUT = Layout([Tensor("a", "U8", (3,))])


class Target:
    """An installer in memory that keeps the rules of one, and fails when it is told to."""

    def __init__(self, name: str = "target") -> None:
        self.name = name
        self.calls: list[tuple[str, Version | None]] = []
        self.faults: list[tuple[str, BaseException]] = []
        """(call, error): the next such call fails."""
        self.hang: str | None = None
        self.holding: Version | None = None
        """What it really holds; ``committed`` is what it knows."""
        self.needs_shadow = False
        self.away = False
        self.unready_while_committing = False
        self.on_call: Callable[[str], None] = lambda what: None
        self.released = asyncio.Event()
        self.dense = False
        self.wrong: list[str] = []
        """Tensors that the next audit finds wrong."""
        self.committed: Version | None = None
        self.ready = False
        self._staged: Version | None = None

    async def start(self) -> None:
        await self._call("start", None)

    @property
    def commit_needs_shadow(self) -> bool:
        return self.needs_shadow

    async def check(self) -> None:
        await self._call("check", None)
        if self.committed is not None and self.holding != self.committed:
            self.committed, self.ready = None, False

    async def audit(self, layout: Layout, digests: Mapping[int, int]) -> Audit:
        assert self.committed is not None
        await self._call("audit", self.committed)
        assert (layout, digests) == (LAYOUT, {0: self.committed.step})
        version, wrong, self.wrong = self.committed, self.wrong, []
        if wrong:
            self.committed, self.ready = None, False
        return Audit(version, wrong, [])

    async def stage(self, version: Version, shadow: Path) -> None:
        assert shadow == NOWHERE
        self._staged = None
        await self._call("stage", version)
        self._staged = version

    async def commit(self, version: Version) -> CommitReport:
        if version != self._staged:
            self.ready = False
            raise LocalError(f"{version} is not staged")
        await self._call("commit", version)
        self._staged, self.committed, self.holding, self.ready = None, version, version, True
        return CommitReport(0.0, dense=self.dense)

    @property
    def done(self) -> list[tuple[str, Version | None]]:
        """Without the looks that it got meanwhile."""
        return [c for c in self.calls if c[0] != "check"]

    async def close(self) -> None:
        self.calls.append(("close", None))

    async def _call(self, what: str, version: Version | None) -> None:
        self.calls.append((what, version))
        if self.away:
            raise RetryableError("nobody answers")
        if what == "commit" and self.unready_while_committing:
            self.ready = False
            await asyncio.sleep(0)
        self.on_call(what)
        if self.hang == what:
            await self.released.wait()
        fault = next((f for f in self.faults if f[0] == what), None)
        if fault is not None:
            self.faults.remove(fault)
            self.ready = False
            raise fault[1]


class Owner:
    """A shadow that moves when a test says so."""

    def __init__(self) -> None:
        self.version: Version | None = None
        self.target: Version | None = None
        self.manual = False
        self.readers = 0
        self.installed = 0
        self.doubts = 0
        self.far_back: set[Version] = set()
        self.runners: list[Runner] = []

    @contextlib.asynccontextmanager
    async def held_still(self) -> AsyncIterator[tuple[Version, Path] | None]:
        self.readers += 1
        try:
            yield None if self.version is None else (self.version, NOWHERE)
        finally:
            self.readers -= 1

    def marks(self) -> Marks:
        assert self.readers
        assert self.version is not None
        return Marks(LAYOUT, np.array([self.version.step], np.uint64))

    def is_dense(self, base: Version | None, to: Version) -> bool:
        return base is None or base in self.far_back

    def may_commit(self, version: Version) -> bool:
        return not self.manual or version == self.target

    def on_installed(self) -> None:
        self.installed += 1

    def doubt(self) -> None:
        self.doubts += 1

    def move_on(self, target: Target) -> None:
        """One that hangs goes on."""
        target.released.set()

    def move(self, version: Version) -> None:
        assert not self.readers, "an installer reads the shadow"
        self.version = version
        for each in self.runners:
            each.wake()


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
async def run(owner, monkeypatch) -> AsyncIterator[Callable[..., Runner]]:
    """Starts a runner; waiting before another try takes no time."""
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    tasks: list[asyncio.Task[None]] = []

    def start(target: Target, turns: Turns | None = None, callbacks: Callbacks | None = None) -> Runner:
        made = Runner(owner, target, turns, callbacks)
        owner.runners.append(made)
        tasks.append(asyncio.create_task(made.run()))
        return made

    yield start
    for task in tasks:
        assert not task.done()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 30
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.001)


async def test_versions_are_staged_and_committed_in_order(owner, run):
    target = Target()
    runner = run(target)
    await until(lambda: target.calls == [("start", None)])
    for version in (ONE, TWO):
        owner.move(version)
        await until(lambda v=version: target.committed == v)
    staged_and_audited_once = [("start", None), ("stage", ONE), ("commit", ONE), ("audit", ONE), ("stage", TWO), ("commit", TWO)]
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


@pytest.mark.parametrize("error", [RetryableError("not there yet"), LocalError("no folder"), OSError("a fault of its own")])
@pytest.mark.parametrize("call", ["start", "stage", "commit"])
async def test_what_failed_is_tried_again(owner, run, call, error):
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
    target.faults = [("start", RetryableError("nobody listens"))]
    runner = run(target)
    await until(lambda: runner.error == "nobody listens")
    assert runner.settled(ONE)
    owner.move(ONE)
    await until(lambda: target.committed == ONE)


async def test_by_hand_only_what_was_asked_for(owner, run):
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


async def test_an_engine_that_says_it_is_there_already_is_audited_first(owner, run):
    target = Target()
    target.committed, target.ready = ONE, True
    runner = run(target)
    assert (runner.ready, runner.committed) == (False, None)
    owner.move(ONE)
    await until(lambda: runner.ready)
    assert target.done == [("start", None), ("stage", ONE), ("commit", ONE), ("audit", ONE)]


async def test_an_engine_that_lost_its_weights_is_given_them_again(owner, run):
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


async def test_an_engine_in_use_stays_ready_while_it_is_looked_at(owner, run, monkeypatch):
    monkeypatch.setattr(module, "CHECK_S", 0.001)
    target = Target()
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.ready)
    seen: list[tuple[str, bool]] = []
    target.on_call = lambda what: seen.append((what, runner.ready))
    await until(lambda: len(seen) >= 3)
    assert seen[:3] == [("check", True)] * 3


async def test_an_engine_out_of_reach_is_unready_until_it_answers(owner, run, monkeypatch):
    monkeypatch.setattr(module, "CHECK_S", 0.001)
    target = Target()
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.ready)
    target.away = True
    await until(lambda: not runner.ready)
    assert runner.error == "nobody answers"
    target.away = False
    await until(lambda: runner.ready)
    assert runner.error is None
    assert target.calls.count(("audit", ONE)) == 1  # the weights were there all the time


async def test_an_engine_that_does_not_say_what_it_holds_is_out_of_reach(owner, run, monkeypatch):
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


async def test_an_engine_that_is_merely_asked_is_no_less_ready(owner, run, monkeypatch):
    monkeypatch.setattr(module, "CHECK_S", 0.001)
    target = Target()
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.ready)
    seen: list[tuple[str, bool]] = []
    target.on_call = lambda what: seen.append((what, runner.ready))
    await until(lambda: len(seen) > 2)
    assert set(seen) == {("check", True)}


async def test_what_the_audit_finds_wrong_is_not_ready_and_is_filled_again(owner, run):
    target = Target()
    target.wrong = [f"t{n}" for n in range(5)]
    runner = run(target)
    seen: list[tuple[bool, Version | None]] = []
    target.on_call = lambda what: seen.append((runner.ready, runner.committed))
    owner.move(ONE)
    await until(lambda: runner.ready)
    assert target.done == [("start", None), *[("stage", ONE), ("commit", ONE), ("audit", ONE)] * 2]
    assert set(seen) == {(False, None)}
    assert runner.versions == [ONE]


async def test_an_error_names_the_tensors_that_differ(owner, run, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 3600.0)
    target = Target()
    target.wrong = [f"t{n}" for n in range(5)]
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.error is not None)
    assert "t0, t1, t2 and 2 more" in runner.error
    assert not runner.ready


async def test_a_dense_commit_into_an_engine_in_use_is_audited_a_sparse_one_is_not(owner, run):
    target = Target()
    runner = run(target)
    for version, dense in ((ONE, False), (TWO, True), (THREE, False)):
        target.dense = dense
        owner.move(version)
        await until(lambda v=version: runner.holds(v))
    assert [c for c in target.calls if c[0] == "audit"] == [("audit", ONE), ("audit", TWO)]


async def test_an_audit_that_could_not_be_made_is_made_before_the_engine_is_ready(owner, run):
    target = Target()
    target.faults = [("audit", RetryableError("no answer"))]
    runner = run(target)
    owner.move(ONE)
    await until(lambda: runner.ready)
    assert target.calls.count(("audit", ONE)) == 2


async def test_the_shadow_stands_still_for_a_commit_that_reads_it(owner, run):
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


async def test_on_demand_an_engine_is_audited_and_mended(owner, run):
    target = Target()
    runner = run(target)
    with pytest.raises(RefusedError, match="no version is in use"):
        await runner.audit()
    owner.move(ONE)
    await until(lambda: runner.ready)
    owner.manual = True
    owner.move(TWO)
    await until(lambda: runner.staged == TWO)
    found, state = await runner.audit()
    assert (found, state) == (Audit(ONE, [], []), 1)  # the digests of what is in use, though the shadow is further
    assert runner.committed == ONE
    await until(lambda: runner.staged == TWO)
    owner.manual = False
    target.wrong = ["t"]
    assert (await runner.audit())[0].wrong == ["t"]
    assert owner.doubts == 1  # what it was given may be what is wrong
    await until(lambda: runner.holds(TWO))
    assert target.calls.count(("stage", TWO)) == 3  # what was staged may have been lost


# -- --rolling K


def rolling(owner: Owner, run: Callable[..., Runner], count: int, turns: Turns) -> tuple[list[Target], list[Runner]]:
    targets = [Target(f"engine {n}") for n in range(count)]
    return targets, [run(t, turns) for t in targets]


async def test_rolling_switches_one_engine_at_a_time(owner, run):
    targets, runners = rolling(owner, run, 3, Turns(1))
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
    """Else a version that is bad for all would take one engine after the other out of use."""
    targets, runners = rolling(owner, run, 3, Turns(1))
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
    targets, runners = rolling(owner, run, 3, Turns(1))
    owner.move(ONE)
    await until(lambda: all(r.ready for r in runners))
    monkeypatch.setattr(module, "RETRY_S", 3600.0)
    targets[0].faults = [("commit", RetryableError("connection refused"))]
    owner.move(TWO)
    await until(lambda: [r.holds(TWO) for r in runners] == [False, True, True])


async def test_rolling_does_not_wait_for_an_engine_that_never_was_ready(owner, run, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 3600.0)
    targets, runners = rolling(owner, run, 3, Turns(1))
    targets[0].faults = [("commit", LocalError("not for me"))]
    owner.move(ONE)
    await until(lambda: [r.ready for r in runners] == [False, True, True])


async def test_rolling_fills_one_engine_at_a_time(owner, run):
    targets, runners = rolling(owner, run, 3, Turns(1))
    for target in targets:
        target.hang = "stage"
    owner.move(ONE)
    await until(
        lambda: sum(t.calls.count(("stage", ONE)) for t in targets) == 1 and sum(r.waits_for == "turn" for r in runners) == 2
    )
    assert sum(r.settled(ONE) for r in runners) == 3  # none of them holds up the shadow
    for target in targets:
        target.hang = None
        owner.move_on(target)
    await until(lambda: all(r.ready for r in runners))


async def test_all_at_once_unless_told_otherwise(owner, run):
    targets, _ = rolling(owner, run, 3, Turns())
    for target in targets:
        target.hang = "commit"
    owner.move(ONE)
    await until(lambda: all(("commit", ONE) in t.calls for t in targets))


# -- the user's callbacks


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


async def test_a_version_that_is_superseded_while_it_is_deferred_is_left_out(owner, run):
    hooks, target = Hooks(3600.0), Target()
    runner = run(target, None, Callbacks(hooks, max_defer_s=3600.0))
    owner.move(ONE)
    await until(lambda: runner.waits_for == "before_commit")
    assert runner.settled(ONE)
    owner.move(TWO)
    await until(lambda: runner.holds(TWO))
    assert ("commit", ONE) not in target.calls


@pytest.mark.parametrize("call", ["start", "commit"])
async def test_one_that_hangs_does_not_stop_the_others(owner, run, call):
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


async def test_at_the_end_the_installer_is_closed(owner):
    target = Target()
    runner = Runner(owner, target)
    task = asyncio.create_task(runner.run())
    await until(lambda: runner.started)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert target.calls[-1] == ("close", None)
