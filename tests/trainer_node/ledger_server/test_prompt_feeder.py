"""Groups from the task's prompts: each once and in order, whatever fails on their way into the pool."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import pytest

from p2pcast.errors import LocalError
from p2pcast.rollouts.job import Group
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task import Prompt
from trainer_node.ledger.prompts.prompting import Passed, Position
from trainer_node.ledger_server.prompt_feeder import Feed, PromptFeeder, group_of

FEED = Feed(seed=7, group_size=4, temperature=1.0, waiting=40)
TASK = Sums()
FIRST = [group_of(TASK, FEED, n, prompt) for n, prompt in enumerate(itertools.islice(TASK.jobs(FEED.seed), 200))]


class Pool:
    """Groups in memory; ``fails``: the numbers of the calls of ``add`` that raise, before or after their effect."""

    def __init__(self, before: Sequence[int] = (), after: Sequence[int] = ()) -> None:
        self.groups: list[Group] = []
        self.opened = self.cursor = self._calls = 0
        self.ended = False
        self._before, self._after = before, after

    async def look(self) -> Position:
        return Position(self.cursor, len(self.groups) - self.opened)

    async def add(self, passed: Passed) -> None:
        self._calls += 1
        if self._calls in self._before:
            raise LocalError("the database failed")
        if self.cursor != passed.end or passed.start == passed.end:
            assert self.cursor == passed.start
            self.groups += passed.groups
            self.cursor, self.ended = passed.end, passed.ended
        if self._calls in self._after:
            raise LocalError("the database does not answer")


async def filled(feeder: PromptFeeder) -> None:
    done = False
    while not done:
        with contextlib.suppress(LocalError):
            await feeder.fill()
            done = True


@pytest.mark.parametrize(("before", "after"), [((), ()), ((1, 2), ()), ((), (1, 2)), ((1,), (3,))])
async def test_each_prompt_comes_once_and_in_order(before: Sequence[int], after: Sequence[int]) -> None:
    pool = Pool(before, after)
    feeder = PromptFeeder(TASK, FEED, pool.look, pool.add)
    for opened in (0, 13, 20, 64):
        pool.opened = opened
        await filled(feeder)
    assert pool.groups == FIRST[: 64 + FEED.waiting]


async def test_a_new_feeder_goes_on_at_the_cursor() -> None:
    pool = Pool()
    await PromptFeeder(TASK, FEED, pool.look, pool.add).fill()
    pool.opened = 5
    await PromptFeeder(TASK, FEED, pool.look, pool.add).fill()
    assert pool.groups == FIRST[: 5 + FEED.waiting]


async def test_groups_of_a_trainer_fill_the_pool_and_leave_no_prompt_out() -> None:
    pool = Pool()
    pool.groups = FIRST[100:115]
    await PromptFeeder(TASK, FEED, pool.look, pool.add).fill()
    assert pool.groups == [*FIRST[100:115], *FIRST[: FEED.waiting - 15]]


class Finite(Sums):
    def jobs(self, seed: int) -> Iterator[Prompt]:
        return itertools.islice(super().jobs(seed), 33)


async def test_a_task_without_further_prompts_ends_the_feeding_alone(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    feeder = PromptFeeder(Finite(), FEED, pool.look, pool.add)
    for _ in range(2):
        await feeder.fill()
    assert feeder.ended
    assert pool.ended
    assert len(pool.groups) == 33
    assert [record.message for record in caplog.records] == [
        "task sums has no prompts after 33: only trainers add groups now"
    ]
