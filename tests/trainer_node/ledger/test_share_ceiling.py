"""Shares as ceilings on leases: no worker's silence, age or lies keeps jobs from the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pcast.ground.version import Version
from tests.trainer_node.ledger.crash_run import manifest
from tests.trainer_node.ledger.ledger_game import ZERO, Game
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.worker_rates import MAX_CLASSES, WAITS_S, WorkerRates
from trainer_node.scheduling.shares import PROBE_S


@pytest.fixture
def games(tmp_path: Path) -> Iterator[list[Game]]:
    made: list[Game] = []
    yield made
    for game in made:
        game.ledger.close()


def _game(games: list[Game], tmp_path: Path, **terms: object) -> Game:
    games.append(Game(lambda: LedgerStore(tmp_path), **terms))  # type: ignore[arg-type]
    return games[-1]


def _names(game: Game) -> dict[str, str]:
    return {row["name"]: row["worker"] for row in game.ledger.workers()}


def test_share_bounds_a_worker_while_another_asks(games: list[Game], tmp_path: Path) -> None:
    game = _game(games, tmp_path)
    one, other = game.join("a", slots=32), game.join("b", slots=32)
    assert game.lease(one) == game.lease(other) == []
    game.add(4)
    assert len(game.lease(one, 32)) == 3, "half of a batch of six jobs"
    game.source_s += WAITS_S / 2
    assert game.lease(one, 32) == []
    assert len(game.lease(other, 32)) == 9, "the others have had their shares"


def test_worker_that_stops_asking_keeps_no_jobs_from_others(games: list[Game], tmp_path: Path) -> None:
    """Heartbeats go on, so the worker is not silent."""
    game = _game(games, tmp_path)
    one, idle = game.join("a", slots=32), game.join("idle", slots=32)
    game.lease(idle)
    game.add(2)
    assert len(game.lease(one, 32)) == 3
    for _ in range(11):
        game.source_s += WAITS_S / 10
        game.ledger.heartbeat(idle, {})
        game.ledger.heartbeat(one, {})
    assert len(game.lease(one, 32)) == 3


def test_worker_that_gives_leases_back_keeps_no_jobs_from_others(games: list[Game], tmp_path: Path) -> None:
    game = _game(games, tmp_path)
    one, leaving = game.join("a", slots=32), game.join("leaving", slots=32)
    assert game.lease(one) == game.lease(leaving) == []
    game.add(2)
    leases = game.lease(leaving, 1)
    assert len(game.lease(one, 2)) == 2
    game.ledger.give_back(leaving, [each.lease for each in leases])
    assert len(game.lease(one, 32)) == 4


def test_engine_without_room_keeps_no_jobs_from_newer_engines(games: list[Game], tmp_path: Path) -> None:
    """Both ask; only the newer engine may open groups."""
    game = _game(games, tmp_path, staleness=1)
    old, new = game.join("old", slots=32), game.join("new", slots=32)
    game.whole_step(new)
    game.add(8)
    for _ in range(4):
        game.source_s += 1
        game.lease(old, 32, ZERO)
        game.lease(new, 32)
    assert game.ledger.status()["ahead"] == 4, "all groups that version 0.1 has room for"
    assert game.ledger.status()["jobs"].get("open", 0) == 0


def test_evaluation_is_not_bounded_by_shares(games: list[Game], tmp_path: Path) -> None:
    game = _game(games, tmp_path)
    one, other = game.join("a", slots=32), game.join("b", slots=32)
    assert game.lease(one) == game.lease(other) == []
    game.add(1, purpose="evaluate", pinned=ZERO, size=9)
    assert len(game.lease(one, 32)) == 9


def test_worker_without_a_share_is_probed_now_and_then(games: list[Game], tmp_path: Path) -> None:
    """With the rule strict, an engine that is one version behind is not in Algorithm 1's set."""
    game = _game(games, tmp_path, rule="strict")
    behind, newest = game.join("behind", slots=32), game.join("newest", slots=32)
    game.ledger.publish(Version(0, 1), manifest(Version(0, 1)))
    for _ in range(2):
        game.lease(newest, 32, Version(0, 1))
        game.add(1)
        game.source_s += WAITS_S / 2
        assert len([*game.lease(behind, 32, ZERO), *game.lease(behind, 32, ZERO)]) == 1
        game.source_s += PROBE_S


