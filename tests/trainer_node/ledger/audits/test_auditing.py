"""The random sample of accepted results, and the counts of audits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Result
from tests.trainer_node.ledger.ledger_game import ZERO, Game
from trainer_node.ledger.audits.auditing import MOST, VERSIONS, AuditSample, SampledLease
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger_rows import UnknownIdError


@pytest.fixture
def game(tmp_path: Path) -> Iterator[Game]:
    made = Game(lambda: LedgerStore(tmp_path))
    yield made
    made.ledger.close()


def one(number: int) -> SampledLease:
    return SampledLease(number.to_bytes(16, "big"), bytes(16))


def drained(sample: AuditSample, version: Version) -> list[SampledLease]:
    found = []
    while (taken := sample.take(version)) is not None:
        found.append(taken)
    return found


def test_early_and_late_results_have_the_same_chance() -> None:
    counts: Counter[SampledLease] = Counter()
    drawn = random.Random(7)
    for _ in range(400):
        sample = AuditSample(drawn.randrange)
        for number in range(4 * MOST):
            sample.offer(ZERO, one(number))
        found = drained(sample, ZERO)
        assert len(found) == len(set(found)) == MOST
        counts.update(found)
    # 100 of 400 draws for each result, with a standard deviation below 9.
    assert all(55 < counts[one(number)] < 145 for number in range(4 * MOST))


def test_only_the_newest_versions_are_kept() -> None:
    sample = AuditSample(random.Random(1).randrange)
    for step in range(VERSIONS + 3):
        sample.offer(Version(0, step), one(step))
    assert [step for step in range(VERSIONS + 3) if drained(sample, Version(0, step))] == list(range(3, VERSIONS + 3))


def test_accepted_results_of_one_version_are_audited_once(game: Game) -> None:
    session = game.join("a")
    game.add(1)
    game.hand_in(session, game.lease(session, 3))
    bodies = []
    while (found := game.ledger.next_audit(ZERO)) is not None:
        worker, body = found
        assert worker == "a"
        bodies.append(Result.from_bytes(body))
    assert len({result.job for result in bodies}) == 3
    assert game.ledger.next_audit(Version(0, 1)) is None
    assert game.ledger.audited(bodies[0].job, bodies[0].lease, agrees=True) == "a"
    assert game.ledger.audited(bodies[1].job, bodies[1].lease, agrees=False) == "a"
    [row] = game.ledger.workers()
    assert (row["audits"], row["disagreements"]) == (2, 1)


def test_a_result_that_is_sent_again_is_no_likelier_to_be_audited(game: Game) -> None:
    session = game.join("a")
    game.add(1)
    leases = game.lease(session, 3)
    for _ in range(5):
        game.hand_in(session, leases[:1])
    game.hand_in(session, leases)
    bodies = []
    while (found := game.ledger.next_audit(ZERO)) is not None:
        bodies.append(Result.from_bytes(found[1]).job)
    assert sorted(bodies) == sorted(one.job.job for one in leases)


def test_rejected_results_are_not_audited(game: Game) -> None:
    session = game.join("a")
    game.add(1)
    game.hand_in(session, game.lease(session, 3), reward=99)
    assert game.ledger.next_audit(ZERO) is None


def test_an_unknown_lease_is_an_error(game: Game) -> None:
    with pytest.raises(UnknownIdError):
        game.ledger.audited(bytes(16), bytes(16), agrees=True)
