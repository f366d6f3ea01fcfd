"""Time of the ledger: a wall clock that jumps, and time between two processes, change no lease."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_node.ledger.ledger_game import Game
from tests.trainer_node.ledger.ledger_invariants import dump
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.lease_time import RECORD_S, LedgerClock
from trainer_node.ledger.ledger import Ledger

DAY_S = 86_400.0


@pytest.fixture
def game(tmp_path: Path) -> Iterator[Game]:
    made = Game(lambda: LedgerStore(tmp_path))
    yield made
    made.ledger.close()


@given(st.lists(st.floats(-1e6, 1e6), max_size=20), st.floats(0, 1e9))
def test_time_never_goes_back_and_counts_every_step_forward(steps: list[float], ran_s: float) -> None:
    source_s = 0.0
    clock, last, total = LedgerClock(lambda: source_s, ran_s), ran_s, 0.0
    for step in steps:
        source_s += step
        total += max(0.0, step)
        assert clock.now_s() >= last
        last = clock.now_s()
    assert last == pytest.approx(ran_s + total, abs=1e-3)


def test_wall_clock_that_jumps_changes_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    game = Game(lambda: LedgerStore(tmp_path))
    game.ledger.close()
    game.store = LedgerStore(tmp_path)
    game.ledger = Ledger(game.store, game.policy)
    session = game.join("a")
    game.add(1)
    (one,) = game.lease(session, 1)
    for jump_s in (DAY_S, -DAY_S):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: jump_s)
        assert game.ledger.expire() == 0
        assert 20 < game.ledger.heartbeat(session, {one.lease: 0})[0].expires_in_s < 30.1
    game.ledger.close()


def test_clock_that_steps_back_makes_no_lease_immortal(game: Game) -> None:
    session = game.join("a")
    game.add(1)
    (one,) = game.lease(session, 1)
    game.source_s -= DAY_S
    assert game.ledger.heartbeat(session, {one.lease: 0})[0].expires_in_s == pytest.approx(30)
    game.source_s += 31
    assert game.ledger.expire() == 1


def test_time_between_two_processes_ends_no_lease(game: Game) -> None:
    session = game.join("a")
    game.add(1)
    (one,) = game.lease(session, 1)
    game.source_s += 20
    game.ledger.expire()
    game.ledger.close()
    game.source_s += DAY_S
    game.start()
    assert game.ledger.expire() == 0
    assert game.ledger.heartbeat(session, {one.lease: 0})[0].expires_in_s == pytest.approx(10, abs=RECORD_S)
    game.source_s += 10 + RECORD_S
    assert game.ledger.expire() == 1


def test_ledger_that_dies_again_and_again_still_ends_leases(game: Game) -> None:
    session = game.join("a")
    game.add(1)
    game.lease(session, 1)
    for _ in range(12):
        game.ledger.close()
        game.start()
        game.source_s += 3
        game.ledger.expire()
    assert [row.state for row in dump(game.store)["leases"]] == ["expired"]