def test_engine_with_the_newest_version_staged_has_a_share(games: list[Game], tmp_path: Path) -> None:
    game = _game(games, tmp_path, rule="strict")
    behind, newest = game.join("behind", slots=32), game.join("newest", slots=32)
    game.ledger.publish(Version(0, 1), manifest(Version(0, 1)))
    game.lease(newest, 32, Version(0, 1))
    game.lease(behind, 32, ZERO, Version(0, 1))
    game.add(4)
    assert len(game.lease(behind, 32, ZERO, Version(0, 1))) == 3


def test_estimates_decay_once_a_publication_however_often_repeated(games: list[Game], tmp_path: Path) -> None:
    game = _game(games, tmp_path, staleness=0)
    session, gone = game.join("a", slots=32), game.join("gone", slots=32)
    game.add(2)
    leases = [*game.lease(gone, 3), *game.lease(session, 3)]
    game.source_s += 1
    game.hand_in(gone, leases[:3])
    game.hand_in(session, leases[3:])
    name = _names(game)["gone"]
    rates = game.ledger._rates
    first = rates.estimates()[name]
    assert first
    game.learn()
    assert rates.estimates()[name] == first, "the worker was able to play for the publication before"
    for _ in range(3):
        game.publish()
    game.whole_step(session)
    assert rates.estimates()[name] == pytest.approx(0.9 * first)
    game.publish()
    assert rates.estimates()[name] == pytest.approx(0.9 * first)


def test_leases_that_end_at_a_heartbeat_lengthen_later_leases(games: list[Game], tmp_path: Path) -> None:
    game = _game(games, tmp_path)
    session = game.join("a")
    game.add(4)
    (first,) = game.lease(session, 1)
    game.source_s += first.expires_in_s + 1
    assert game.ledger.heartbeat(session, {first.lease: 5})[0].state == "unknown"
    (second,) = game.lease(session, 1)
    assert second.expires_in_s == pytest.approx(2.5 * first.expires_in_s)


def test_heartbeats_prolong_no_lease_beyond_its_longest_time(games: list[Game], tmp_path: Path) -> None:
    game = _game(games, tmp_path)
    session = game.join("a")
    game.add(1)
    (one,) = game.lease(session, 1)
    for beat in range(1, 100):
        game.source_s += 1
        if game.ledger.heartbeat(session, {one.lease: beat})[0].state == "unknown":
            break
    assert beat == pytest.approx(one.latest_in_s, abs=2)


def test_slowest_rate_of_one_liar_does_not_last() -> None:
    rates, kind = WorkerRates(30.0), ("sums", "")
    rates.settled("liar", kind, 3600.0, 1, caller="liar")
    rates.keep()
    assert rates.terms(kind, 1000)[1] == 1000 * 3600
    for _ in range(64):
        rates.settled("honest", kind, 10.0, 1000, caller="honest")
    rates.keep()
    assert rates.terms(kind, 1000)[1] <= 25.0


def test_stated_device_classes_take_bounded_memory() -> None:
    rates = WorkerRates(30.0)
    for number in range(2 * MAX_CLASSES):
        rates.settled("a", ("sums", str(number)), 10.0, 1000, caller="a")
    rates.keep()
    assert len(rates._classes) == MAX_CLASSES
    assert rates.terms(("sums", "0"), 1)[0] == 30.0
    assert rates.terms(("sums", str(2 * MAX_CLASSES - 1)), 1)[0] == 25.0


def test_undone_measurements_never_count() -> None:
    rates, kind = WorkerRates(30.0), ("sums", "")
    rates.settled("a", kind, 10.0, 100, caller="a")
    mark = rates.mark()
    rates.settled("a", kind, 1000.0, 1, caller="a")
    rates.expired("a", kind, 5000.0)
    rates.undo(mark)
    rates.keep()
    rates.keep()
    assert rates.terms(kind, 100) == (25.0, 25.0)
