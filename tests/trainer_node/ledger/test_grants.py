"""A request that gets no leases says whether others can get some."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pcast.ground.version import Version
from p2pcast.ledger_api.worker_api import Registration
from tests.trainer_node.ledger.crash_run import manifest
from tests.trainer_node.ledger.ledger_game import ZERO, Game
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.leasing import Grant
from trainer_node.scheduling.served_versions import KnownEngine


@pytest.fixture
def game(tmp_path: Path) -> Iterator[Game]:
    made = Game(lambda: LedgerStore(tmp_path))
    yield made
    made.ledger.close()


def grant(game: Game, session: bytes, served: Version = ZERO, known: KnownEngine | None = None) -> Grant:
    return game.ledger.grant(session, 6, served, manifest(served), None, known)


def test_an_empty_pool_is_exhausted_until_there_are_groups(game: Game) -> None:
    session = game.join("a")
    assert grant(game, session) == Grant([], exhausted=True)
    game.add(1)
    found = grant(game, session)
    assert (len(found.leases), found.exhausted) == (3, False)
    assert grant(game, game.join("b")) == Grant([], exhausted=True)
    game.ledger.give_back(session, [found.leases[0].lease])
    assert len(grant(game, game.join("c")).leases) == 1


def test_a_pool_without_room_for_groups_is_exhausted(game: Game) -> None:
    game.add(32)
    session = game.join("a", slots=64)
    while (found := grant(game, session)).leases:
        assert not found.exhausted
    assert found.exhausted, "the pace rule opens no further group"


def test_a_worker_without_slots_says_nothing_of_others(game: Game) -> None:
    session = game.join("a", slots=1)
    game.add(1)
    assert len(grant(game, session).leases) == 1
    assert grant(game, session) == Grant([])
    assert len(grant(game, game.join("b")).leases) == 2


def test_a_worker_that_is_drained_says_nothing_of_others(game: Game) -> None:
    session = game.join("a")
    game.ledger.drain("a", 60.0)
    assert grant(game, session) == Grant([])


def test_a_worker_of_another_task_says_nothing_of_others(game: Game) -> None:
    session = game.ledger.register("a", Registration("a", 8, "other", bytes(32))).session
    game.add(1)
    assert grant(game, session) == Grant([])
    assert len(grant(game, game.join("b")).leases) == 3


def test_an_engine_that_the_hub_knows_otherwise_says_nothing_of_others(game: Game) -> None:
    session = game.join("a")
    game.whole_step(session)
    one = Version(0, 1)
    assert grant(game, session, one, KnownEngine(ZERO, None)) == Grant([]), "evaluations were not offered"
    assert grant(game, session, one, KnownEngine(one, None)) == Grant([], exhausted=True)


def test_an_evaluation_that_waits_for_its_engine_is_not_exhausted(game: Game) -> None:
    session = game.join("a")
    game.add(1, purpose="evaluate", pinned=ZERO)
    assert len(grant(game, session).leases) == 3
    assert grant(game, game.join("b")) == Grant([], exhausted=True)


def test_a_job_that_is_kept_for_others_is_not_exhausted(game: Game) -> None:
    failing, other = game.join("a", slots=3), game.join("b")
    game.add(1)
    leases = grant(game, failing).leases
    assert len(leases) == 3
    game.hand_in(failing, leases, Version(0, 9))
    assert grant(game, failing) == Grant([]), "all three jobs are for others first"
    assert len(grant(game, other).leases) == 3
