"""Trusted rewards: which of them are replayed, and what a wrong one ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from p2pcast.ledger_api.worker_api import Leased, Registration, Settled
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import Result
from tests.trainer_node.ledger.crash_run import TASK_HASH
from tests.trainer_node.ledger.ledger_game import Game, groups_of, last_token, sample
from tests.trainer_node.ledger.ledger_invariants import check_rows, dump
from trainer_node.ledger.acceptance import Reason, Rejection
from trainer_node.ledger.audits.replaying import NEW_WORKER, ReplayEnded
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger.ledger_rows import BEARER, Trust

SHARE = 0.25
HANGS = Rejection(Reason.UNSCORED, "the check took longer than 10 s")


class Trusting(Game):
    """``sampled``: whether draws choose results. ``draws``: how many there were. ``learnt``: batches."""

    trust = Trust(SHARE, replays=True)
    sampled = False
    draws = 0

    def __init__(self, opened: Callable[[], LedgerStore]) -> None:
        super().__init__(opened)
        self.learnt: list[bytes] = []

    def start(self) -> None:
        self.policy = dataclasses.replace(self.policy, trust=self.trust)
        self.store = self._opened()
        self.ledger = Ledger(self.store, self.policy, now=lambda: self.source_s, draw=self._draw)

    def _draw(self) -> float:
        self.draws += 1
        return SHARE / 2 if self.sampled else SHARE

    def restart(self) -> None:
        self.ledger.close()
        self.start()

    def play(self, session: bytes, leases: Sequence[Leased], *, lie: bool = False) -> list[Settled]:
        def stated(job: Job, result: Result) -> float:
            return last_token(job, result) + lie

        done = [sample(one, self.version, one.job.index % 2) for one in leases]
        return self.ledger.results(session, done, stated)

    def replay(self, found: Rejection | None = None) -> list[ReplayEnded]:
        """All that is due. ``found``: instead of the true reward."""
        ended = []
        while due := self.ledger.due_replays(8):
            for one in due:
                read = self.ledger.replay(one)
                assert read is not None
                ended.append(self.ledger.replayed(one, last_token(*read) if found is None else found))
        return [one for one in ended if one is not None]

    def known(self, name: str, caller: str | None = None) -> bytes:
        """A worker whose results are not all replayed any more."""
        session = self.join(name, caller=caller)
        while self.worker(name)["replays"] < NEW_WORKER:
            self.add(1)
            self.play(session, self.lease(session, 3))
            self.replay()
        return session

    def learn_all(self) -> None:
        while self.take().batch is not None:
            self.learnt.append(self.learn())

    def worker(self, name: str) -> dict[str, Any]:
        (row,) = [row for row in self.ledger.workers() if row["name"] == name]
        return row

    def due(self) -> int:
        return len(self.ledger.due_replays(1000))

    def reasons(self) -> dict[str, int]:
        return dict(self.ledger.status()["rejections"])


@pytest.fixture
def game(opened: Callable[[], LedgerStore]) -> Iterator[Trusting]:
    made = Trusting(opened)
    yield made
    check_rows(dump(made.store))
    made.ledger.close()


def test_rewards_of_a_new_worker_are_replayed_before_training(game: Trusting) -> None:
    session = game.join("a")
    groups = game.add(2)
    assert {one.verdict for one in game.play(session, game.lease(session))} == {"accepted"}
    assert game.due() == 6
    assert game.take().batch is None
    assert {(one.found, one.rejected) for one in game.replay()} == {("agrees", 0)}
    assert groups_of(game.take()) == groups


def test_a_share_of_a_known_workers_rewards_is_replayed(game: Trusting) -> None:
    session = game.known("a")
    game.add(2)
    game.play(session, game.lease(session, 3))
    assert game.due() == 0
    game.sampled = True
    game.play(session, game.lease(session, 3))
    assert game.due() == 3


def test_a_result_that_is_sent_again_is_not_drawn_again(game: Trusting) -> None:
    session = game.known("a")
    game.add(1)
    leases = game.lease(session, 3)
    game.play(session, leases)
    before, game.sampled = game.draws, True
    game.play(session, leases)
    game.restart()
    game.play(session, leases)
    assert (game.draws, game.due()) == (before, 0)


def test_one_wrong_reward_ends_all_untrained_results_of_its_worker(game: Trusting) -> None:
    liar, honest = game.known("liar"), game.known("honest")
    game.learn_all()
    groups = game.add(3)
    game.play(liar, game.lease(liar, 3), lie=True)
    game.play(honest, game.lease(honest, 3))
    game.sampled = True
    game.play(liar, game.lease(liar, 1), lie=True)
    before = game.reasons()
    (ended,) = game.replay()
    assert ended == ("liar", "disagrees", 4)
    assert [game.state(group) for group in groups] == ["open", "complete", "open"]
    assert {name: count - before.get(name, 0) for name, count in game.reasons().items()} == {
        "forged": 1, "untrusted worker": 3,
    }  # fmt: skip
    assert (game.worker("liar")["false_rewards"], game.worker("liar")["blamed"]) == (1, 1)
    assert game.worker("honest")["false_rewards"] == 0


def test_a_worker_that_lied_has_each_result_replayed(game: Trusting) -> None:
    session = game.known("a")
    game.sampled = True
    game.add(2)
    game.play(session, game.lease(session, 1), lie=True)
    game.replay()
    game.sampled = False
    leases = game.lease(session, 2)
    game.play(session, leases[:1], lie=True)
    game.play(session, leases[1:])
    assert sorted(one.found for one in game.replay()) == ["agrees", "disagrees"]


def test_another_name_of_a_certificate_is_no_fresh_start(game: Trusting) -> None:
    first, second = game.known("a", "certificate"), game.known("b", "certificate")
    game.learn_all()
    game.add(2)
    game.play(second, game.lease(second, 3), lie=True)
    game.sampled = True
    game.play(first, game.lease(first, 1), lie=True)
    assert [one.rejected for one in game.replay()] == [4]
    game.sampled = False
    game.play(second, game.lease(second, 1))
    third = game.join("c", caller="certificate")
    game.play(third, game.lease(third, 1))
    assert game.due() == 2


def test_another_name_with_a_bearer_token_begins_with_replays(game: Trusting) -> None:
    game.known("a", BEARER)
    session = game.ledger.register(BEARER, Registration("b", 8, "sums", TASK_HASH)).session
    game.add(1)
    game.play(session, game.lease(session, 3), lie=True)
    assert game.due() == 3


def test_a_restart_replays_due_results(game: Trusting) -> None:
    session = game.known("a")
    game.sampled = True
    game.add(1)
    game.play(session, game.lease(session, 1), lie=True)
    game.restart()
    assert [one.found for one in game.replay()] == ["disagrees"]
    game.restart()
    assert game.replay() == []
    game.play(session, game.lease(session, 1))
    assert game.due() == 1, "the worker is remembered"


def test_results_of_a_taken_batch_end_when_the_batch_is_reopened(game: Trusting) -> None:
    session = game.known("a")
    game.learn_all()
    taken_groups = game.add(2)
    game.play(session, game.lease(session), lie=True)
    taken = game.take()
    assert groups_of(taken) == taken_groups
    game.sampled = True
    game.add(1)
    game.play(session, game.lease(session, 1), lie=True)
    assert [one.rejected for one in game.replay()] == [1]
    assert game.take() == taken, "the learner may be training it"
    game.branch += 1
    game.epoch = game.ledger.resume(game.branch, game.step, None, game.learnt)
    assert [game.state(group) for group in taken_groups] == ["open", "open"]
    assert game.take().batch is None


def test_a_replay_that_hangs_ends_its_result_and_costs_trust(game: Trusting) -> None:
    session = game.known("a")
    game.sampled = True
    (group,) = game.add(1)
    game.play(session, game.lease(session, 3))
    assert {(one.found, one.rejected) for one in game.replay(HANGS)} == {("fails", 1)}
    assert (game.state(group), game.worker("a")["blamed"]) == ("open", 0)
    game.sampled = False
    game.source_s += 60
    game.play(session, game.lease(session, 3))
    assert game.due() == 3
    for _ in range(NEW_WORKER):
        game.add(1)
        game.play(session, game.lease(session, 3))
        game.replay()
    game.add(1)
    game.play(session, game.lease(session, 3))
    assert game.due() == 0


def test_a_job_whose_replays_always_hang_ends(game: Trusting) -> None:
    (group,) = game.add(1)
    sessions = [game.join(name) for name in "abc"]
    rounds = 0
    while game.state(group) == "open" or game.state(group) == "waiting":
        rounds += 1
        assert rounds < 50
        for session in sessions:
            game.play(session, game.lease(session, 3))
        game.replay(HANGS)
    assert game.state(group) == "dropped"


def test_a_group_that_cannot_wait_is_trained_without_due_results(game: Trusting) -> None:
    session, other = game.known("a"), game.known("b")
    game.learn_all()
    (late,) = game.add(1)
    leases = game.lease(session, 3)
    game.play(session, leases[:2])
    game.sampled = True
    game.play(session, leases[2:], lie=True)
    game.sampled = False
    for _ in range(3):
        game.whole_step(other)
    game.add(2)
    game.play(other, game.lease(other))
    taken = game.take()
    assert late in groups_of(taken)
    assert len(taken.batch.members[0].results) == 2  # type: ignore[union-attr]
    assert game.due() == 1
    assert [(one.worker, one.found) for one in game.replay()] == [("a", "disagrees")]
    assert game.take() == taken


def test_a_forged_play_counts_as_a_wrong_reward(game: Trusting) -> None:
    session = game.known("a")
    game.add(1)
    game.play(session, game.lease(session, 2))
    game.sampled = True
    game.play(session, game.lease(session, 1))
    (ended,) = game.replay(Rejection(Reason.FORGED, "not mine"))
    assert ended.found == "disagrees"
    assert ended.rejected >= 3


def test_a_damaged_result_costs_no_trust(game: Trusting) -> None:
    session = game.known("a")
    game.sampled = True
    game.add(1)
    game.play(session, game.lease(session, 1))
    game.replay(Rejection(Reason.DAMAGED, "torn"))
    assert game.worker("a")["failed_replays"] == 0
    assert game.reasons() == {"damaged": 1}


def test_replays_come_in_turns_of_the_workers(game: Trusting) -> None:
    game.add(4)
    for name, count in (("a", 6), ("b", 2), ("c", 1)):
        session = game.join(name)
        game.play(session, game.lease(session, count))
    assert [one.caller for one in game.ledger.due_replays(6)] == ["a", "b", "c", "a", "b", "a"]


class Unrepeatable(Trusting):
    trust = Trust(SHARE, replays=False)


def test_nothing_of_an_unrepeatable_task_is_replayed(opened: Callable[[], LedgerStore]) -> None:
    game = Unrepeatable(opened)
    session = game.join("a")
    game.add(2)
    game.play(session, game.lease(session))
    assert game.due() == 0
    assert game.take().batch is not None
    game.ledger.close()


def test_rewards_of_an_evaluation_are_replayed_too(game: Trusting) -> None:
    session = game.join("a")
    (group,) = game.add(1, purpose="evaluate", pinned=game.version)
    game.play(session, game.lease(session, 3), lie=True)
    assert game.state(group) == "complete"
    game.replay()
    assert game.state(group) == "open"
