"""Abandoned staging: the patch is removed only after every writing thread has ended."""

from __future__ import annotations

import asyncio
import errno
import threading
from types import SimpleNamespace

import pytest

from p2pcast.files import disk
from p2pcast.ground.errors import LocalError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.state.patch_builder import PatchBuilder
from p2pcast.state.patch_file import PatchWriter
from p2pcast.state.staging import Staging

V1 = Version(0, 1)


class Whole:
    """A whole delta in memory, with the attributes that staging reads."""

    def __init__(self, delta) -> None:
        self.open = SimpleNamespace(base=Version(0, 0), version=V1, piece=1)
        self.progress = asyncio.Event()
        self.aborted = False
        self.finished = False
        self.assembly = SimpleNamespace(directory=[placed for placed, _ in delta], manifest=None)
        self.stored = SimpleNamespace(prefix=1 << 40)
        log = bytearray(max((placed.offset + placed.bytes for placed, _ in delta), default=0))
        for placed, payload in delta:
            log[placed.offset : placed.offset + placed.bytes] = payload
        self.log = SimpleNamespace(read=lambda offset, size: bytes(log[offset : offset + size]))


@pytest.mark.parametrize("how", ["cancelled", "aborted"])
async def test_patch_is_removed_after_the_running_decode_ends(world, tmp_path, monkeypatch, how):
    a = world.state(1)
    begun, go_on, ended = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()
    decode = PatchBuilder.decode

    def slow(self, placed, payload):
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(600)
        assert part.exists(), "a thread still writes to the patch"
        ended.append(decode(self, placed, payload))

    monkeypatch.setattr(PatchBuilder, "decode", slow)
    staging = Staging(2)
    try:
        with world.filled(tmp_path, a) as shadow:
            path = shadow.patch_path(V1)
            part = path.with_name(path.name + ".part")
            holding = Whole(world.delta(a, world.step(a, 2))[:2])
            task = asyncio.ensure_future(staging.patch(holding, shadow))
            await begun.wait()
            if how == "cancelled":
                task.cancel()
            else:
                holding.aborted = True
                holding.progress.set()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not task.done()
            go_on.set()
            with pytest.raises(asyncio.CancelledError if how == "cancelled" else RetryableError):
                await task
            assert len(ended) == 2
            assert not part.exists()
            assert shadow.patches == []
    finally:
        go_on.set()
        staging.close()


@pytest.mark.parametrize("how", ["cancelled", "cancelled twice", "fails"])
async def test_removal_of_a_patch_waits_for_its_last_write(world, tmp_path, monkeypatch, how):
    """Two threads that close one descriptor would close another file of its number."""
    a, b = world.state(1), world.step(world.state(1), 2)
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    finish = PatchWriter.finish

    def slow(self, state):
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(600)
        finish(self, state)
        if how == "fails":
            raise LocalError("the disk is full")

    monkeypatch.setattr(PatchWriter, "finish", slow)
    staging = Staging(2)
    try:
        with world.filled(tmp_path, a) as shadow:
            holding = Whole(world.delta(a, b))
            holding.finished = True
            holding.assembly.manifest = SimpleNamespace(state=world.digest(b))
            task = asyncio.ensure_future(staging.patch(holding, shadow))
            await begun.wait()
            for _ in range({"cancelled": 1, "cancelled twice": 2, "fails": 0}[how]):
                task.cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
            assert not task.done()
            go_on.set()
            with pytest.raises(LocalError if how == "fails" else asyncio.CancelledError):
                await task
            assert list(shadow.patch_path(V1).parent.iterdir()) == []
    finally:
        go_on.set()
        staging.close()


async def test_a_patch_that_cannot_be_removed_hides_no_cancellation(world, tmp_path, monkeypatch, caplog):
    a = world.state(1)
    begun = asyncio.Event()

    def refused(path, *, missing_ok=False):
        raise OSError(errno.EIO, "Input/output error", str(path))

    staging = Staging(2)
    try:
        with world.filled(tmp_path, a) as shadow:
            holding = Whole([])
            monkeypatch.setattr(holding.progress, "wait", _told(holding.progress.wait, begun))
            monkeypatch.setattr(disk, "unlink", refused)
            task = asyncio.ensure_future(staging.patch(holding, shadow))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert "an abandoned patch stays" in caplog.text
            monkeypatch.undo()
    finally:
        staging.close()


def _told(wait, begun):
    async def told():
        begun.set()
        return await wait()

    return told


async def test_a_warm_up_that_is_cancelled_begins_no_further_step(monkeypatch):
    begun, go_on, seen = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def two_steps():
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(600)
        seen.append(1)
        yield
        seen.append(2)
        yield

    monkeypatch.setattr("p2pcast.state.staging.steps", two_steps)
    staging = Staging(1)
    try:
        warming = asyncio.ensure_future(staging.warm_up())
        await begun.wait()
        warming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await warming
        go_on.set()
        await loop.shutdown_default_executor()
        assert seen == [1]
    finally:
        go_on.set()
        staging.close()


async def test_a_warm_up_takes_all_steps(monkeypatch):
    seen = []
    monkeypatch.setattr("p2pcast.state.staging.steps", lambda: (seen.append(step) for step in range(5)))
    staging = Staging(1)
    await staging.warm_up()
    staging.close()
    assert seen == [0, 1, 2, 3, 4]
