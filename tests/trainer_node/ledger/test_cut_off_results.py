"""Groups are judged by what the learner pays truncated results, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from p2pcast.ground.errors import RefusedError
from p2pcast.ledger_api.worker_api import Leased
from p2pcast.rollouts.overlong import Overlong
from p2pcast.rollouts.result import Result
from tests.trainer_node.ledger.ledger_game import Game, groups_of, last_token, sample
from tests.trainer_node.ledger.ledger_invariants import dump
from tests.trainer_node.ledger.test_damaged_bodies import damage
from trainer_node.ledger import ledger_retention
from trainer_node.ledger.database import ledger_schema as db
from trainer_node.ledger.database.body_segments import Place

CUT = -1
"""In place of a reward: a truncated result, with reward 1."""


def check_marks(game: Game) -> None:
    """Assert that the marked results are the results whose bodies say so."""
    rows = dump(game.store)
    marks = {(row.job_id, row.lease_id) for row in rows["cut_off_results"]}
    for row in rows["results"]:
        if row.segment is not None:
            result = Result.from_bytes(game.ledger.body(Place(row.segment, row.offset, row.length)))
            assert ((row.job_id, row.lease_id) in marks) == (result.stop == "length")


def play(game: Game, session: bytes, leases: Sequence[Leased], rewards: Sequence[int]) -> None:
    """``rewards``: by the number of the job in its group."""
    done = []
    for one in leases:
        reward = rewards[one.job.index]
        stop = "length" if reward == CUT else "end"
        done.append(sample(one, game.version, 1 if reward == CUT else reward, stop=stop))
    assert {one.verdict for one in game.ledger.results(session, done, last_token)} == {"accepted"}


def groups(game: Game, session: bytes, *rewards: Sequence[int]) -> list[bytes]:
    added = []
    for each in rewards:
        added += game.add(1)
        play(game, session, game.lease(session, 3), each)
    return added


EQUAL, CUT_EQUAL, DIFFER, PAID_EQUAL = (1, 1, 1), (1, CUT, 1), (0, 1, 1), (0, CUT, 0)


@pytest.mark.parametrize(
    ("overlong", "used", "rewards"),
    [
        ("keep", (2, 3), [[0, 1, 1], [0, 1, 0]]),
        ("mask", (2, 3), [[0, 1, 1], [0, 1, 0]]),
        ("zero", (1, 2), [[1, 1, 1], [0, 1, 1]]),
    ],
)
def test_a_batch_has_the_groups_whose_paid_rewards_differ(
    game: Game, overlong: Overlong, used: tuple[int, ...], rewards: list[list[float]]
) -> None:
    added = groups(game, game.join("a"), EQUAL, CUT_EQUAL, DIFFER, PAID_EQUAL)
    taken = game.take(overlong)
    assert groups_of(taken) == [added[number] for number in used]
    assert {game.ledger.group(added[number]).reason for number in {0, 1, 2, 3} - set(used)} == {"equal rewards"}
    assert taken.batch is not None
    stated = [[one.reward for one in member.results] for member in taken.batch.members]
    assert stated == rewards, "rewards are stated as they are"
    assert game.take("keep") == game.take("zero") == taken, "a batch that was cut stays"
    check_marks(game)


def test_a_group_whose_results_were_all_cut_off_has_equal_rewards(game: Game) -> None:
    (all_cut,) = groups(game, game.join("a"), (CUT, CUT, CUT))
    assert game.take("zero").batch is None
    assert game.ledger.group(all_cut).reason == "equal rewards"


def test_a_run_whose_answers_are_all_paid_equally_ends_with_the_reason(game: Game) -> None:
    groups(game, game.join("a"), *[PAID_EQUAL] * 6)
    with pytest.raises(RefusedError, match="equal rewards: 6"):
        game.take("zero")


def test_a_result_that_counts_no_more_leaves_no_mark_on_the_next_one_of_its_job(game: Game, tmp_path: Path) -> None:
    session = game.join("a")
    added = groups(game, session, (CUT, 1, 1), DIFFER)
    taken = game.take("zero")
    assert groups_of(taken) == added
    assert taken.batch is not None
    damage(tmp_path / "state", taken.batch, 0)
    assert game.ledger.reopen_damaged(taken.batch) == 1
    again = game.lease(session, 1)
    assert [one.job.job for one in again] == [row.job_id for row in dump(game.store)["cut_off_results"]]
    play(game, session, again, EQUAL)
    check_marks(game)
    assert game.take("zero").batch is None
    assert game.ledger.group(added[0]).reason == "equal rewards"


def test_a_result_that_is_refused_has_no_mark(game: Game) -> None:
    session = game.join("a")
    game.add(1)
    (lease, *_) = game.lease(session)
    done = sample(lease, game.version, 99, stop="length")
    assert game.ledger.results(session, [done], last_token)[0].verdict == "rejected"
    assert dump(game.store)["cut_off_results"] == []


# -- the database


def test_a_database_without_the_table_opens_and_its_results_count_as_whole(game: Game) -> None:
    session = game.join("a")
    early = groups(game, session, CUT_EQUAL)
    with game.store.transaction() as conn:
        db.cut_off_results.drop(conn)
    game.ledger.close()
    game.start()
    late = groups(game, session, CUT_EQUAL, CUT_EQUAL)
    assert groups_of(game.take("zero")) == late
    assert game.ledger.group(early[0]).reason == "equal rewards"


def test_marks_go_with_their_results(game: Game, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older release deletes results and jobs alone."""
    groups(game, game.join("a"), (CUT, CUT, CUT), PAID_EQUAL)
    assert game.take("zero").batch is None
    assert len(dump(game.store)["cut_off_results"]) == 4
    monkeypatch.setattr(ledger_retention, "KEPT_GROUPS", 0)
    game.ledger.prune()
    rows = dump(game.store)
    assert rows["groups"] == rows["results"] == rows["cut_off_results"] == []
