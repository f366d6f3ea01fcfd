"""How jobs, groups and runs end, on SQLite and on PostgreSQL."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import select, update

from p2pcast.ground.errors import LocalError, RefusedError, UsageError
from p2pcast.ground.version import Version
from p2pcast.rollouts.job import MAX_PROMPT_BYTES, Group
from p2pcast.rollouts.result import Result, reward_fault
from tests.trainer_node.ledger.crash_run import manifest
from tests.trainer_node.ledger.ledger_game import ZERO, Game, groups_of, last_token, sample
from tests.trainer_node.ledger.ledger_invariants import check_counts, check_rows, dump
from tests.trainer_node.ledger.postgresql_cluster import Cluster
from trainer_node.ledger import ledger_retention
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger_rows import BEARER, MAX_BLAMED, MAX_STALE_ENDINGS, UnknownIdError

Play = Callable[..., Game]


def test_strict_takes_results_of_the_leased_version_in_time(play: Play) -> None:
    game = play(rule="strict")
    session, ids = game.join("a"), game.add(2)
    game.publish()
    first = game.lease(session, 3)
    game.ledger.publish(Version(0, 1), manifest(Version(0, 1)))
    assert game.hand_in(session, first[:1], Version(0, 1))[0].reason == "stale"
    game.source_s += 31
    assert [one.reason for one in game.hand_in(session, first[1:])] == ["late", "late"]
    while leases := game.lease(session):
        assert {one.verdict for one in game.hand_in(session, leases)} == {"accepted"}
    assert groups_of(game.take()) == ids


def test_evaluation_is_played_by_its_version_alone_and_never_trained(play: Play) -> None:
    game = play(staleness=1)
    session, trained = game.join("a"), game.add(2)
    (evaluated,) = game.add(1, purpose="evaluate", pinned=Version(0, 1))
    leases = game.lease(session)
    assert {one.job.id for one in leases} == set(trained)
    game.hand_in(session, leases)
    game.learn()
    leases = game.lease(session)
    assert {one.job.id for one in leases} == {evaluated}
    assert game.hand_in(session, leases[:1], ZERO)[0].reason == "stale"
    game.step = 1
    again = game.lease(session, 1)
    game.hand_in(session, [*leases[1:], *again], Version(0, 1))
    assert game.state(evaluated) == "complete"
    assert game.ledger.group(evaluated).rewards == [0.0, 1.0, 0.0]
    assert game.take().batch is None
    assert game.ledger.status()["ahead"] == 0


def test_evaluation_that_no_engine_plays_is_dropped(play: Play) -> None:
    game = play()
    session = game.join("a")
    (evaluated,) = game.add(1, purpose="evaluate", pinned=Version(7, 7))
    batches = [game.whole_step(session) for _ in range(ledger_retention.EVALUATION_STEPS + 1)]
    game.ledger.ack(game.epoch, game.step, batches, b"c" * 32)
    game.ledger.prune()
    assert game.state(evaluated) == "dropped"


def test_run_ends_at_its_last_step(play: Play) -> None:
    game = play(last_step=2)
    session = game.join("a")
    for _ in range(2):
        game.whole_step(session)
    game.add(4)
    assert game.lease(session) == []
    assert game.take().finished
    assert game.ledger.status()["finished"]


def test_leases_that_outlast_the_run_are_aborted(play: Play) -> None:
    game = play(last_step=1)
    session, slow = game.join("a"), game.join("b")
    game.add(2)
    left = game.lease(slow, 1)
    assert game.ledger.heartbeat(slow, {left[0].lease: 1})[0].state == "held"
    game.hand_in(session, game.lease(session))
    game.source_s += 29
    game.hand_in(slow, game.lease(slow, 1))
    while game.take().batch is None:
        game.source_s += 60
        game.hand_in(session, game.lease(session))
    game.learn()
    assert game.ledger.heartbeat(slow, {left[0].lease: 2})[0].state != "held"
    assert "held" not in game.ledger.status()["leases"]


def test_group_is_dropped_after_three_stale_endings(play: Play) -> None:
    game = play(staleness=1)
    slow, session = game.join("slow"), game.join("a")
    (stale,) = game.add(1)
    leases = game.lease(slow, MAX_STALE_ENDINGS)
    for _ in range(2):
        game.whole_step(session)
    for one in leases:
        assert game.state(stale) == "open"
        assert game.hand_in(slow, [one], ZERO)[0].reason == "stale"
    assert game.state(stale) == "dropped"
    assert game.ledger.status()["ahead"] == 0
    assert game.ledger.status()["lost_lengths"] == {"stale leases": {"64": 1}}


def test_heartbeat_aborts_stale_leases(play: Play) -> None:
    game = play(staleness=0)
    session, slow = game.join("a"), game.join("b")
    game.add(2)
    left = game.lease(slow, 1)
    game.hand_in(session, game.lease(session))
    game.source_s += 31
    game.hand_in(session, game.lease(session))
    kept = game.add(1)
    assert game.ledger.heartbeat(slow, {left[0].lease: 9})[0].state == "unknown", "the lease has expired"
    game.learn()
    leased = game.lease(slow, 1)
    assert leased[0].job.id in kept
    assert game.ledger.heartbeat(slow, {left[0].lease: 9})[0].state != "held"
    assert game.ledger.heartbeat(slow, {leased[0].lease: 9})[0].state == "held"


def test_job_is_rejected_after_three_faulty_results(play: Play) -> None:
    game = play()
    session, (faulty,) = game.join("a"), game.add(1)
    for _ in range(3):
        (one,) = game.lease(session, 1)
        assert game.hand_in(session, [one], reward=99)[0].reason == "malformed"
    rest = game.lease(session)
    assert len(rest) == 2
    game.hand_in(session, rest)
    assert game.state(faulty) == "short"


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1.7e308, -1.1e9])
def test_reward_that_is_not_finite_is_no_reward(play: Play, reward: float) -> None:
    game = play()
    session = game.join("a")
    game.add(1)
    (one,) = game.lease(session, 1)
    result = sample(one, ZERO, 1)
    assert game.ledger.unscored(session, [result]) == [one.job]
    settled = game.ledger.settle(session, [result], [reward])
    assert settled[0].reason == "not scored"
    assert settled[0].detail == f"task {one.job.task} gives {reward_fault(reward)}"
    assert dump(game.store)["workers"][0].blamed == 0


def test_blamed_worker_gets_no_more_leases(play: Play) -> None:
    game = play(staleness=6)
    session = game.join("a", slots=32)
    game.add(16)
    for _ in range(MAX_BLAMED):
        game.hand_in(session, game.lease(session, 1), reward=99)
    with pytest.raises(RefusedError, match="malformed or forged"):
        game.lease(session, 1)
    assert game.lease(game.join("b"), 1)


@pytest.mark.parametrize("caller", ["certificate", BEARER])
def test_another_name_of_a_blamed_certificate_is_no_fresh_start(play: Play, caller: str) -> None:
    """Holders of a bearer token cannot be told apart, so none answers for another."""
    game = play(staleness=6)
    session = game.join("a", slots=32, caller=caller)
    game.add(16)
    for _ in range(MAX_BLAMED):
        game.hand_in(session, game.lease(session, 1), reward=99)
    again = game.join("b", caller=caller)
    if caller == BEARER:
        assert game.lease(again, 1)
    else:
        with pytest.raises(RefusedError, match="malformed or forged"):
            game.lease(again, 1)


def test_two_results_that_name_one_lease_get_an_answer_each(play: Play) -> None:
    game = play()
    session = game.join("a")
    game.add(1)
    one, other = (sample(each, ZERO, 1) for each in game.lease(session, 2))
    fields = {name: getattr(other, name) for name in Result._reads} | {"lease": one.lease}
    settled = game.ledger.results(session, [one, Result(**fields)], last_token)
    assert [each.reason for each in settled] == [None, "unknown lease"]
    assert settled[0].verdict == "accepted"


def test_first_of_two_results_of_a_job_in_one_request_counts(play: Play) -> None:
    game = play()
    session = game.join("a")
    game.add(1)
    late = game.lease(session, 1)
    game.source_s += 31
    again = game.lease(session, 1)
    assert late[0].job.job == again[0].job.job
    assert [one.reason for one in game.hand_in(session, [*late, *again])] == [None, "duplicate"]
    assert "held" not in game.ledger.status()["leases"]


def test_dead_version_opens_no_group(play: Play) -> None:
    """The branch that the learner left has higher steps than the one it is on."""
    game = play(staleness=1)
    session = game.join("a")
    for _ in range(4):
        game.whole_step(session)
    dead = game.version
    game.epoch, game.branch, game.step = game.ledger.resume(1, 0, None, []), 1, 0
    game.add(20)
    before = game.ledger.status()["groups"]
    assert game.lease(session, 6, dead) == []
    assert game.ledger.status()["groups"] == before


def test_resume_reopens_batches_that_the_checkpoint_lacks(play: Play) -> None:
    game = play()
    session = game.join("a")
    kept, lost = game.whole_step(session), game.whole_step(session)
    game.ledger.ack(game.epoch, 2, [kept, lost], b"c" * 32)
    game.epoch, game.branch, game.step = game.ledger.resume(1, 1, b"c" * 32, [kept]), 1, 1
    game.publish()
    assert game.ledger.status()["batches"] == {"trained": 1, "reopened": 1}
    with pytest.raises(RefusedError, match="was reopened"):
        game.ledger.resume(1, 1, b"c" * 32, [kept, lost])
    while game.take().batch is None:
        game.hand_in(session, game.lease(session))
    assert game.learn() not in (kept, lost)


def test_group_to_train_has_two_samples_at_least(play: Play) -> None:
    with pytest.raises(UsageError, match="at least 2 samples"):
        play().add(1, size=1)


def test_same_state_is_found_by_the_next_process(play: Play) -> None:
    game = play()
    session = game.join("a")
    game.whole_step(session)
    game.add(1)
    held = game.lease(session, 2)
    before = game.ledger.status()
    game.ledger.close()
    game.source_s = -1e6
    game.start()
    assert game.ledger.status() == before
    assert {one.verdict for one in game.hand_in(session, held)} == {"accepted"}


def test_forgotten_ids_are_unknown(play: Play) -> None:
    game = play(staleness=0)
    session = game.join("a")
    batches = [game.whole_step(session) for _ in range(18)]
    (gone, *_) = dump(game.store)["groups"]
    game.ledger.ack(game.epoch, game.step, batches, b"c" * 32)
    game.ledger.prune()
    with pytest.raises(UnknownIdError):
        game.ledger.group(bytes(gone.id))
    with game.store.connection.begin():
        steps = set(game.store.connection.scalars(select(db.versions.c.step)))
    assert steps == set(range(2, 19))


def test_second_ledger_on_a_postgresql_database_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    database = cluster.database()
    first = LedgerStore(tmp_path / "a", database)
    with pytest.raises(LocalError, match="another ledger"):
        LedgerStore(tmp_path / "b", database)
    first.close()
    LedgerStore(tmp_path / "b", database).close()


@pytest.mark.parametrize("shared_commits", [False, True])
def test_lost_connection_to_postgresql_loses_no_lock_and_no_call(
    cluster: Cluster, tmp_path: Path, shared_commits: bool
) -> None:
    database = cluster.database()
    game = Game(lambda: LedgerStore(tmp_path / "a", database), shared_commits=shared_commits)
    session = game.join("a")
    game.add(2)
    cluster.end_connections(database)
    with pytest.raises(LocalError, match="database failed"):
        game.add(2)
    game.whole_step(session)
    assert game.ledger.status()["learner"] == "0.1"
    with pytest.raises(LocalError, match="another ledger"):
        LedgerStore(tmp_path / "b", database)
    check_rows(dump(game.store))
    game.ledger.close()


# -- groups that no worker can read


def test_group_that_no_worker_could_read_is_refused(play: Play) -> None:
    game = play()
    for wrong in ({"max_tokens": 0}, {"prompt": bytes(MAX_PROMPT_BYTES + 1)}, {"prompt": "text"}, {"seed": -1}):
        with pytest.raises(UsageError, match=f"group: '{next(iter(wrong))}' is malformed|no record holds such values"):
            game.add(1, **wrong)
    assert game.ledger.status()["groups"] == {}


@pytest.mark.parametrize("opened_before", [False, True])
def test_group_of_an_older_database_that_no_worker_can_read_is_dropped(play: Play, *, opened_before: bool) -> None:
    """An earlier release took such a group, and refused each request for leases that met it."""
    game = play()
    first, wrong, last = game.add(3)
    session = game.join("a", slots=32)
    kept = game.lease(session, 6 if opened_before else 1)
    game.ledger.give_back(session, [one.lease for one in kept])
    with game.store.transaction() as conn:
        body = conn.scalar(select(db.groups.c.body).where(db.groups.c.id == wrong))
        bad = dataclasses.replace(Group.from_bytes(body), max_tokens=0)
        conn.execute(update(db.groups).where(db.groups.c.id == wrong).values(body=bad.to_bytes()))
    leases = [*game.lease(session, 9), *game.lease(session, 9)]
    assert {one.job.id for one in leases} == {first, last}
    assert len(leases) == 6
    assert game.ledger.group(wrong).reason == "unreadable"
    check_counts(dump(game.store), game.ledger)
