"""Hooks of a user choose among prompts; whatever they do, no prompt is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from p2pcast.errors import LocalError, UsageError
from p2pcast.rollouts.job import Group
from p2pcast.tasks.prompt_hooks import PromptHooks, load_hooks
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task import Prompt
from tests.trainer_node.ledger.ledger_game import Game
from trainer_node.ledger.database.ledger_store import Store
from trainer_node.ledger.ledger import Registration
from trainer_node.ledger.prompting import Passed
from trainer_node.ledger_server import prompt_feeder
from trainer_node.ledger_server.prompt_choice import HookedChoice, HooksFailedError, HookSource
from trainer_node.ledger_server.prompt_feeder import Feed, PromptFeeder, group_of

TASK = Sums()
FEED = Feed(seed=7, group_size=4, temperature=1.0, waiting=40)
PROMPTS = list(itertools.islice(TASK.jobs(FEED.seed), 2000))


class Stage:
    """A ledger with a feeder. ``fails``: calls of ``add`` that raise after their commit."""

    def __init__(self, folder: Path) -> None:
        self.game = Game(lambda: Store(folder))
        self.game.policy = dataclasses.replace(self.game.policy, task_hash=TASK.hash)
        self.fails = 0
        self.groups: list[Group] = []
        self.restart()

    def restart(self) -> None:
        self.game.ledger.close()
        self.game.start()

    def feeder(self, made: type[PromptHooks], waiting: int = 40, limit_s: float = 60.0) -> PromptFeeder:
        ledger = self.game.ledger

        async def look() -> Any:
            return ledger.prompts(FEED.seed)

        async def add(passed: Passed) -> None:
            ledger.add_prompts(FEED.seed, passed)
            if self.fails:
                self.fails -= 1
                raise LocalError("no answer")
            self.groups += passed.groups

        async def state() -> dict[str, str]:
            return ledger.hook_state(FEED.seed, "hooks:" + made.__name__)

        async def histories(prompts: Sequence[bytes]) -> list[list[float]]:
            return ledger.histories(prompts)

        source = HookSource(name="hooks:" + made.__name__, made=made, state=state, histories=histories, limit_s=limit_s)
        return PromptFeeder(TASK, Feed(FEED.seed, 4, 1.0, waiting), look, add, source)

    @property
    def cursor(self) -> int:
        return self.game.ledger.prompts(FEED.seed).cursor


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.game.ledger.close()


class Odd(PromptHooks):
    """Keeps every second group, and counts."""

    def filter(self, group: Group) -> bool:
        self.state["seen"] = self.state.get("seen", 0) + 1
        return self.state["seen"] % 2 == 1


async def test_a_filter_leaves_prompts_out(stage: Stage) -> None:
    await stage.feeder(Odd).fill()
    assert [group.prompt for group in stage.groups] == [one.prompt for one in PROMPTS[:80:2]][:40]
    assert stage.cursor in (79, 80)


async def test_state_and_cursor_go_on_together_over_restarts(stage: Stage) -> None:
    for waiting in (7, 20, 33, 40):
        await stage.feeder(Odd, waiting).fill()
        stage.restart()
        assert stage.game.ledger.hook_state(FEED.seed, "hooks:Odd") == {"seen": str(stage.cursor)}
    assert [group.prompt for group in stage.groups] == [one.prompt for one in PROMPTS[:80:2]][:40]


async def test_a_lost_answer_counts_no_call_twice(stage: Stage) -> None:
    stage.fails = 1
    feeder = stage.feeder(Odd)
    with pytest.raises(LocalError):
        await feeder.fill()
    await feeder.fill()
    assert stage.game.ledger.hook_state(FEED.seed, "hooks:Odd") == {"seen": str(stage.cursor)}
    assert stage.game.ledger.prompts(FEED.seed).waiting == 40


class Twice(PromptHooks):
    def weight(self, prompt: Prompt, history: Sequence[float]) -> float:
        return 2


class Quarter(PromptHooks):
    def weight(self, prompt: Prompt, history: Sequence[float]) -> float:
        return 0.25


async def test_weights_repeat_a_prompt_with_other_seeds(stage: Stage) -> None:
    await stage.feeder(Twice).fill()
    assert [group.prompt for group in stage.groups] == [one.prompt for one in PROMPTS[:20] for _ in range(2)]
    assert len({group.id for group in stage.groups}) == len({group.seed for group in stage.groups}) == 40


async def test_a_weight_below_one_is_a_probability(stage: Stage) -> None:
    await stage.feeder(Quarter, waiting=200).fill()
    assert 600 < stage.cursor < 1000
    assert len({group.prompt for group in stage.groups}) >= 190


class Learnt(PromptHooks):
    """Leaves out a prompt whose last group had the best reward; remembers each history."""

    def weight(self, prompt: Prompt, history: Sequence[float]) -> float:
        self.state[prompt.prompt.hex()] = list(history)
        return 0.0 if history and history[-1] == 1.0 else 1.0


async def test_weights_know_the_rewards_of_earlier_groups(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sums, "jobs", lambda self, seed: itertools.cycle(PROMPTS[:4]))
    feeder = stage.feeder(Learnt, waiting=4)
    await feeder.fill()
    game = stage.game
    session = game.ledger.register("a", Registration("a", 64, "sums", TASK.hash))[1]
    best = PROMPTS[0].prompt
    leases = game.lease(session, 16)
    for one in leases:
        game.hand_in(session, [one], reward=1 if one.job.prompt == best else None)
    assert game.take().batch is not None
    stage.groups.clear()
    for _ in range(2):
        game.ledger.prune()
        await stage.feeder(Learnt, waiting=3).fill()
    assert [group.prompt for group in stage.groups] == [one.prompt for one in PROMPTS[1:4]]
    assert game.ledger.histories([one.prompt for one in PROMPTS[:4]]) == [[1.0], [0.5], [0.5], [0.5]]
    assert game.ledger.hook_state(FEED.seed, "hooks:Learnt")[best.hex()] == "[1.0]"


class Raises(PromptHooks):
    def filter(self, group: Group) -> bool:
        self.state["seen"] = self.state.get("seen", 0) + 1
        if self.state["seen"] > 40:
            raise ValueError("a wrong turn")
        return True


class RaisesAtOnce(PromptHooks):
    def __init__(self, state: Any) -> None:
        raise SystemExit(3)


class NotANumber(PromptHooks):
    def weight(self, prompt: Prompt, history: Sequence[float]) -> float:
        return float("nan")


class TooMuch(PromptHooks):
    def weight(self, prompt: Prompt, history: Sequence[float]) -> float:
        return 17


class KeepsAll(PromptHooks):
    def filter(self, group: Group) -> bool:
        self.state["all"] = "x" * (1 << 20)
        return True


class KeepsObjects(PromptHooks):
    def filter(self, group: Group) -> bool:
        self.state["group"] = group
        return True


class KeepsNumbers(PromptHooks):
    def filter(self, group: Group) -> bool:
        self.state[7] = 1  # type: ignore[index]
        return True


@pytest.mark.parametrize(
    ("hooks", "why"),
    [
        (RaisesAtOnce, "SystemExit"),
        (NotANumber, "weight of prompt 0 is nan"),
        (TooMuch, "weight of prompt 0 is 17"),
        (KeepsAll, "more than 1024 values"),
        (KeepsObjects, "TypeError"),
        (KeepsNumbers, "name has 1 to 128"),
    ],
)
async def test_hooks_that_fail_end_the_feeding(stage: Stage, hooks: type[PromptHooks], why: str) -> None:
    feeder = stage.feeder(hooks)
    for _ in range(2):
        with pytest.raises(HooksFailedError, match=f"hooks:{hooks.__name__}: .*{why}.*continues at prompt 0"):
            await feeder.fill()
    assert stage.game.ledger.prompts(FEED.seed) == (0, 0)
    assert stage.game.ledger.hook_state(FEED.seed, "hooks:" + hooks.__name__) == {}


async def test_hooks_that_raise_lose_no_prompt(stage: Stage) -> None:
    feeder = stage.feeder(Raises, waiting=60)
    for _ in range(2):
        with pytest.raises(HooksFailedError, match=r"ValueError: a wrong turn.*continues at prompt 34"):
            await feeder.fill()
    stage.restart()
    assert stage.game.ledger.hook_state(FEED.seed, "hooks:Raises") == {"seen": "34"}
    await stage.feeder(Odd, waiting=60).fill()
    assert [group.prompt for group in stage.groups[:35]] == [one.prompt for one in PROMPTS[:35]]


async def test_a_failure_shows_also_while_enough_groups_wait(stage: Stage) -> None:
    feeder = stage.feeder(Raises, waiting=60)
    with pytest.raises(HooksFailedError):
        await feeder.fill()
    other = Feed(8, 4, 1.0, 60)
    groups = [group_of(TASK, other, number, PROMPTS[number]) for number in range(30)]
    stage.game.ledger.add_prompts(8, Passed(0, 30, groups))
    assert stage.game.ledger.prompts(FEED.seed).waiting > 60
    with pytest.raises(HooksFailedError):
        await feeder.fill()


async def test_hooks_that_hang_end_the_feeding(stage: Stage) -> None:
    release = threading.Event()

    class Hangs(PromptHooks):
        def filter(self, group: Group) -> bool:
            release.wait()
            return True

    feeder = stage.feeder(Hangs, limit_s=0.05)
    with pytest.raises(HooksFailedError, match=r"no answer within 0\.05 s"):
        await feeder.fill()
    release.set()
    for thread in threading.enumerate():
        if thread.name == "p2pcast-hooks":
            await asyncio.to_thread(thread.join)
    assert stage.game.ledger.prompts(FEED.seed) == (0, 0)


class Nothing(PromptHooks):
    def filter(self, group: Group) -> bool:
        return False


async def test_hooks_that_leave_everything_out_are_told_of(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_feeder, "MAX_SKIPPED", 64)
    feeder = stage.feeder(Nothing)
    for round_ in (1, 2):
        with pytest.raises(LocalError, match="newest 64 prompts"):
            await feeder.fill()
        assert stage.cursor == 64 * round_


def test_the_counts_of_draws_depend_on_the_seed_alone() -> None:
    def copies(seed: int) -> list[int]:
        choice = HookedChoice(None, seed)  # type: ignore[arg-type]
        return [choice._copies(number, 1.5) for number in range(1000)]

    assert copies(1) == copies(1) != copies(2)
    assert Counter(copies(1)).keys() == {1, 2}
    assert 400 < Counter(copies(1))[2] < 600


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("hooks", "write PKG.MODULE:CLASS"),
        (":Odd", "write PKG.MODULE:CLASS"),
        ("no_such_module:Odd", "cannot import"),
        ("p2pcast.tasks.sums:nothing", "no class"),
        ("p2pcast.tasks.sums:Sums", "does not derive"),
    ],
)
def test_names_that_are_no_hooks(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        load_hooks(name)


def test_hooks_of_a_file_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_hooks_file.py").write_text(
        "from p2pcast.tasks.prompt_hooks import PromptHooks\nclass Mine(PromptHooks): pass\n"
    )
    assert load_hooks("my_hooks_file:Mine", tmp_path)({}).filter(None) is True  # type: ignore[arg-type]
