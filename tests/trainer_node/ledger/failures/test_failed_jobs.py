"""Jobs that no worker can play: leases come back for the job's own fault, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import select

from p2pcast.ground.errors import RefusedError
from p2pcast.ledger_api.trainer_api import GroupRow
from p2pcast.ledger_api.worker_api import Leased
from p2pcast.rollouts.job import Group
from p2pcast.rollouts.return_reason import Returned, ReturnReason
from tests.trainer_node.ledger.crash_run import TASK_HASH, group
from tests.trainer_node.ledger.ledger_game import Game
from tests.trainer_node.ledger.ledger_invariants import dump
from trainer_node.ledger import ledger_retention
from trainer_node.ledger.batch_transitions import MOST_UNPLAYABLE
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger_rows import MAX_FAILURES, MAX_REJECTED, OTHERS_FIRST_S
from trainer_node.ledger.prompts.prompting import PassedPrompts

Play = Callable[..., Game]
FAILED = Returned(ReturnReason.FAILED, "ValueError: no such card")
AT_FAULT = [reason for reason in ReturnReason if reason.fails_job]


def give_back(game: Game, session: bytes, leases: list[Leased], why: Returned | None = FAILED) -> None:
    reasons = {} if why is None else {one.lease: why for one in leases}
    game.ledger.give_back(session, [one.lease for one in leases], reasons)


@pytest.mark.parametrize("reason", AT_FAULT)
def test_a_job_that_three_workers_cannot_play_is_rejected_with_its_group(play: Play, reason: ReturnReason) -> None:
    game = play()
    told = game.told
    bad, good = group(901), group(902)
    source = "prompt 12 (problems.jsonl, row 13) of seed 7"
    game.ledger.add_prompts(7, PassedPrompts(0, 2, [bad, good], sources={bad.id: source}))
    sessions = [game.join(name) for name in "abc"]
    for session in sessions:
        (lease,) = game.lease(session, 1)
        assert (lease.job.id, lease.job.index) == (bad.id, 0)
        give_back(game, session, [lease], Returned(reason, "the prompt has 5000 tokens"))
    assert game.ledger.group(bad.id) == GroupRow(bad.id, "dropped", "unplayable prompt", [])
    status = game.ledger.status()
    assert (status["jobs"]["rejected"], status["jobs"]["cancelled"]) == (1, 2)
    assert status["rejected_jobs"] == {reason.value: 1}
    assert told["job_rejected", source, reason.value, "the prompt has 5000 tokens"] == 1
    assert sum(count for (kind, *_), count in told.items() if kind == "leases_returned") == 3
    assert {row["blamed"] for row in game.ledger.workers()} == {0}
    assert {one.job.id for one in game.lease(sessions[0])} == {good.id}


def test_a_group_that_a_trainer_added_is_named_by_its_id(play: Play) -> None:
    game = play()
    told = game.told
    (bad,) = game.add(1)
    for name in "abc":
        session = game.join(name)
        give_back(game, session, game.lease(session, 1))
    assert told["job_rejected", f"group {bad.hex()}", "failed play", FAILED.detail] == 1


def test_one_worker_that_lies_rejects_no_job_while_another_is_there(play: Play) -> None:
    game = play()
    game.add(1)
    liar, other = game.join("liar"), game.join("other")
    for _ in range(MAX_REJECTED - 1):
        (one,) = game.lease(liar, 1)
        give_back(game, liar, [one])
        game.source_s += OTHERS_FIRST_S
        game.ledger.heartbeat(other, {})
    assert "rejected" not in game.ledger.status()["jobs"]
    game.hand_in(other, game.lease(other))
    assert game.ledger.status()["groups"] == {"complete": 1}


def test_three_returns_of_two_workers_reject_a_job_while_others_are_there(play: Play) -> None:
    """The others may be of an older release, and give no reasons."""
    game = play()
    (bad,) = game.add(1)
    first, second, old = (game.join(name) for name in ("a", "b", "old"))
    for session, why in ((first, FAILED), (second, FAILED), (old, None), (first, FAILED)):
        assert game.state(bad) != "dropped"
        give_back(game, session, game.lease(session, 1), why)
    assert game.ledger.group(bad).reason == "unplayable prompt"


def test_three_returns_of_two_workers_for_any_jobs_of_a_group_end_the_group(play: Play) -> None:
    """All jobs of a group have one prompt."""
    game = play()
    (bad,) = game.add(1)
    first, second, _ = (game.join(name) for name in ("a", "b", "other"))
    held = {session: game.lease(session, 1) for session in (first, second)}
    (last,) = game.lease(first, 1)
    assert len({one.job.index for leases in (*held.values(), [last]) for one in leases}) == 3
    for session, leases in held.items():
        give_back(game, session, leases)
    assert game.state(bad) == "open"
    give_back(game, first, [last])
    assert game.ledger.group(bad).reason == "unplayable prompt"
    assert game.ledger.status()["jobs"] == {"rejected": 1, "cancelled": 2}


def test_returns_of_one_worker_end_no_group_while_another_is_there(play: Play) -> None:
    game = play()
    (kept,) = game.add(1)
    liar, other = game.join("liar"), game.join("other")
    give_back(game, liar, game.lease(liar, 3))
    game.hand_in(other, game.lease(other))
    assert game.state(kept) == "complete"


def test_names_of_one_certificate_count_as_one_worker(play: Play) -> None:
    game = play()
    game.add(1)
    other = game.join("other")
    for name in ("x", "y", "z"):
        session = game.join(name, caller="liar")
        for lease in game.lease(session, 1):
            give_back(game, session, [lease])
        game.source_s += OTHERS_FIRST_S
        game.ledger.heartbeat(other, {})
    assert "rejected" not in game.ledger.status()["jobs"]


def test_a_job_that_one_worker_has_failed_goes_to_another_first(play: Play) -> None:
    game = play()
    game.add(1)
    one, other = game.join("a"), game.join("b")
    (failed,) = game.lease(one, 1)
    give_back(game, one, [failed])
    assert failed.job.job not in {each.job.job for each in game.lease(one)}
    assert failed.job.job in {each.job.job for each in game.lease(other)}


def test_a_worker_that_is_alone_rejects_a_job_at_the_third_failure(play: Play) -> None:
    game = play()
    (bad,) = game.add(1)
    alone = game.join("alone")
    for _ in range(MAX_FAILURES):
        assert game.state(bad) != "dropped"
        (lease,) = game.lease(alone, 1)
        give_back(game, alone, [lease])
    assert game.state(bad) == "dropped"


@pytest.mark.parametrize("reason", [None, *(reason for reason in ReturnReason if not reason.fails_job)])
def test_returns_for_other_reasons_fail_no_job(play: Play, reason: ReturnReason | None) -> None:
    game = play()
    (kept,) = game.add(1)
    sessions = [game.join(name) for name in "abc"]
    for _ in range(MAX_REJECTED):
        for session in sessions:
            (lease,) = game.lease(session, 1)
            give_back(game, session, [lease], None if reason is None else Returned(reason))
    assert game.state(kept) == "open"
    assert all(row.failures == 0 for row in dump(game.store)["jobs"])
    game.hand_in(sessions[0], game.lease(sessions[0]))
    assert game.state(kept) == "complete"


def test_a_group_with_an_accepted_result_goes_on_without_the_rejected_job(play: Play) -> None:
    game = play()
    (kept,) = game.add(1)
    sessions = [game.join(name) for name in "abc"]
    leases = game.lease(sessions[0], 3)
    game.hand_in(sessions[0], leases[:1])
    give_back(game, sessions[0], leases[1:2])
    for session in sessions[1:]:
        give_back(game, session, game.lease(session, 1))
    assert game.ledger.status()["jobs"] == {"accepted": 1, "rejected": 1, "leased": 1}
    assert game.state(kept) == "open"
    game.hand_in(sessions[0], leases[2:])
    assert game.state(kept) == "short"


def test_all_jobs_of_a_group_may_come_back_in_one_request(play: Play) -> None:
    game = play()
    (bad,) = game.add(1)
    for name in "abc":
        session = game.join(name)
        give_back(game, session, game.lease(session, 3))
    assert game.state(bad) == "dropped"
    assert game.ledger.status()["jobs"] == {"rejected": 1, "cancelled": 2}


def test_the_fault_of_a_job_counts_once_after_its_lease_too(play: Play) -> None:
    """A play that hangs is ended long after its lease."""
    game = play()
    (bad,) = game.add(1)
    sessions = [game.join(name) for name in "abc"]
    hung: list[tuple[bytes, list[Leased]]] = []
    for session in sessions:
        hung.append((session, game.lease(session, 1)))
        while not game.ledger.expire():
            game.source_s += 31
    for session, leases in hung[:2]:
        for _ in range(3):
            give_back(game, session, leases, Returned(ReturnReason.HUNG))
    assert max(row.failures for row in dump(game.store)["jobs"]) == 2
    assert game.state(bad) == "open"
    give_back(game, *hung[2], Returned(ReturnReason.HUNG))
    assert game.state(bad) == "dropped"


def test_a_job_that_another_worker_plays_now_is_not_rejected_for_earlier_leases(play: Play) -> None:
    game = play()
    (kept,) = game.add(1)
    sessions = [game.join(name) for name in "abcd"]
    hung: list[tuple[bytes, list[Leased]]] = []
    for session in sessions[:3]:
        hung.append((session, game.lease(session, 1)))
        while not game.ledger.expire():
            game.source_s += 31
    played = game.lease(sessions[3], 3)
    for session, leases in hung:
        give_back(game, session, leases, Returned(ReturnReason.HUNG))
    game.hand_in(sessions[3], played)
    assert game.state(kept) == "complete"


def test_rejected_results_and_returns_count_together(play: Play) -> None:
    game = play()
    (bad,) = game.add(1)
    first, second, third = (game.join(name) for name in "abc")
    assert game.hand_in(first, game.lease(first, 1), reward=99)[0].reason == "malformed"
    for session in (second, third):
        give_back(game, session, game.lease(session, 1))
    assert game.state(bad) == "dropped"


def test_an_evaluation_of_which_no_job_can_be_played_ends(play: Play) -> None:
    game = play()
    (bad,) = game.add(1, purpose="evaluate", pinned=game.version)
    for name in "abc":
        session = game.join(name)
        give_back(game, session, game.lease(session, 1))
    assert (game.state(bad), game.ledger.group(bad).reason) == ("dropped", "unplayable prompt")


def test_a_run_goes_on_although_one_prompt_in_eight_cannot_be_played(play: Play) -> None:
    """One worker, which gives such jobs back each time."""
    game = play()
    session = game.join("alone", slots=32)
    bad: set[bytes] = set()
    number = 0
    while game.step < 12:
        if game.ledger.prompts(0).waiting < 8:
            added = [group(2000 + number + n) for n in range(8)]
            bad.add(added[0].id)
            number += 8
            game.ledger.add_groups(added)
        leases = game.lease(session, 8)
        failed = [one for one in leases if one.job.id in bad]
        give_back(game, session, failed)
        game.hand_in(session, [one for one in leases if one not in failed])
        assert leases, "the run stands still"
        if game.take().batch is not None:
            game.learn()
    status = game.ledger.status()
    assert status["jobs"]["rejected"] >= 3
    assert not [one for one in bad if game.state(one) not in ("dropped", "open", "waiting")]


def test_groups_that_cannot_be_played_end_no_run_before_there_are_many(play: Play) -> None:
    """A learner sees an error when all groups of a batch have equal rewards; these have none."""
    game = play(staleness=6)
    session = game.join("alone", slots=32)
    for _ in range(MOST_UNPLAYABLE):
        game.add(1)
        assert game.take().batch is None
        for _ in range(MAX_FAILURES):
            give_back(game, session, game.lease(session, 1))
    with pytest.raises(RefusedError, match=r"none of the 64 groups .* step 0 .*unplayable prompt: 64"):
        game.take()


# -- the database


def test_a_database_without_the_tables_of_failures_opens(opened: Callable[[], LedgerStore]) -> None:
    game = Game(opened)
    (bad,) = game.add(1)
    with game.store.transaction() as conn:
        db.job_returns.drop(conn)
        db.group_sources.drop(conn)
    game.ledger.close()
    game.start()
    for name in "abc":
        session = game.join(name)
        give_back(game, session, game.lease(session, 1))
    assert game.state(bad) == "dropped"
    game.ledger.close()


def test_rows_of_failures_go_with_their_groups(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older release deletes groups and jobs alone."""
    game = play()
    bad = Group.from_bytes(group(901).to_bytes())
    game.ledger.add_prompts(7, PassedPrompts(0, 1, [bad], sources={bad.id: "prompt 0 of seed 7"}))
    for name in "abc":
        session = game.join(name)
        give_back(game, session, game.lease(session, 1))
    rows = dump(game.store)
    assert (len(rows["job_returns"]), len(rows["group_sources"])) == (3, 1)
    monkeypatch.setattr(ledger_retention, "KEPT_GROUPS", 0)
    game.ledger.prune()
    with game.store.reading() as conn:
        assert conn.execute(select(db.groups)).all() == []
    rows = dump(game.store)
    assert rows["job_returns"] == rows["group_sources"] == []


def test_the_same_groups_of_a_trainer_and_a_prompt_have_one_source(play: Play) -> None:
    game = play()
    one = group(901)
    game.ledger.add_groups([one])
    for seed in (7, 8):
        game.ledger.add_prompts(seed, PassedPrompts(0, 1, [one], sources={one.id: f"prompt 0 of seed {seed}"}))
    (row,) = dump(game.store)["group_sources"]
    assert row.source == "prompt 0 of seed 7"
    assert one.task_hash == TASK_HASH
