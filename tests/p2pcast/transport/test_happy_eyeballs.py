"""The winner of a race, the overtaken attempts, and cancellation."""

from __future__ import annotations

import asyncio

import pytest

from p2pcast.ground.errors import P2PCastError, RetryableError
from p2pcast.transport.happy_eyeballs import race

SOON_S = 0.001
NEVER_S = 3600.0


class Attempts:
    """Each waits for its own event, or fails, or goes on for ever."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.undone: list[str] = []

    def slow(self, name: str):
        async def attempt() -> str:
            self.begun.append(name)
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.append(name)
            return name

        return attempt

    def good(self, name: str):
        async def attempt() -> str:
            self.begun.append(name)
            return name

        return attempt

    def bad(self, name: str, error: Exception | None = None):
        async def attempt() -> str:
            self.begun.append(name)
            raise error or RetryableError(name)

        return attempt

    async def race(self, *attempts, head_start_s=NEVER_S):
        async with asyncio.timeout(600):
            return await race(attempts, head_start_s, self.undone.append)


async def test_the_first_success_wins_and_ends_the_attempts() -> None:
    on = Attempts()
    assert await on.race(on.good("a"), on.good("b")) == ("a", [])
    assert on.begun == ["a"]


async def test_a_failed_attempt_starts_the_next_at_once() -> None:
    on = Attempts()
    won, errors = await on.race(on.bad("a"), on.bad("b"), on.good("c"))
    assert (won, [str(e) for e in errors]) == ("c", ["a", "b"])


async def test_all_fail() -> None:
    on = Attempts()
    won, errors = await on.race(on.bad("a"), on.bad("b"))
    assert (won, [str(e) for e in errors]) == (None, ["a", "b"])
    assert await on.race() == (None, [])


async def test_an_unresponsive_attempt_is_overtaken_and_cancelled() -> None:
    on = Attempts()
    assert await on.race(on.slow("a"), on.good("b"), head_start_s=SOON_S) == ("b", [])
    assert on.ended == ["a"]
    assert on.undone == []


async def test_a_success_during_cancellation_is_undone() -> None:
    on = Attempts()

    async def late() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "late"
        raise AssertionError

    assert await on.race(late, on.good("b"), head_start_s=SOON_S) == ("b", [])
    assert on.undone == ["late"]


async def test_cancelling_the_race_undoes_all_attempts() -> None:
    on = Attempts()
    both = asyncio.Event()

    async def second() -> str:
        both.set()
        return await on.slow("b")()

    task = asyncio.create_task(on.race(on.slow("a"), second, head_start_s=SOON_S))
    await both.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(on.ended) == ["a", "b"]


async def test_an_unexpected_exception_is_raised() -> None:
    on = Attempts()
    with pytest.raises(ZeroDivisionError):
        await on.race(on.slow("a"), on.bad("b", ZeroDivisionError()), head_start_s=SOON_S)
    assert on.ended == ["a"]
    assert not issubclass(ZeroDivisionError, P2PCastError)
