from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2pcast.ground.errors import LocalError, RefusedError, RetryableError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from rollout_node.engine import http_commands as module
from rollout_node.engine.commit_permission import CommitRequests
from rollout_node.engine.http_commands import HttpCommands
from rollout_node.installers.installer import Audit
from tests.support.until import until

ONE, TWO = Version(0, 1), Version(0, 2)


class Engine:
    def __init__(self, name, committed=None) -> None:
        self.installer = SimpleNamespace(name=name)
        self.committed, self.fault, self.steps, self.woken = committed, None, 0, 0
        self.wrong = []

    def holds(self, version) -> bool:
        return self.committed == version

    def wake(self) -> None:
        self.woken += 1

    @property
    def error(self):
        return None if self.fault is None else str(self.fault)

    def status(self):
        return {"name": self.installer.name, "pause_s": 0.5, "recomputed_tokens": 3 if self.committed else None}

    async def audit(self):
        if self.committed is None:
            raise RefusedError("no version is in use")
        return Audit(self.committed, self.wrong, []), 255


class Peer:
    def __init__(self, *engines, driver="external", staged=TWO) -> None:
        self.engines, self.staged, self.readers = list(engines), staged, 0
        self.requests, self.changed = CommitRequests(), Wakeup()
        self.commands = HttpCommands(self.engines, self, self.requests, driver, self.changed)

    @contextlib.asynccontextmanager
    async def held_still(self):
        self.readers += 1
        try:
            yield None if self.staged is None else (self.staged, Path("shadow"))
        finally:
            self.readers -= 1

    async def waiting(self, version) -> None:
        await until(lambda: self.requests.requested(version))

    def switch(self, engine, version) -> None:
        engine.committed = version
        self.changed.notify()


async def test_a_peer_in_auto_mode_takes_no_commit():
    with pytest.raises(UsageError, match="--driver external"):
        await Peer(Engine("a"), driver="peer").commands.commit({"version": "newest"})


async def test_a_commit_answers_once_every_engine_is_live():
    a, b = Engine("a", ONE), Engine("b", ONE)
    peer = Peer(a, b)
    task = asyncio.create_task(peer.commands.commit({"version": "newest"}))
    await peer.waiting(TWO)
    assert peer.readers == 1
    assert a.woken == b.woken == 1
    peer.switch(a, TWO)
    await asyncio.sleep(0)
    assert not task.done()
    peer.switch(b, TWO)
    answer = await task
    assert (answer["version"], answer["pause_s"], answer["recomputed_tokens"]) == ("0.2", 0.5, 6)
    assert [e["name"] for e in answer["engines"]] == ["a", "b"]
    assert peer.readers == 0
    assert not peer.requests.requested(TWO)


async def test_a_version_in_use_is_answered_without_the_shadow():
    peer = Peer(Engine("a", ONE))
    assert (await peer.commands.commit({"version": "0.1"}))["version"] == "0.1"


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        ({}, UsageError, "name the version"),
        ({"version": 3}, UsageError, "name the version"),
        ({"version": "x"}, UsageError, "not a version"),
        ({"version": "newest", "timeout_s": True}, UsageError, "timeout_s"),
        ({"version": "newest", "timeout_s": -1}, UsageError, "timeout_s"),
        ({"version": "newest", "timeout_s": float("nan")}, UsageError, "timeout_s"),
        ({"version": "newest", "timeout_s": 1e9}, UsageError, "timeout_s"),
        ({"version": "0.7"}, RefusedError, "0.7 is not staged here: 0.2 is"),
    ],
)
async def test_a_commit_that_cannot_be_is_refused(body, error, text):
    with pytest.raises(error, match=text):
        await Peer(Engine("a")).commands.commit(body)


async def test_without_engines_or_versions_a_commit_is_refused():
    with pytest.raises(RefusedError, match="no engines"):
        await Peer().commands.commit({"version": "newest"})
    with pytest.raises(RefusedError, match="no version is staged"):
        await Peer(Engine("a"), staged=None).commands.commit({"version": "newest"})


async def test_a_commit_that_takes_too_long_names_the_engines_that_are_late():
    with pytest.raises(RetryableError, match=r"not live on 1 of 2 engines \(b is at 0.1"):
        await Peer(Engine("a", TWO), Engine("b", ONE)).commands.commit({"version": "newest", "timeout_s": 0})


async def test_an_engine_that_rejects_the_version_ends_the_commit():
    engine = Engine("a", ONE)
    peer = Peer(engine)
    task = asyncio.create_task(peer.commands.commit({"version": "newest"}))
    await peer.waiting(TWO)
    engine.fault, engine.steps = RetryableError("away"), 1
    peer.changed.notify()
    await asyncio.sleep(0)
    assert not task.done()  # the engine may return in time
    engine.fault = LocalError("no room")
    peer.changed.notify()
    with pytest.raises(LocalError, match=r"0\.2 is not live: a: no room"):
        await task


async def test_verify_compares_every_engine_or_the_named_engine():
    a, b = Engine("a", ONE), Engine("b", TWO)
    peer = Peer(a, b, driver="peer")
    answer = await peer.commands.verify({})
    assert answer["ok"]
    assert [(e["name"], e["version"], e["state"]) for e in answer["engines"]] == [
        ("a", "0.1", f"{255:016x}"),
        ("b", "0.2", f"{255:016x}"),
    ]
    b.wrong = ["t"]
    assert not (await peer.commands.verify({"engine": "b"}))["ok"]
    assert (await peer.commands.verify({"engine": "a"}))["ok"]
    with pytest.raises(UsageError, match="no engine 'c' here; there is a, b"):
        await peer.commands.verify({"engine": "c"})


async def test_verify_gives_up_on_an_engine_that_hangs(monkeypatch):
    monkeypatch.setattr(module, "VERIFY_S", 0.01)
    engine = Engine("a", ONE)
    engine.audit = asyncio.Event().wait
    with pytest.raises(RetryableError, match="did not say within"):
        await Peer(engine).commands.verify({})
