"""Results that claim sparse attention, at a ledger that is told which schedule each version carries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from p2pcast.ground.errors import RefusedError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.worker_api import Settled
from tests.trainer_node.ledger.crash_run import manifest
from tests.trainer_node.ledger.ledger_game import ZERO, Game, last_token, sample
from tests.trainer_node.ledger.ledger_invariants import dump
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger_rows import MAX_BLAMED

ONE = Version(0, 1)
NAME, OTHER = b"n" * 32, b"o" * 32


@pytest.fixture
def game(play: Callable[..., Game]) -> Game:
    return play(staleness=18)


def claim(game: Game, session: bytes, version: Version, name: bytes | None) -> Settled:
    (one,) = game.lease(session, 1, served=version)
    schedules = None if name is None else [(version, name)]
    return game.ledger.results(session, [replace(sample(one, version, 0), schedules=schedules)], last_token)[0]


def test_a_worker_that_claims_the_schedule_of_no_version_gets_no_more_leases(game: Game) -> None:
    """Audits would leave out each such result."""
    game.add(8)
    liar = game.join("liar")
    for _ in range(MAX_BLAMED):
        assert claim(game, liar, ZERO, NAME).reason == "forged"
    with pytest.raises(RefusedError, match="malformed or forged"):
        game.lease(liar, 1)
    assert game.ledger.next_audit(ZERO) is None


def test_schedules_are_known_after_a_restart(game: Game) -> None:
    game.ledger.publish(ONE, manifest(ONE), NAME)
    game.ledger.close()
    game.start()
    game.add(2)
    session = game.join("a")
    assert claim(game, session, ONE, NAME).verdict == "accepted"
    assert claim(game, session, ONE, None).verdict == "accepted", "an engine without sparse attention"
    assert claim(game, session, ONE, OTHER).reason == "forged"
    assert claim(game, session, ZERO, NAME).reason == "forged"


def test_older_database_learns_schedules_with_the_versions(game: Game) -> None:
    """As a release before this one left it; the hub states all of its versions to a ledger that starts."""
    game.publish()
    with game.store.connection.begin():
        db.schedules.drop(game.store.connection)
    game.ledger.close()
    game.start()
    game.add(2)
    session = game.join("a")
    assert claim(game, session, ZERO, NAME).reason == "forged"
    game.ledger.publish(ZERO, manifest(ZERO), NAME)
    assert claim(game, session, ZERO, NAME).verdict == "accepted"


def test_a_version_has_one_schedule(game: Game) -> None:
    for _ in range(2):
        game.ledger.publish(ONE, manifest(ONE), NAME)
    for schedule in (OTHER, None):
        with pytest.raises(RefusedError, match=r"0\.1 is known with another schedule"):
            game.ledger.publish(ONE, manifest(ONE), schedule)
    game.add(1)
    assert claim(game, game.join("a"), ONE, NAME).verdict == "accepted"


def test_a_publication_that_is_refused_teaches_no_schedule(game: Game) -> None:
    with pytest.raises(RefusedError, match="another manifest"):
        game.ledger.publish(ZERO, manifest(ONE), NAME)
    game.add(1)
    assert claim(game, game.join("a"), ZERO, NAME).reason == "forged"


def test_schedules_are_forgotten_with_their_versions(opened: Callable[[], LedgerStore]) -> None:
    game = Game(opened, staleness=0)
    session = game.join("a")
    batches = []
    for _ in range(18):
        batches.append(game.whole_step(session))
        if game.step in (1, 18):
            game.ledger.publish(game.version, manifest(game.version), NAME)
    game.ledger.ack(game.epoch, game.step, batches, b"c" * 32)
    game.ledger.prune()
    assert [(row.branch, row.step) for row in dump(game.store)["schedules"]] == [(0, 18)]
    game.ledger.close()
