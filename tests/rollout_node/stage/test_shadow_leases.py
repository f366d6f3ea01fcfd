"""Leases hold the shadow still until they are released or their time is up, and a release says which came first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pcast.errors import RefusedError, RetryableError, UsageError
from p2pcast.version import Version
from rollout_node.stage.shadow_leases import MAX_LEASE_S, MAX_LEASES, ShadowLeases
from rollout_node.stage.shadow_state import ShadowState

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


async def test_a_lease_ends_by_its_time_and_a_release_says_so(parts: Parts) -> None:
    lease = await parts.leases.lease({"hold_s": 0.01})
    await parts.move(2)
    assert await parts.leases.release({"lease": lease["lease"]}) == {"held": False}


async def test_time_counts_from_the_moment_when_the_shadow_is_held(parts: Parts) -> None:
    go_on = asyncio.Event()

    async def slow() -> None:
        async with parts.state.moving(lambda _: True):
            await go_on.wait()
            parts.stage(2)

    moving = asyncio.create_task(slow())
    await idle()
    asking = asyncio.create_task(parts.leases.lease({"hold_s": 1000}))
    await asyncio.sleep(0.02)
    assert not asking.done()
    go_on.set()
    lease = await asking
    await moving
    assert lease["version"] == "0.2"
    assert lease["left_s"] > 999.99


async def test_a_caller_that_is_gone_leaves_no_lease(parts: Parts) -> None:
    async with parts.state.moving(lambda _: True):
        asking = asyncio.create_task(parts.leases.lease({"hold_s": 1000}))
        await idle()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await parts.move(2)
    await idle()
    assert parts.leases.rows == []


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


@pytest.mark.parametrize("hold", [0, -1, MAX_LEASE_S + 1, float("nan"), float("inf"), True, "60", None, [1]])
async def test_a_malformed_time_is_refused(parts: Parts, hold: Any) -> None:
    with pytest.raises(UsageError, match="hold_s"):
        await parts.leases.lease({"hold_s": hold})


@pytest.mark.parametrize("lease", [None, 7, ["a"]])
async def test_a_malformed_release_is_refused(parts: Parts, lease: Any) -> None:
    with pytest.raises(UsageError, match="name the lease"):
        await parts.leases.release({"lease": lease})
