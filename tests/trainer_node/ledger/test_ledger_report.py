"""Reports of the ledger: ages of rollouts in learner steps."""

from __future__ import annotations

from p2pcast.ground.version import Version
from tests.trainer_node.ledger.ledger_game import Game


def ages(game: Game) -> dict[str, dict[str, int]]:
    return game.ledger.status()["ages"]


def test_rollouts_are_counted_by_age_and_place(game: Game) -> None:
    session = game.join("a", slots=32)
    game.add(8)
    assert ages(game) == {"in_flight": {}, "in_queue": {}}
    leases = game.lease(session, 12)
    assert ages(game) == {"in_flight": {"0": 12}, "in_queue": {}}
    game.hand_in(session, leases[:9])
    assert ages(game) == {"in_flight": {"0": 3}, "in_queue": {"0": 9}}
    batch = game.take().batch
    assert batch is not None
    taken = sum(len(member.results) for member in batch.members)
    assert ages(game) == {"in_flight": {"0": 3}, "in_queue": {"0": 9 - taken}}
    game.ledger.applied(game.epoch, batch.id, 1)
    assert ages(game) == {"in_flight": {"1": 3}, "in_queue": {"1": 9 - taken}}
    game.step = 1
    game.publish()
    game.hand_in(session, leases[9:], Version(0, 1))
    assert ages(game) == {"in_flight": {}, "in_queue": {"0": 3, "1": 9 - taken}}
