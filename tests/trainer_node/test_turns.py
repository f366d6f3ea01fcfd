"""Work beside live traffic: it never waits without any, waits with it, and goes on all the same."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer_node import turns as module
from trainer_node.turns import Turns


async def taken(turns: Turns, thread: ThreadPoolExecutor, **options: bool) -> None:
    await asyncio.get_running_loop().run_in_executor(thread, lambda: turns.take(**options))


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits does so for longer than any test."""
    monkeypatch.setattr(module, "LEAST_WAIT_S", 3600.0)
    monkeypatch.setattr(module, "MOST_WAIT_S", 3600.0)


@pytest.mark.usefixtures("long_waits")
async def test_without_live_traffic_nothing_waits(thread: ThreadPoolExecutor) -> None:
    turns = Turns(lambda: False)
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

    turns = Turns(sending)
    async with turns.watched():
        await taken(turns, thread)  # the first part has cost nobody anything yet
        waits = asyncio.create_task(taken(turns, thread))
        await looked.wait()
        assert not waits.done()
        live = False
        await waits


@pytest.mark.usefixtures("long_waits")
async def test_who_is_pressed_does_not_wait(thread: ThreadPoolExecutor) -> None:
    turns = Turns(lambda: True)
    async with turns.watched():
        for _ in range(3):
            await taken(turns, thread, pressed=True)


async def test_it_goes_on_though_live_traffic_never_ends(thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_WAIT_S", 0.001)
    turns = Turns(lambda: True)
    async with turns.watched():
        for _ in range(10):
            await taken(turns, thread)


@pytest.mark.usefixtures("long_waits")
async def test_nobody_waits_for_one_that_was_closed(thread: ThreadPoolExecutor) -> None:
    turns = Turns(lambda: True)
    async with turns.watched():
        await taken(turns, thread)
        waits = asyncio.create_task(taken(turns, thread))
        turns.close()
        await waits
        await taken(turns, thread)
