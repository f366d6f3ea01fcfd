"""Prompts of the task are counted apart from the groups that others add."""

from __future__ import annotations

from pathlib import Path

from tests.trainer_node.ledger.crash_run import group
from tests.trainer_node.ledger.ledger_game import Game
from trainer_node.ledger.database.ledger_store import Store


def test_groups_of_trainers_and_evaluations_take_no_prompts(tmp_path: Path) -> None:
    game = Game(lambda: Store(tmp_path))
    game.add(2)
    game.add(2, purpose="evaluate", pinned=game.version, temperature=0.0)
    assert game.ledger.pool() == (0, 2)
    fed = [group(number) for number in range(100, 103)]
    assert game.ledger.add_groups(fed, fed=True) == 3
    assert game.ledger.add_groups(fed, fed=True) == 0, "the answer was lost"
    assert game.ledger.pool() == (3, 5)
    game.ledger.close()
