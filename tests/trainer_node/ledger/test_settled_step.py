"""The learner step at which a result was settled splits its age: in flight, and in the queue."""

from __future__ import annotations

import pytest

from p2pcast.ground.errors import UsageError
from p2pcast.ledger_api.trainer_api import MAX_READ
from p2pcast.rollouts.result import Result
from tests.trainer_node.ledger.ledger_game import ZERO, Game
from trainer_node.ledger.ledger_rows import UnknownIdError


def ages(game: Game) -> list[tuple[int, int]]:
    """Steps in flight and in queue, of each result of the batch."""
    batch = game.take().batch
    assert batch is not None
    found = []
    for member in batch.members:
        for one in member.results:
            oldest = Result.from_bytes(game.ledger.body(one.place)).oldest_step
            found.append((one.settled_step - oldest, batch.step - one.settled_step))
    return found


def test_age_is_split_where_the_result_was_settled(game: Game) -> None:
    session = game.join("a", slots=32)
    game.add(4)
    leases = game.lease(session, 12)
    game.hand_in(session, leases[:6])
    game.learn()
    game.hand_in(session, leases[6:9], ZERO)
    game.hand_in(session, leases[9:])
    assert ages(game) == [(1, 0)] * 3 + [(0, 0)] * 3


def test_steps_that_a_resume_undoes_pass_nowhere(game: Game) -> None:
    session = game.join("a", slots=32)
    game.add(4)
    leases = game.lease(session, 12)
    game.hand_in(session, leases[:6])
    batch = game.learn()
    game.hand_in(session, leases[6:], ZERO)
    game.step, game.branch = 0, 1
    game.epoch = game.ledger.resume(1, 0, b"c" * 32, [])
    assert ages(game) == [(0, 0)] * 6
    assert game.learn() != batch
    assert ages(game) == [(0, 1)] * 6


def test_groups_are_read_together_in_their_order(game: Game) -> None:
    session = game.join("a")
    ids = game.add(3)
    leases = game.lease(session, 5)
    game.hand_in(session, leases)
    found = game.ledger.groups(ids[::-1])
    assert [row.group for row in found] == ids[::-1]
    assert [(row.state, row.rewards) for row in found] == [
        ("waiting", []),
        ("open", [0.0, 1.0]),
        ("complete", [0.0, 1.0, 0.0]),
    ]
    with pytest.raises(UnknownIdError, match="no group 0909"):
        game.ledger.groups([ids[0], b"\x09" * 16])
    with pytest.raises(UsageError, match="1024 are allowed"):
        game.ledger.groups([bytes(16)] * (MAX_READ + 1))
