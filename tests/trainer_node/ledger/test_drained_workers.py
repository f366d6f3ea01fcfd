"""Drained workers: orders by themselves, and the leases of a ledger that has some."""

from __future__ import annotations

import pytest

from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.ledger_api.api_route import MAX_DRAIN_S
from tests.trainer_node.ledger.ledger_game import Game
from trainer_node.ledger.drained_workers import DrainedWorkers


def test_an_order_lapses_by_itself_and_is_prolonged_by_another():
    drained = DrainedWorkers()
    assert drained.left_s("a", 0.0) == 0
    assert drained.order("a", 100.0, 30.0)
    assert (drained.left_s("a", 100.0), drained.left_s("a", 129.0), drained.left_s("b", 100.0)) == (30.0, 1.0, 0.0)
    assert not drained.order("a", 120.0, 30.0), "the worker was drained already"
    assert drained.left_s("a", 149.0) == 1.0
    assert drained.left_s("a", 150.0) == 0
    assert drained.order("a", 150.0, 30.0)


def test_no_time_admits_a_worker_again():
    drained = DrainedWorkers()
    assert not drained.order("a", 0.0, 0.0)
    drained.order("a", 0.0, 30.0)
    assert drained.order("a", 1.0, 0.0)
    assert drained.left_s("a", 1.0) == 0
    assert not drained.order("a", 1.0, 0.0)


@pytest.mark.parametrize("for_s", [-1.0, MAX_DRAIN_S + 1, float("nan"), float("inf")])
def test_other_times_are_refused(for_s: float):
    with pytest.raises(UsageError, match="drained for 0 to 86400 s"):
        DrainedWorkers().order("a", 0.0, for_s)


def test_lapsed_orders_make_room_for_new_orders():
    drained = DrainedWorkers(most=2)
    drained.order("a", 0.0, 10.0)
    drained.order("b", 0.0, 20.0)
    with pytest.raises(RefusedError, match="2 workers are drained already"):
        drained.order("c", 5.0, 10.0)
    assert not drained.order("b", 5.0, 20.0), "an order that is known needs no room"
    assert drained.order("c", 10.0, 10.0)
    assert len(drained._until_s) == 2


def test_a_drained_worker_gets_no_lease_and_its_results_count(game: Game):
    game.add(4)
    one, other = game.join("one"), game.join("other")
    leases = game.lease(one, 2)
    assert len(leases) == 2
    assert game.ledger.drain("one", 60.0) == (2, True)
    assert game.lease(one, 6) == []
    assert game.lease(other, 1)
    assert [verdict.verdict for verdict in game.hand_in(one, leases)] == ["accepted"] * 2
    assert game.ledger.drain("one", 60.0) == (0, False)
    drained = {row["name"]: row["drained_s"] for row in game.ledger.workers()}
    assert drained == {"one": 60.0, "other": 0.0}
    game.source_s += 60.0
    assert game.lease(one, 1), "the order has lapsed"
    assert {row["drained_s"] for row in game.ledger.workers()} == {0.0}


def test_a_later_worker_of_a_drained_name_waits_until_admitted(game: Game):
    game.add(4)
    assert game.ledger.drain("one", 60.0) == (0, True)
    one = game.join("one")
    assert game.lease(one, 1) == []
    assert game.ledger.drain("one", 0.0) == (0, True)
    assert game.lease(one, 1)
