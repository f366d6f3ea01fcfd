"""Requests for leases that wait for jobs: the order and the number of their attempts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.until import until
from trainer_node.ledger.leasing import Grant
from trainer_node.ledger_server import lease_queue
from trainer_node.ledger_server.lease_queue import MOST_EMPTY, LeaseQueue

LONG_S = 600.0


@pytest.fixture
async def queue(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LeaseQueue]:
    monkeypatch.setattr(lease_queue, "ROUND_S", 1e-3)
    monkeypatch.setattr(lease_queue, "CHECK_S", 1e-3)
    found = LeaseQueue()
    running = asyncio.create_task(found.run())
    yield found
    running.cancel()
    await asyncio.wait([running])


class Jobs:
    """``tried``: requests, in the order of their attempts. ``knows``: an attempt without a job says that there are
    none for the others. ``refused``: requests that get no job, whatever is left.
    """

    def __init__(self, queue: LeaseQueue) -> None:
        self.queue, self.left, self.tried = queue, 0, list[str]()
        self.gone: set[str] = set()
        self.knows, self.refused = False, set[str]()

    def ask(self, name: str, kind: str = "any", wait_s: float = LONG_S) -> asyncio.Task[list[Any]]:
        async def attempt() -> Grant:
            self.tried.append(name)
            if name in self.refused:
                return Grant([])
            if not self.left:
                return Grant([], exhausted=self.knows)
            self.left -= 1
            return Grant([name])  # type: ignore[list-item]

        async def work() -> list[Any]:
            return await self.queue.ask(attempt, kind, wait_s, lambda: name in self.gone)

        return asyncio.create_task(work())

    async def waiting(self, count: int) -> None:
        await until(lambda: len(self.queue) == count)
        self.tried.clear()

    def add(self, count: int) -> None:
        self.left += count
        self.queue.changed()


@pytest.fixture
def jobs(queue: LeaseQueue) -> Jobs:
    return Jobs(queue)


async def test_a_request_that_finds_jobs_does_not_wait(jobs: Jobs) -> None:
    jobs.left = 1
    assert await jobs.ask("a") == ["a"]
    assert jobs.tried == ["a"]


async def test_a_request_without_patience_is_tried_once(jobs: Jobs) -> None:
    assert await jobs.ask("a", wait_s=0.0) == []
    assert await jobs.ask("b", wait_s=1e-3) == []
    assert jobs.tried == ["a", "b"]
    assert len(jobs.queue) == 0


async def test_the_oldest_requests_get_the_first_jobs(jobs: Jobs) -> None:
    asked = {name: jobs.ask(name) for name in "abc"}
    await jobs.waiting(3)
    jobs.add(2)
    assert await asked["a"] == ["a"]
    assert await asked["b"] == ["b"]
    assert not asked["c"].done()
    jobs.add(1)
    assert await asked["c"] == ["c"]


async def test_a_round_tries_few_requests_that_find_nothing_and_the_next_one_tries_the_others(jobs: Jobs) -> None:
    asked = [jobs.ask(f"idle {n}", "empty") for n in range(4 * MOST_EMPTY)] + [jobs.ask("other", "other")]
    await jobs.waiting(len(asked))
    rounds = []
    for _ in range(2):
        jobs.tried.clear()
        jobs.queue.changed()
        await until(lambda: "other" in jobs.tried)
        rounds.append(set(jobs.tried) - {"other"})
    assert all(MOST_EMPTY <= len(tried) < 2 * MOST_EMPTY for tried in rounds)
    assert rounds[0].isdisjoint(rounds[1])
    for one in asked:
        one.cancel()
    await asyncio.wait(asked)


async def test_a_round_ends_for_a_kind_when_one_request_learns_that_there_are_no_jobs(jobs: Jobs) -> None:
    asked = [jobs.ask(f"idle {n}", "empty") for n in range(40)] + [jobs.ask("other", "other")]
    await jobs.waiting(len(asked))
    jobs.knows = True
    for _ in range(3):
        jobs.tried.clear()
        jobs.queue.changed()
        await until(lambda: "other" in jobs.tried)
        assert jobs.tried == ["idle 0", "other"], "the oldest one stays the first"
    jobs.add(20)
    assert [await one for one in asked[:20]] == [[f"idle {n}"] for n in range(20)]
    assert not any(one.done() for one in asked[20:])
    jobs.add(100)
    await asyncio.gather(*asked)


async def test_a_request_that_alone_finds_nothing_does_not_end_the_round(jobs: Jobs) -> None:
    jobs.refused, jobs.knows = {"refused"}, True
    asked = [jobs.ask(name) for name in ("refused", "a", "b")]
    await jobs.waiting(3)
    jobs.add(2)
    assert [await one for one in asked[1:]] == [["a"], ["b"]]
    asked[0].cancel()
    await asyncio.wait(asked)


async def test_a_request_whose_caller_has_gone_ends_and_takes_no_job(jobs: Jobs) -> None:
    gone, staying = jobs.ask("gone"), jobs.ask("staying")
    await jobs.waiting(2)
    jobs.gone.add("gone")
    assert await gone == []
    jobs.add(1)
    assert await staying == ["staying"]
    assert jobs.tried == ["staying"]


async def test_a_cancelled_request_delays_no_other(jobs: Jobs) -> None:
    ended, staying = jobs.ask("ended"), jobs.ask("staying")
    await jobs.waiting(2)
    jobs.queue.changed()
    ended.cancel()
    jobs.add(1)
    assert await staying == ["staying"]
    assert len(jobs.queue) == 0
