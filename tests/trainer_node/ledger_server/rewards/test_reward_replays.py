"""Rewards that workers state, and replays of them in real processes of checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pcast.process.events import Events
from p2pcast.rollouts.result import Result
from p2pcast.tasks.child_processes.killable_child import ChildDownError
from p2pcast.tasks.task_process import TaskProcesses
from tests.trainer_node.ledger.audits.test_replaying import Trusting
from tests.trainer_node.ledger.crash_run import TASK_HASH
from tests.trainer_node.ledger.ledger_game import sample
from trainer_node.ledger.acceptance import Reason, Rejection
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger_server.rewards.reward_replays import RewardReplays, stated_reward


async def called(transition: Callable[..., Any], *words: Any) -> Any:
    return transition(*words)


@pytest.fixture
def result(tmp_path: Path) -> Result:
    game = Trusting(lambda: LedgerStore(tmp_path))
    session = game.join("a")
    game.add(1)
    found = dataclasses.replace(sample(game.lease(session, 1)[0], game.version, 1), reward=0.5)
    game.ledger.close()
    return found


def test_a_stated_reward_is_the_workers(result: Result) -> None:
    assert stated_reward(result) == 0.5


def test_a_check_that_failed_at_the_worker_gives_no_reward(result: Result) -> None:
    failed = dataclasses.replace(result, tags=(("turns", "1"), ("check", "the check took longer than 10 s")))
    found = stated_reward(failed)
    assert isinstance(found, Rejection)
    assert found.reason is Reason.UNSCORED


async def test_replays_stay_due_while_no_process_starts(tmp_path: Path) -> None:
    game = Trusting(lambda: LedgerStore(tmp_path))
    session = game.join("a")
    game.add(1)
    game.play(session, game.lease(session, 3))
    scorers = TaskProcesses("no_such_module:Task", TASK_HASH)
    replays = RewardReplays(game.ledger, scorers, called, lambda: None, Events())
    with pytest.raises(ChildDownError):
        await replays.replay()
    await scorers.close()
    assert game.due() == 3
    game.ledger.close()


async def test_a_damaged_body_ends_its_result_alone(tmp_path: Path) -> None:
    game = Trusting(lambda: LedgerStore(tmp_path))
    session = game.join("a")
    game.add(1)
    game.play(session, game.lease(session, 1))
    (segment,) = (tmp_path / "bodies").iterdir()
    content = np.fromfile(segment, "u1")
    content[-1] ^= 1
    segment.write_bytes(content.tobytes())
    scorers = TaskProcesses("no_such_module:Task", TASK_HASH)
    changed: list[None] = []
    await RewardReplays(game.ledger, scorers, called, lambda: changed.append(None), Events()).replay()
    assert (game.reasons(), game.due(), len(changed)) == ({"damaged": 1}, 0, 1)
    game.ledger.close()
