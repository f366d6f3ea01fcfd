"""Acts of a transition are told after its commit, whichever request caused them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pcast.ground.errors import RefusedError
from tests.trainer_node.ledger.ledger_game import Game
from trainer_node.ledger.database.ledger_store import LedgerStore


@pytest.fixture
def game(tmp_path: Path) -> Iterator[Game]:
    made = Game(lambda: LedgerStore(tmp_path))
    yield made
    made.ledger.close()


def test_leases_that_expire_within_anothers_request_are_told(game: Game) -> None:
    """The requests that wait for their jobs must be woken."""
    lost, other = game.join("lost"), game.join("other")
    game.add(1)
    game.lease(lost, 3)
    game.source_s += 31
    game.ledger.heartbeat(other, {})
    assert game.told == {("leases_expired", "lost"): 3}


def test_rejections_and_drops_are_told_by_reason(game: Game) -> None:
    session = game.join("w")
    game.add(2)
    leases = game.lease(session, 6)
    game.hand_in(session, leases[:1], reward=99)
    game.hand_in(session, leases[:1], reward=99)
    game.hand_in(session, game.lease(session, 1) + leases[1:3], reward=1)
    game.take()
    assert game.told == {("results_rejected", "w", "malformed"): 1, ("groups_dropped", "equal rewards"): 1}


def test_a_transition_that_fails_tells_nothing(game: Game) -> None:
    session = game.join("w")
    game.add(1)
    game.lease(session, 3)
    game.source_s += 31
    with pytest.raises(RefusedError):
        game.ledger.grant(session, 1, game.version, bytes(32))
    assert not game.told
