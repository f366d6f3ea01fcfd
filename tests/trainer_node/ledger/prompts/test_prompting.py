"""The cursor of the task's prompts: a row for each task and seed, written with the groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from sqlalchemy import select

from p2pcast.ground.errors import RefusedError
from p2pcast.rollouts.job import Group
from tests.trainer_node.ledger.crash_run import group
from tests.trainer_node.ledger.ledger_game import Game
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.prompts import prompting
from trainer_node.ledger.prompts.prompting import PassedPrompts


def groups(first: int, count: int) -> list[Group]:
    return [group(1000 + number) for number in range(first, first + count)]


def passed(first: int, count: int, *, ended: bool = False) -> PassedPrompts:
    return PassedPrompts(first, first + count, groups(first, count), ended)


def restart(game: Game) -> None:
    game.ledger.close()
    game.start()


def sources(game: Game) -> Sequence[tuple[bytes, int, int, bool]]:
    with game.store.connection.begin():
        rows = game.store.connection.execute(select(db.prompt_sources).order_by(db.prompt_sources.c.cursor)).all()
    return [(bytes(row.task_hash), row.seed, row.cursor, row.ended) for row in rows]


def test_a_restart_finds_the_cursor_behind_the_last_prompts(game: Game) -> None:
    assert game.ledger.prompts(7) == (0, 0)
    game.ledger.add_prompts(7, passed(0, 3))
    game.ledger.add_prompts(7, passed(3, 2))
    restart(game)
    assert game.ledger.prompts(7) == (5, 5)


def test_no_other_group_moves_the_cursor(game: Game) -> None:
    game.ledger.add_prompts(7, passed(0, 3))
    game.add(4)
    game.add(2, purpose="evaluate", pinned=game.version, temperature=0.0)
    assert game.ledger.prompts(7) == (3, 7)


def test_each_seed_has_a_cursor(game: Game) -> None:
    game.ledger.add_prompts(7, passed(0, 3))
    assert game.ledger.prompts(1 << 62).cursor == 0
    game.ledger.add_prompts(1 << 62, passed(0, 1))
    assert [game.ledger.prompts(seed).cursor for seed in (7, 1 << 62)] == [3, 1]


def test_another_task_begins_its_own_cursor_and_the_first_keeps_its_own(game: Game) -> None:
    game.ledger.add_prompts(7, passed(0, 3))
    first, other = game.policy, b"o" * 32
    game.policy = dataclasses.replace(first, task_hash=other)
    restart(game)
    assert game.ledger.prompts(7) == (0, 0)
    game.ledger.add_prompts(7, PassedPrompts(0, 1, [dataclasses.replace(group(1), task_hash=other)], ended=True))
    game.policy = first
    restart(game)
    assert game.ledger.prompts(7).cursor == 3
    assert sources(game) == [(other, 7, 1, True), (first.task_hash, 7, 3, False)]


def test_prompts_that_are_sent_again_change_nothing(game: Game) -> None:
    for _ in range(2):
        game.ledger.add_prompts(7, passed(0, 3))
    assert game.ledger.prompts(7) == (3, 3)


@pytest.mark.parametrize("first", [1, 2, 4])
def test_prompts_that_do_not_begin_at_the_cursor_are_refused(game: Game, first: int) -> None:
    game.ledger.add_prompts(7, passed(0, 3))
    with pytest.raises(RefusedError, match="cursor is at 3"):
        game.ledger.add_prompts(7, passed(first, 3))
    assert game.ledger.prompts(7) == (3, 3)


def test_groups_that_fail_leave_the_cursor(game: Game) -> None:
    foreign = [dataclasses.replace(one, task_hash=b"?" * 32) for one in groups(0, 2)]
    with pytest.raises(RefusedError, match="of task"):
        game.ledger.add_prompts(7, PassedPrompts(0, 2, foreign))
    assert game.ledger.prompts(7) == (0, 0)


def test_the_end_is_recorded_without_further_groups(game: Game) -> None:
    game.ledger.add_prompts(7, passed(0, 1))
    game.ledger.add_prompts(7, PassedPrompts(1, 1, [], ended=True))
    assert sources(game) == [(game.policy.task_hash, 7, 1, True)]


def test_values_of_hooks_are_written_with_the_cursor(game: Game) -> None:
    game.ledger.add_prompts(7, PassedPrompts(0, 1, groups(0, 1), hooks="m:A", state={"a": "1", "b": "[2]"}))
    game.ledger.add_prompts(7, PassedPrompts(1, 2, [], hooks="m:A", state={"a": "3", "b": None}))
    with pytest.raises(RefusedError):
        game.ledger.add_prompts(7, PassedPrompts(1, 3, [], hooks="m:A", state={"a": "4"}))
    restart(game)
    assert game.ledger.hook_state(7, "m:A") == {"a": "3"}
    assert game.ledger.hook_state(7, "m:B") == game.ledger.hook_state(8, "m:A") == {}


def test_rewards_enter_a_prompts_history_once_and_stay_after_the_groups(
    game: Game, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [dataclasses.replace(one, prompt=bytes([n // 2])) for n, one in enumerate(groups(0, 6))]
    game.ledger.add_prompts(7, PassedPrompts(0, 6, made, hooks="m:A"))
    game.add(1, prompt=bytes([0]))
    session = game.join("a")
    for _ in range(7):
        while leases := game.lease(session):
            game.hand_in(session, leases[:5])
            game.hand_in(session, leases[5:], reward=0)
        if game.take().batch is not None:
            game.learn()
    found = game.ledger.histories([bytes([n]) for n in range(4)])
    assert [len(means) for means in found] == [2, 2, 2, 0]
    assert {mean for means in found for mean in means} <= {0.0, 1 / 3}
    game.ledger.prune()
    restart(game)
    assert game.ledger.histories([bytes([n]) for n in range(4)]) == found
    monkeypatch.setattr(prompting, "KEPT_HISTORIES", 2)
    game.ledger.prune()
    assert game.ledger.histories([bytes([n]) for n in range(4)]) == [[], *found[1:]]
