"""Groups from the task's prompts: each once and in order, whatever fails on their way into the pool."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence

import pytest

from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.rollouts.job import MAX_PROMPT_BYTES, Group
from p2pcast.rollouts.rollout_fields import MAX_TOKENS
from p2pcast.tasks.child_processes import prompt_child
from p2pcast.tasks.child_processes.prompt_reader import PromptsFailedError, ReadPrompts, prompt_of
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task import FaultyPrompt, Prompt, Task
from trainer_node.ledger.prompts.prompting import PassedPrompts, PromptPosition
from trainer_node.ledger_server import prompt_feeder
from trainer_node.ledger_server.prompt_feeder import Feed, PromptFeeder, group_of

FEED = Feed(seed=7, group_size=4, temperature=1.0, waiting=40)
TASK = Sums()
FIRST = [group_of(TASK, FEED, n, prompt) for n, prompt in enumerate(itertools.islice(TASK.jobs(FEED.seed), 200))]


class Here:
    """Prompts of a task, read in this process; ``fails``: the numbers of the calls that raise."""

    def __init__(self, task: Task, seed: int, fails: Sequence[int] = ()) -> None:
        self._task, self._seed, self._fails = task, seed, fails
        self.asked: list[int] = []
        self._prompts = prompt_child.SeededPrompts(task, seed, held_out=False)

    async def read(self, first: int, count: int) -> ReadPrompts:
        self.asked.append(first)
        if len(self.asked) in self._fails:
            self._prompts = prompt_child.SeededPrompts(self._task, self._seed, held_out=False)
            raise PromptsFailedError("jobs(7) raised")
        what, rows = list(self._prompts.answers(first, count))[-1]
        return ReadPrompts([prompt_of(row) for row in rows], what == "ended")

    async def close(self) -> None:
        return None


class Pool:
    """Groups in memory; ``fails``: the numbers of the calls of ``add`` that raise, before or after their effect."""

    def __init__(self, before: Sequence[int] = (), after: Sequence[int] = ()) -> None:
        self.groups: list[Group] = []
        self.opened = self.cursor = self._calls = 0
        self.ended = False
        self._before, self._after = before, after

    async def look(self) -> PromptPosition:
        return PromptPosition(self.cursor, len(self.groups) - self.opened)

    async def add(self, passed: PassedPrompts) -> None:
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
    feeder = PromptFeeder(TASK, FEED, Here(TASK, FEED.seed), pool.look, pool.add)
    for opened in (0, 13, 20, 64):
        pool.opened = opened
        await filled(feeder)
    assert pool.groups == FIRST[: 64 + FEED.waiting]


@pytest.mark.parametrize("fails", [(1,), (2, 3), (1, 2, 4)])
async def test_each_prompt_comes_once_and_in_order_although_reading_fails(fails: Sequence[int]) -> None:
    pool, prompts = Pool(), Here(TASK, FEED.seed, fails)
    feeder = PromptFeeder(TASK, FEED, prompts, pool.look, pool.add)
    for opened in (0, 13, 20, 64):
        pool.opened = opened
        await filled(feeder)
    assert pool.groups == FIRST[: 64 + FEED.waiting]
    assert prompts.asked == sorted(prompts.asked)


async def test_a_new_feeder_goes_on_at_the_cursor() -> None:
    pool = Pool()
    await PromptFeeder(TASK, FEED, Here(TASK, FEED.seed), pool.look, pool.add).fill()
    pool.opened = 5
    await PromptFeeder(TASK, FEED, Here(TASK, FEED.seed), pool.look, pool.add).fill()
    assert pool.groups == FIRST[: 5 + FEED.waiting]


async def test_groups_of_a_trainer_fill_the_pool_and_leave_no_prompt_out() -> None:
    pool = Pool()
    pool.groups = FIRST[100:115]
    await PromptFeeder(TASK, FEED, Here(TASK, FEED.seed), pool.look, pool.add).fill()
    assert pool.groups == [*FIRST[100:115], *FIRST[: FEED.waiting - 15]]


class Finite(Sums):
    def jobs(self, seed: int) -> Iterator[Prompt]:
        return itertools.islice(super().jobs(seed), 33)


async def test_a_task_without_further_prompts_ends_the_feeding_alone(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    feeder = PromptFeeder(Finite(), FEED, Here(Finite(), FEED.seed), pool.look, pool.add)
    for _ in range(2):
        await feeder.fill()
    assert feeder.ended
    assert pool.ended
    assert len(pool.groups) == 33
    assert [record.message for record in caplog.records] == [
        "task sums has no prompts after 33: only trainers add groups now"
    ]


GOOD = Prompt(b"1+2", 4)
FAULTY: dict[str, tuple[object, str]] = {
    "no tokens": (Prompt(b"x", 0), "max_tokens is 0, not an int from 1 to 1048576"),
    "too many tokens": (Prompt(b"x", MAX_TOKENS + 1), "max_tokens is 1048577"),
    "true": (Prompt(b"x", True), "max_tokens is True"),
    "a float": (Prompt(b"x", 4.0), "max_tokens is 4.0"),  # type: ignore[arg-type]
    "text": (Prompt("x", 4), "its prompt is of type str, not bytes"),  # type: ignore[arg-type]
    "long": (Prompt(bytes(MAX_PROMPT_BYTES + 1), 4), "its prompt has 4194305 bytes, and 4194304 are allowed"),
    "a dictionary": ({"prompt": b"x"}, "not a Prompt, but of type dict: {'prompt': b'x'}"),
    "nothing": (None, "not a Prompt, but of type NoneType: None"),
}


class Rows(Sums):
    """Gives the rows of a list."""

    def __init__(self, rows: Sequence[object]) -> None:
        super().__init__()
        self._rows = rows

    def jobs(self, seed: int) -> Iterator[Prompt]:
        return iter(self._rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", FAULTY)
async def test_a_prompt_of_which_no_group_can_be_made_is_left_out_by_name(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    found, why = FAULTY[kind]
    task, pool = Rows([GOOD, found, GOOD]), Pool()
    told: list[FaultyPrompt] = []
    feeder = PromptFeeder(task, FEED, Here(task, FEED.seed), pool.look, pool.add, left_out=told.extend)
    await feeder.fill()
    assert pool.groups == [group_of(task, FEED, 0, GOOD), group_of(task, FEED, 2, GOOD)]
    assert (pool.cursor, pool.ended, feeder.rejected) == (3, True, 1)
    assert [one.name for one in told] == ["prompt 1"]
    assert why in told[0].why
    assert f"prompt 1: {told[0].why}" in caplog.text


async def test_the_largest_prompt_has_a_group() -> None:
    task, pool = Rows([Prompt(bytes(MAX_PROMPT_BYTES), MAX_TOKENS)]), Pool()
    await PromptFeeder(task, FEED, Here(task, FEED.seed), pool.look, pool.add).fill()
    assert [len(Group.from_bytes(group.to_bytes()).prompt) for group in pool.groups] == [MAX_PROMPT_BYTES]


async def test_a_row_of_the_data_is_named() -> None:
    pool, told = Pool(), list[FaultyPrompt]()
    rows = [Prompt(b"", 0, "problems.jsonl, row 12"), Prompt(b"", 0, "a\x1b[2Jb" + 500 * "c")]
    await PromptFeeder(Rows(rows), FEED, Here(Rows(rows), FEED.seed), pool.look, pool.add, left_out=told.extend).fill()
    assert told[0].name == "prompt 0 (problems.jsonl, row 12)"
    assert told[1].name.startswith("prompt 1 (a\N{REPLACEMENT CHARACTER}[2Jbccc")
    assert len(told[1].name) < 250


@pytest.mark.parametrize(("before", "after"), [((), ()), ((1, 2), ()), ((), (1, 2)), ((1,), (3,))])
async def test_faulty_prompts_are_told_of_once_behind_the_cursor(before: Sequence[int], after: Sequence[int]) -> None:
    faulty = Prompt(b"", 0)
    rows = [faulty, faulty, GOOD, faulty, GOOD, GOOD, *(8 * [faulty])]
    task, pool, told = Rows(rows), Pool(before, after), list[FaultyPrompt]()
    feeder = PromptFeeder(task, FEED, Here(task, FEED.seed), pool.look, pool.add, left_out=told.extend)
    await filled(feeder)
    assert pool.groups == [group_of(task, FEED, number, GOOD) for number in (2, 4, 5)]
    assert [one.name for one in told] == [f"prompt {number}" for number in (0, 1, 3, *range(6, 14))]
    assert feeder.rejected == 11
    assert [one.name for one in feeder.newest_rejected] == [f"prompt {number}" for number in range(6, 14)]


async def test_a_task_of_faulty_prompts_alone_is_a_failure_that_names_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_feeder, "MAX_SKIPPED", 64)
    task, pool = Rows(1000 * [Prompt(b"", 0)]), Pool()
    feeder = PromptFeeder(task, FEED, Here(task, FEED.seed), pool.look, pool.add)
    for last in (63, 127):
        why = rf"newest 64 prompts gave no group \(64 faulty, the last one prompt {last}: its max_tokens is 0"
        with pytest.raises(LocalError, match=why):
            await feeder.fill()


@pytest.mark.parametrize(
    ("feed", "field"),
    [(Feed(7, 4096, 1.0, 8), "size"), (Feed(7, 4, -1.0, 8), "temperature"), (Feed(7, 0, 1.0, 8), "size")],
)
def test_a_feed_with_which_no_group_can_be_made_is_refused_at_the_start(feed: Feed, field: str) -> None:
    pool = Pool()
    with pytest.raises(UsageError, match=f"group: '{field}' is malformed or out of range"):
        PromptFeeder(TASK, feed, Here(TASK, feed.seed), pool.look, pool.add)


def test_a_task_with_which_no_group_can_be_made_is_refused_at_the_start() -> None:
    class Wrong(Sums):
        stop_token_ids = (1.5,)  # type: ignore[assignment]

    pool = Pool()
    with pytest.raises(UsageError, match="group: 'stop_token_ids' is malformed"):
        PromptFeeder(Wrong(), FEED, Here(Wrong(), FEED.seed), pool.look, pool.add)
