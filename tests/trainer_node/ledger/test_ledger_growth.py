"""Rows, segments and memory of a long run stay flat."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from p2pcast.ground.version import Version
from tests.trainer_node.ledger.crash_run import manifest
from tests.trainer_node.ledger.ledger_game import Game
from tests.trainer_node.ledger.ledger_invariants import check_rows, dump
from trainer_node.ledger import ledger_retention
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger_rows import UnknownIdError
from trainer_node.ledger.lineage import KEPT_BATCHES

STEPS = 120
WARM = 60


def _sizes(game: Game, folder: Path) -> Counter[str]:
    sizes = Counter({name: len(rows) for name, rows in dump(game.store).items()})
    sizes["segment bytes"] = sum(path.stat().st_size for path in (folder / "bodies").glob("*.seg"))
    rates = game.ledger._rates
    sizes["memory"] = len(rates._busy_since) + len(rates._asked_s) + len(rates._staged) + len(rates.throughputs.known())
    sizes["classes"] = len(rates._classes)
    return sizes


def _step(game: Game, number: int) -> bytes:
    """One step, with all that leaves rows behind: a new worker, late and faulty results, evaluation, a lost lease."""
    session = game.join(f"w{number}", slots=32, device_class=f"class {number % 40}")
    game.add(1, purpose="evaluate", pinned=game.version, size=2)
    game.add(3)
    leases = game.lease(session, 12)
    game.hand_in(session, leases[:1], reward=99)
    game.ledger.give_back(session, [leases[1].lease])
    game.hand_in(session, leases[3:6], reward=1)
    game.hand_in(session, leases[6:])
    game.source_s += 4000
    game.fill(session)
    return game.learn()


def test_growth_is_flat_over_a_long_run(tmp_path: Path) -> None:
    game = Game(lambda: LedgerStore(tmp_path, segment_bytes=4096), staleness=2)
    batches: list[bytes] = []
    warm: Counter[str] = Counter()
    for number in range(STEPS):
        batches.append(_step(game, number))
        game.ledger.ack(game.epoch, game.step, batches[-4:], b"c" * 32)
        game.ledger.prune()
        if number >= WARM:
            sizes = _sizes(game, tmp_path)
            warm = warm or sizes + Counter(dict.fromkeys(sizes, 0))
            for name, size in sizes.items():
                assert size <= 1.25 * warm[name] + 8, f"{name} grows: {warm[name]} at step {WARM}, {size} at {number}"
    check_rows(dump(game.store))
    assert warm["results"] > 3 * KEPT_BATCHES, "the run left no rows to forget"
    game.ledger.close()


def test_learner_that_forks_at_every_step_leaves_no_branches(tmp_path: Path) -> None:
    game = Game(lambda: LedgerStore(tmp_path))
    session = game.join("a")
    for branch in range(1, 3 * KEPT_BATCHES):
        kept = game.whole_step(session)
        game.ledger.ack(game.epoch, game.step, [kept], b"c" * 32)
        game.whole_step(session)
        game.step -= 1
        game.epoch = game.ledger.resume(branch, game.step, b"c" * 32, [])
        game.branch = branch
        game.publish()
        game.ledger.prune()
    rows = dump(game.store)
    most = KEPT_BATCHES + game.policy.bounds.staleness + 1
    assert len(rows["forks"]) <= most
    assert len(rows["versions"]) <= 4 * most
    assert len(rows["batches"]) <= 4 * most
    game.whole_step(session)
    game.ledger.close()


def test_version_that_an_evaluation_pins_stays(tmp_path: Path) -> None:
    game = Game(lambda: LedgerStore(tmp_path), staleness=0)
    session = game.join("a")
    game.add(1, purpose="evaluate", pinned=Version(0, 0))
    batches = [game.whole_step(session) for _ in range(KEPT_BATCHES + 4)]
    game.add(1, purpose="evaluate", pinned=Version(0, 1))
    game.ledger.ack(game.epoch, game.step, batches, b"c" * 32)
    game.ledger.prune()
    assert {row.step for row in dump(game.store)["versions"]} == {1, *range(4, game.step + 1)}
    assert game.lease(session, 3, Version(0, 1))[0].job.purpose == "evaluate"
    game.ledger.close()


def test_late_result_is_judged_until_its_lease_is_forgotten(tmp_path: Path) -> None:
    game = Game(lambda: LedgerStore(tmp_path))
    session = game.join("a")
    game.add(1)
    one, other = game.lease(session, 2)
    game.source_s += 31
    game.ledger.expire()
    game.ledger.prune()
    assert game.hand_in(session, [one])[0].verdict == "accepted"
    game.source_s += ledger_retention.LATE_S + 1
    game.ledger.prune()
    assert game.hand_in(session, [other])[0].reason == "unknown lease"
    assert game.hand_in(session, [one])[0].verdict == "accepted", "an accepted result is remembered with its group"
    game.ledger.close()


def test_silent_workers_are_forgotten_and_blamed_workers_later(tmp_path: Path) -> None:
    game = Game(lambda: LedgerStore(tmp_path))
    silent, blamed = game.join("silent"), game.join("blamed")
    game.add(1)
    game.hand_in(blamed, game.lease(blamed, 1), reward=99)
    game.source_s += ledger_retention.SILENT_S + ledger_retention.LATE_S + 60
    game.ledger.expire()
    game.ledger.prune()
    with pytest.raises(UnknownIdError, match="register again"):
        game.lease(silent)
    assert game.lease(blamed, 1)
    game.ledger.close()


def test_published_version_that_was_forgotten_may_be_named_again(tmp_path: Path) -> None:
    """A hub lists old versions for long."""
    game = Game(lambda: LedgerStore(tmp_path), staleness=0)
    session = game.join("a")
    for _ in itertools.repeat(None, KEPT_BATCHES + 2):
        game.ledger.ack(game.epoch, game.step + 1, [game.whole_step(session)], b"c" * 32)
    for _ in range(2):
        game.ledger.prune()
        assert game.ledger.status()["versions"] == KEPT_BATCHES + 1
        game.ledger.publish(Version(0, 0), manifest(Version(0, 0)))
        assert game.lease(session, 1, Version(0, 0)) == []
    game.ledger.close()
