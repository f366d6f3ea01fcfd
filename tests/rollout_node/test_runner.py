"""One installer's driver: what is staged and committed when, and what happens when the installer fails or hangs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from p2pcast.errors import LocalError, RetryableError
from p2pcast.version import Version
from rollout_node import runner as module
from rollout_node.installers.base import CommitReport
from rollout_node.runner import Runner

ONE, TWO, THREE = (Version(0, n) for n in (1, 2, 3))
NOWHERE = Path("shadow")


class Target:
    """An installer in memory that keeps the rules of one, and fails when it is told to."""

    def __init__(self, name: str = "target") -> None:
        self.name = name
        self.calls: list[tuple[str, Version | None]] = []
        self.faults: list[tuple[str, BaseException]] = []
        """(call, error): the next such call fails."""
        self.hang: str | None = None
        self.committed: Version | None = None
        self.ready = False
        self._staged: Version | None = None

    async def start(self) -> None:
        await self._call("start", None)

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
        self._staged, self.committed, self.ready = None, version, True
        return CommitReport(0.0)

    async def close(self) -> None:
        self.calls.append(("close", None))

    async def _call(self, what: str, version: Version | None) -> None:
        self.calls.append((what, version))
        if self.hang == what:
            await asyncio.Event().wait()
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
        self.runners: list[Runner] = []

    @contextlib.asynccontextmanager
    async def held_still(self) -> AsyncIterator[tuple[Version, Path] | None]:
        self.readers += 1
        try:
            yield None if self.version is None else (self.version, NOWHERE)
        finally:
            self.readers -= 1

    def may_commit(self, version: Version) -> bool:
        return not self.manual or version == self.target

    def on_installed(self) -> None:
        self.installed += 1

    def move(self, version: Version) -> None:
        assert not self.readers, "an installer reads the shadow"
        self.version = version
        for each in self.runners:
            each.wake()


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
async def run(owner, monkeypatch) -> AsyncIterator[Callable[[Target], Runner]]:
    """Starts a runner; waiting before another try takes no time."""
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    tasks: list[asyncio.Task[None]] = []

    def start(target: Target) -> Runner:
        made = Runner(owner, target)
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
    assert target.calls == [("start", None), ("stage", ONE), ("commit", ONE), ("stage", TWO), ("commit", TWO)]
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


async def test_an_engine_that_is_there_already_is_left_alone(owner, run):
    target = Target()
    target.committed, target.ready = ONE, True
    runner = run(target)
    told = owner.installed
    owner.move(ONE)
    await until(lambda: owner.installed > told and runner.started)
    assert target.calls == [("start", None)]


async def test_an_engine_that_lost_its_weights_is_given_them_again(owner, run):
    target = Target()
    runner = run(target)
    owner.move(ONE)
    await until(lambda: target.committed == ONE)
    target.ready = False
    runner.wake()
    await until(lambda: target.ready)
    assert target.calls.count(("stage", ONE)) == 2


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
