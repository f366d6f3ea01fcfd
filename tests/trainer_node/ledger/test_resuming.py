"""Checkpoints that a learner may resume from, and those that would train a batch twice."""

from __future__ import annotations

import pytest

from p2pcast.ground.errors import RefusedError
from tests.trainer_node.ledger.ledger_game import Game
from trainer_node.ledger.lineage import KEPT_BATCHES

CHECKPOINT = b"c" * 32


def test_checkpoint_that_omits_an_applied_batch_is_refused(game: Game) -> None:
    session = game.join("a")
    first, second = game.whole_step(session), game.whole_step(session)
    before = game.ledger.status()
    with pytest.raises(RefusedError, match=rf"does not name batch {first.hex()} of step 0, .* or resume from step 0"):
        game.ledger.resume(1, 2, CHECKPOINT, [second])
    assert game.ledger.status() == before, "a refused resume changes nothing"
    assert game.ledger.resume(1, 2, CHECKPOINT, [first, second]) == 2


def test_checkpoint_names_batches_since_the_acknowledged_one(game: Game) -> None:
    session = game.join("a")
    first, second = game.whole_step(session), game.whole_step(session)
    game.ledger.ack(game.epoch, 1, [first], CHECKPOINT)
    assert game.ledger.resume(0, 2, CHECKPOINT, [second]) == 2
    assert game.ledger.status()["batches"] == {"trained": 2}


def test_checkpoint_that_omits_its_own_cut_batch_is_refused(game: Game) -> None:
    """The learner has applied the batch, and died before it could say so."""
    session = game.join("a")
    game.add(2)
    game.fill(session)
    cut = game.take().batch
    assert cut is not None
    with pytest.raises(RefusedError, match=f"does not name batch {cut.id.hex()} of step 0, which is cut"):
        game.ledger.resume(0, 1, CHECKPOINT, [])
    assert game.ledger.resume(0, 1, CHECKPOINT, [cut.id]) == 2
    assert game.ledger.status()["batches"] == {"trained": 1}


def test_batches_from_the_checkpoints_step_on_are_reopened(game: Game) -> None:
    session = game.join("a")
    first = game.whole_step(session)
    game.whole_step(session)
    assert game.ledger.resume(1, 1, CHECKPOINT, [first]) == 2
    assert game.ledger.status()["batches"] == {"trained": 1, "reopened": 1}


def test_learner_without_a_checkpoint_trains_on_no_rollout_of_older_weights(game: Game) -> None:
    """A warm start has changed the weights: rollouts of the hub's base are not its own, though both are of step 0."""
    session = game.join("a", slots=64)
    game.add(4)
    base = game.version
    leases = game.lease(session, 8, base)
    game.hand_in(session, leases[:4])
    assert game.ledger.resume(1, 0, None, []) == 2
    game.epoch, game.branch = 2, 1
    game.publish()
    assert game.ledger.status()["leases"].get("held", 0) == 0
    assert "accepted" not in game.ledger.status()["jobs"]
    assert game.lease(session, 1, base) == []
    own = game.version
    assert game.lease(session, 1, own) != []
    game.epoch, game.branch = game.ledger.resume(2, 0, CHECKPOINT, []), 2
    assert game.lease(session, 1, own) != [], "the checkpoint's learner has the weights of 1.0"


def test_learner_without_a_checkpoint_undoes_no_acknowledged_step(game: Game) -> None:
    session = game.join("a")
    kept = game.whole_step(session)
    game.whole_step(session)
    game.ledger.ack(game.epoch, 1, [kept], CHECKPOINT)
    before = game.ledger.status()
    assert before["acknowledged"] == 1
    with pytest.raises(
        RefusedError, match=r"begins at step 0 without .* is at step 2, and checkpoints contain 1 steps"
    ):
        game.ledger.resume(1, 0, None, [])
    assert game.ledger.status() == before, "a refused resume changes nothing"
    assert game.ledger.resume(1, 0, None, [], from_start=True) == 2
    assert game.ledger.status()["batches"] == {"reopened": 2}


def test_learner_that_crashed_before_its_first_checkpoint_begins_again(game: Game) -> None:
    session = game.join("a")
    game.whole_step(session)
    assert game.ledger.status()["acknowledged"] == 0
    assert game.ledger.resume(1, 0, None, []) == 2


def test_checkpoint_whose_later_batches_are_deleted_is_refused(game: Game) -> None:
    session = game.join("a")
    batches = [game.whole_step(session) for _ in range(KEPT_BATCHES + 3)]
    game.ledger.ack(game.epoch, game.step, batches, CHECKPOINT)
    game.ledger.prune()
    with pytest.raises(RefusedError, match=r"begins at step 2 from a checkpoint .* is at step 19, and .* 19 steps"):
        game.ledger.resume(1, 2, CHECKPOINT, [])
    assert game.ledger.resume(1, 3, CHECKPOINT, []) == 2
    assert game.ledger.status()["acknowledged"] == 3


def test_learner_with_rare_checkpoints_comes_back_from_far(game: Game) -> None:
    """The rows of batches that no checkpoint contains stay, however many there are."""
    session = game.join("a")
    kept = game.whole_step(session)
    game.ledger.ack(game.epoch, 1, [kept], CHECKPOINT)
    for _ in range(KEPT_BATCHES + 4):
        game.whole_step(session)
    game.ledger.prune()
    assert game.ledger.resume(1, 1, CHECKPOINT, [kept]) == 2
