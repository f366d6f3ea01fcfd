"""Hooks of a user choose among prompts; whatever they do, no prompt is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.ledger_api.worker_api import Registration
from p2pcast.rollouts.job import Group
from p2pcast.tasks.prompt_hooks import load_hooks
from p2pcast.tasks.sums import Sums
from p2pcast.tasks.task import Prompt
from tests.support.process_ends import wait_for_end, written_pid
from tests.trainer_node.ledger.ledger_game import Game
from tests.trainer_node.ledger_server.test_prompt_feeder import Here
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.prompts.prompting import PassedPrompts
from trainer_node.ledger_server import prompt_feeder
from trainer_node.ledger_server.prompt_choice import HookedChoice, HooksFailedError, HookSource
from trainer_node.ledger_server.prompt_feeder import Feed, PromptFeeder, group_of

TASK = Sums()
FEED = Feed(seed=7, group_size=4, temperature=1.0, waiting=40)
FOLDER = Path(__file__).parent
NAME = "choosy_hooks:"
PROMPTS = list(itertools.islice(TASK.jobs(FEED.seed), 2000))


class Stage:
    """A ledger with a feeder. ``fails``: calls of ``add`` that raise after their commit."""

    def __init__(self, folder: Path) -> None:
        self.game = Game(lambda: LedgerStore(folder))
        self.game.policy = dataclasses.replace(self.game.policy, task_hash=TASK.hash)
        self.fails = 0
        self.groups: list[Group] = []
        self.feeders: list[PromptFeeder] = []
        self.restart()

    def restart(self) -> None:
        self.game.ledger.close()
        self.game.start()

    def feeder(self, hooks: str, waiting: int = 40, limit_s: float = 60.0) -> PromptFeeder:
        ledger = self.game.ledger

        async def look() -> Any:
            return ledger.prompts(FEED.seed)

        async def add(passed: PassedPrompts) -> None:
            ledger.add_prompts(FEED.seed, passed)
            if self.fails:
                self.fails -= 1
                raise LocalError("no answer")
            self.groups += passed.groups

        async def state() -> dict[str, str]:
            return ledger.hook_state(FEED.seed, NAME + hooks)

        async def histories(prompts: Sequence[bytes]) -> list[list[float]]:
            return ledger.histories(prompts)

        source = HookSource(name=NAME + hooks, state=state, histories=histories, limit_s=limit_s)
        self.feeders.append(
            PromptFeeder(TASK, Feed(FEED.seed, 4, 1.0, waiting), Here(TASK, FEED.seed), look, add, source)
        )
        return self.feeders[-1]

    @property
    def cursor(self) -> int:
        return self.game.ledger.prompts(FEED.seed).cursor


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]))
    made = Stage(tmp_path)
    yield made
    for feeder in made.feeders:
        await feeder.close()
    made.game.ledger.close()


async def test_a_filter_leaves_prompts_out(stage: Stage) -> None:
    await stage.feeder("Odd").fill()
    assert [group.prompt for group in stage.groups] == [one.prompt for one in PROMPTS[:80:2]][:40]
    assert stage.cursor in (79, 80)


async def test_hooks_see_no_faulty_prompt(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = Prompt(b"", 0)
    rows = [faulty, *PROMPTS[:3], faulty, faulty, *PROMPTS[3:20]]
    monkeypatch.setattr(Sums, "jobs", lambda self, seed: iter(rows))
    feeder = stage.feeder("Odd")
    await feeder.fill()
    assert [group.prompt for group in stage.groups] == [one.prompt for one in PROMPTS[:20:2]]
    assert stage.game.ledger.hook_state(FEED.seed, NAME + "Odd") == {"seen": "20"}
    assert (stage.cursor, feeder.rejected) == (23, 3)


async def test_state_and_cursor_go_on_together_over_restarts(stage: Stage) -> None:
    for waiting in (7, 20, 33, 40):
        await stage.feeder("Odd", waiting).fill()
        stage.restart()
        assert stage.game.ledger.hook_state(FEED.seed, NAME + "Odd") == {"seen": str(stage.cursor)}
    assert [group.prompt for group in stage.groups] == [one.prompt for one in PROMPTS[:80:2]][:40]


async def test_a_lost_answer_counts_no_call_twice(stage: Stage) -> None:
    stage.fails = 1
    feeder = stage.feeder("Odd")
    with pytest.raises(LocalError):
        await feeder.fill()
    await feeder.fill()
    assert stage.game.ledger.hook_state(FEED.seed, NAME + "Odd") == {"seen": str(stage.cursor)}
    assert stage.game.ledger.prompts(FEED.seed).waiting == 40


async def test_weights_repeat_a_prompt_with_other_seeds(stage: Stage) -> None:
    await stage.feeder("Twice").fill()
    assert [group.prompt for group in stage.groups] == [one.prompt for one in PROMPTS[:20] for _ in range(2)]
    assert len({group.id for group in stage.groups}) == len({group.seed for group in stage.groups}) == 40


async def test_a_weight_below_one_is_a_probability(stage: Stage) -> None:
    await stage.feeder("Quarter", waiting=200).fill()
    assert 600 < stage.cursor < 1000
    assert len({group.prompt for group in stage.groups}) >= 190


async def test_weights_know_the_rewards_of_earlier_groups(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sums, "jobs", lambda self, seed: itertools.cycle(PROMPTS[:4]))
    feeder = stage.feeder("Learnt", waiting=4)
    await feeder.fill()
    game = stage.game
    session = game.ledger.register("a", Registration("a", 64, "sums", TASK.hash)).session
    best = PROMPTS[0].prompt
    leases = game.lease(session, 16)
    for one in leases:
        game.hand_in(session, [one], reward=1 if one.job.prompt == best else None)
    assert game.take().batch is not None
    stage.groups.clear()
    for _ in range(2):
        game.ledger.prune()
        await stage.feeder("Learnt", waiting=3).fill()
    assert [group.prompt for group in stage.groups] == [one.prompt for one in PROMPTS[1:4]]
    assert game.ledger.histories([one.prompt for one in PROMPTS[:4]]) == [[1.0], [0.5], [0.5], [0.5]]
    assert game.ledger.hook_state(FEED.seed, NAME + "Learnt")[best.hex()] == "[1.0]"


@pytest.mark.parametrize(
    ("hooks", "why"),
    [
        ("RaisesAtOnce", "SystemExit"),
        ("NoSuchClass", "no class"),
        ("Dies", "process died"),
        ("TakesAllMemory", "MemoryError"),
        ("NotANumber", "weight of prompt 0 is nan"),
        ("TooMuch", "weight of prompt 0 is 17"),
        ("KeepsAll", "more than 1024 values"),
        ("KeepsObjects", "TypeError"),
        ("KeepsNumbers", "name has 1 to 128"),
    ],
)
async def test_hooks_that_fail_end_the_feeding(stage: Stage, hooks: str, why: str) -> None:
    feeder = stage.feeder(hooks)
    for _ in range(2):
        with pytest.raises(HooksFailedError, match=f"{NAME}{hooks}: .*{why}.*continues at prompt 0"):
            await feeder.fill()
    assert stage.game.ledger.prompts(FEED.seed) == (0, 0)
    assert stage.game.ledger.hook_state(FEED.seed, NAME + hooks) == {}


async def test_hooks_that_raise_lose_no_prompt(stage: Stage) -> None:
    feeder = stage.feeder("Raises", waiting=60)
    for _ in range(2):
        with pytest.raises(HooksFailedError, match=r"ValueError: a wrong turn.*continues at prompt 34"):
            await feeder.fill()
    stage.restart()
    assert stage.game.ledger.hook_state(FEED.seed, NAME + "Raises") == {"seen": "34"}
    await stage.feeder("Odd", waiting=60).fill()
    assert [group.prompt for group in stage.groups[:35]] == [one.prompt for one in PROMPTS[:35]]


async def test_a_failure_shows_also_while_enough_groups_wait(stage: Stage) -> None:
    feeder = stage.feeder("Raises", waiting=60)
    with pytest.raises(HooksFailedError):
        await feeder.fill()
    other = Feed(8, 4, 1.0, 60)
    groups = [group_of(TASK, other, number, PROMPTS[number]) for number in range(30)]
    stage.game.ledger.add_prompts(8, PassedPrompts(0, 30, groups))
    assert stage.game.ledger.prompts(FEED.seed).waiting > 60
    with pytest.raises(HooksFailedError):
        await feeder.fill()


async def test_hooks_that_hang_are_killed_with_their_children(stage: Stage, tmp_path: Path) -> None:
    limits_s = iter((1.0, 8.0, 64.0))
    while (child := written_pid(tmp_path / "hung")) is None:  # on a busy machine the hooks need more time to start it
        limit_s = next(limits_s)
        with pytest.raises(HooksFailedError, match=f"no answer within {limit_s:g} s"):
            await stage.feeder("Hangs", limit_s=limit_s).fill()
    assert all(one._choice is not None and one._choice._child is None for one in stage.feeders)
    await asyncio.to_thread(wait_for_end, child)
    assert stage.game.ledger.prompts(FEED.seed) == (0, 0)


async def test_the_end_of_a_feeder_ends_its_hooks(stage: Stage, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hung")
    feeder = stage.feeder("Hangs")
    filling = asyncio.ensure_future(feeder.fill())
    child = int(await asyncio.to_thread((tmp_path / "hung").read_text))
    filling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await filling
    await feeder.close()
    await asyncio.to_thread(wait_for_end, child)


async def test_hooks_see_no_token(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://ledger:secret@db/run")
    monkeypatch.setenv("P2PCAST_TASK_OTHER", "fact")
    await stage.feeder("ReadsTheEnvironment", waiting=1).fill()
    names = json.loads(stage.game.ledger.hook_state(FEED.seed, NAME + "ReadsTheEnvironment")["names"])
    assert "P2PCAST_TASK_OTHER" in names
    assert "DATABASE_URL" not in names


async def test_hooks_that_leave_everything_out_are_told_of(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_feeder, "MAX_SKIPPED", 64)
    feeder = stage.feeder("Nothing")
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
