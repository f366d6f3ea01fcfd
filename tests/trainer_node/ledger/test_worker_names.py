"""Workers that state the same name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pcast.ledger_api.worker_api import Registered, Registration
from tests.trainer_node.ledger.crash_run import TASK_HASH
from tests.trainer_node.ledger.ledger_game import Game
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger_rows import BEARER, UnknownIdError


@pytest.fixture
def game(tmp_path: Path) -> Iterator[Game]:
    made = Game(lambda: LedgerStore(tmp_path))
    yield made
    made.ledger.close()


def register(game: Game, name: str, lost: bytes | None = None) -> Registered:
    return game.ledger.register(BEARER, Registration(name, 4, "sums", TASK_HASH, leases=[], lost=lost))


def test_two_workers_of_one_name_do_not_displace_each_other_for_ever(game: Game) -> None:
    first, second = register(game, "w"), register(game, "w")
    assert (first.worker, first.name) == (second.worker, second.name)
    with pytest.raises(UnknownIdError):
        game.lease(first.session)
    moved = register(game, "w", first.session)
    assert (moved.name, moved.worker != first.worker) == ("w-2", True)
    game.add(1)
    assert game.lease(second.session, 1)
    assert game.lease(moved.session, 1)
    third = register(game, "w")
    assert register(game, "w", second.session).name == "w-3"
    assert third.name == "w"


def test_a_worker_that_begins_again_keeps_its_name(game: Game) -> None:
    first = register(game, "w")
    assert register(game, "w").worker == first.worker, "a new process"


def test_a_registration_whose_answer_was_lost_is_repeated(game: Game) -> None:
    first = register(game, "w")
    lost = register(game, "w", first.session)
    again = register(game, "w", first.session)
    assert (again.worker, again.name) == (first.worker, "w")
    assert again.session != lost.session
