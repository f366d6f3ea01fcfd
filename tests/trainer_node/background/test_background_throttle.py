"""Work beside live traffic: it never waits without any, waits with it, and goes on all the same."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer_node.background import background_throttle as module
from trainer_node.background.background_throttle import BackgroundThrottle


async def taken(turns: BackgroundThrottle, thread: ThreadPoolExecutor, **options: bool) -> None:
    await asyncio.get_running_loop().run_in_executor(thread, lambda: turns.take(**options))


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every wait longer than any test."""
    monkeypatch.setattr(module, "LEAST_WAIT_S", 3600.0)
    monkeypatch.setattr(module, "MOST_WAIT_S", 3600.0)


@pytest.mark.usefixtures("long_waits")
async def test_without_live_traffic_nothing_waits(thread: ThreadPoolExecutor) -> None:
    turns = BackgroundThrottle(lambda: False)
    async with turns.watched():
        for _ in range(3):
            await taken(turns, thread)


@pytest.mark.usefixtures("long_waits")
async def test_work_waits_for_the_end_of_live_traffic(thread: ThreadPoolExecutor) -> None:
    live, looks, looked = True, 0, asyncio.Event()

    def sending() -> bool:
        nonlocal looks
        looks += 1
        if looks == 6:
            looked.set()
        return live

    turns = BackgroundThrottle(sending)
    async with turns.watched():
        await taken(turns, thread)  # no debt before the first part
        waits = asyncio.create_task(taken(turns, thread))
        await looked.wait()
        assert not waits.done()
        live = False
        await waits


@pytest.mark.usefixtures("long_waits")
async def test_pressed_work_does_not_wait(thread: ThreadPoolExecutor) -> None:
    turns = BackgroundThrottle(lambda: True)
    async with turns.watched():
        for _ in range(3):
            await taken(turns, thread, pressed=True)


async def test_background_work_progresses_under_constant_live_traffic(
    thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_WAIT_S", 0.001)
    turns = BackgroundThrottle(lambda: True)
    async with turns.watched():
        for _ in range(10):
            await taken(turns, thread)


@pytest.mark.usefixtures("long_waits")
async def test_closed_throttle_lets_work_pass(thread: ThreadPoolExecutor) -> None:
    turns = BackgroundThrottle(lambda: True)
    async with turns.watched():
        await taken(turns, thread)
        waits = asyncio.create_task(taken(turns, thread))
        turns.close()
        await waits
        await taken(turns, thread)
