"""Leases hold the shadow still until they are released or their time is up, and a release says which came first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pcast.ground.errors import RefusedError, RetryableError, UsageError
from p2pcast.ground.version import Version
from rollout_node.shadow.shadow_state import ShadowState
from rollout_node.stage.shadow_leases import FIRST_S, MAX_LEASES, MAX_WAIT_S, ShadowLeases

FILE = Path("/shadow/model.safetensors")


class Tasks:
    def __init__(self) -> None:
        self.running: list[asyncio.Task[None]] = []

    def later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.running.append(asyncio.create_task(work, name=name))


class Parts:
    def __init__(self) -> None:
        self.state = ShadowState()
        self.tasks = Tasks()
        self.leases = ShadowLeases(self.state, self.tasks)
        self.stage(1)

    def stage(self, step: int) -> None:
        self.state.shadow, self.state.staged = SimpleNamespace(path=FILE), Version(0, step)  # type: ignore[assignment]

    async def move(self, step: int) -> None:
        async with self.state.moving(lambda _: True):
            self.stage(step)


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    parts = Parts()
    yield parts
    for task in parts.tasks.running:
        task.cancel()
    await asyncio.gather(*parts.tasks.running, return_exceptions=True)
    assert parts.leases.rows == []


async def idle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_shadow_moves_once_each_lease_is_released(parts: Parts) -> None:
    one, two = [await parts.leases.lease({}) for _ in range(2)]
    assert (one["version"], one["path"]) == ("0.1", str(FILE))
    moving = asyncio.create_task(parts.move(2))
    assert await parts.leases.release({"lease": one["lease"]}) == {"held": True}
    await idle()
    assert not moving.done()
    assert [row["version"] for row in parts.leases.rows] == ["0.1"]
    assert await parts.leases.release({"lease": two["lease"]}) == {"held": True}
    await moving
    assert await parts.leases.release({"lease": two["lease"]}) == {"held": False}


async def test_a_prolonged_lease_lasts_for_the_time_given(parts: Parts) -> None:
    lease = await parts.leases.lease({})
    assert FIRST_S - 1 < lease["left_s"] <= FIRST_S
    assert (await parts.leases.lease({"lease": lease["lease"], "hold_s": 1000}))["left_s"] > 999
    moving = asyncio.create_task(parts.move(2))
    await idle()
    assert not moving.done()
    await parts.leases.lease({"lease": lease["lease"], "hold_s": 0.01})
    await moving
    assert await parts.leases.release({"lease": lease["lease"]}) == {"held": False}
    with pytest.raises(RefusedError, match="this lease has ended"):
        await parts.leases.lease({"lease": lease["lease"], "hold_s": 1000})


async def test_time_counts_from_the_moment_when_the_shadow_is_held(parts: Parts) -> None:
    async with parts.state.moving(lambda _: True):
        asking = asyncio.create_task(parts.leases.lease({}))
        await asyncio.sleep(0.02)
        assert not asking.done()
        parts.stage(2)
    lease = await asking
    assert lease["version"] == "0.2"
    assert lease["left_s"] > FIRST_S - 0.01


async def test_a_caller_that_no_longer_waits_leaves_no_lease(parts: Parts) -> None:
    async with parts.state.moving(lambda _: True):
        with pytest.raises(RetryableError, match=r"a version was being staged for 0\.01 s"):
            await parts.leases.lease({"wait_s": 0.01})
        asking = asyncio.create_task(parts.leases.lease({}))
        await idle()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await parts.move(2)
    await idle()
    assert parts.leases.rows == []


async def test_readers_one_after_the_other_do_not_keep_the_shadow_at_a_version(parts: Parts) -> None:
    first = await parts.leases.lease({})
    moving = asyncio.create_task(parts.move(2))
    await idle()
    second = asyncio.create_task(parts.leases.lease({}))
    await idle()
    assert not second.done()
    await parts.leases.release({"lease": first["lease"]})
    assert (await second)["version"] == "0.2"
    await moving


async def test_a_reader_does_not_wait_for_a_writer_that_may_not_leave_the_version(parts: Parts) -> None:
    async def barred() -> None:
        async with parts.state.moving(lambda _: False):
            raise AssertionError

    waiting = asyncio.create_task(barred())
    await idle()
    assert (await parts.leases.lease({}))["version"] == "0.1"
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_at_the_daemons_end_no_caller_and_no_lease_is_left(parts: Parts) -> None:
    lease = await parts.leases.lease({})
    async with parts.state.held_still():
        moving = asyncio.create_task(parts.move(2))
        await idle()
        asking = asyncio.create_task(parts.leases.lease({}))
        await idle()
        parts.leases.end()
        with pytest.raises(RetryableError, match="the peer ends"):
            await asking
    await moving
    assert await parts.leases.release({"lease": lease["lease"]}) == {"held": False}


async def test_leases_are_bounded_and_none_is_lost(parts: Parts) -> None:
    held = [await parts.leases.lease({}) for _ in range(MAX_LEASES)]
    with pytest.raises(RetryableError, match=f"{MAX_LEASES} leases"):
        await parts.leases.lease({})
    assert len(parts.leases.rows) == MAX_LEASES
    await parts.leases.release({"lease": held[0]["lease"]})
    await parts.leases.lease({})


async def test_without_a_version_there_is_no_lease(parts: Parts) -> None:
    parts.state.staged = None
    with pytest.raises(RefusedError, match="no version is staged"):
        await parts.leases.lease({})
    await idle()
    await parts.move(1)


@pytest.mark.parametrize("wait", [0, -1, MAX_WAIT_S + 1, float("nan"), float("inf"), True, "60", None, [1], 10**400])
async def test_a_malformed_time_is_refused(parts: Parts, wait: Any) -> None:
    with pytest.raises(UsageError, match="wait_s"):
        await parts.leases.lease({"wait_s": wait})
    with pytest.raises(UsageError, match="hold_s"):
        await parts.leases.lease({"lease": "00", "hold_s": wait})


@pytest.mark.parametrize("lease", [None, 7, ["a"]])
async def test_a_malformed_lease_is_refused(parts: Parts, lease: Any) -> None:
    with pytest.raises(UsageError, match="name the lease"):
        await parts.leases.release({"lease": lease})
    with pytest.raises(UsageError, match="name the lease"):
        await parts.leases.lease({"lease": lease})
