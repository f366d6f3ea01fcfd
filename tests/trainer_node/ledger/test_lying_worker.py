"""One worker that lies costs the others nothing but its share: each trick alone, then all in a simulated run."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from p2pcast.ground.errors import RefusedError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.worker_api import Leased, Registration
from tests.trainer_node.ledger.crash_run import TASK_HASH, group
from tests.trainer_node.ledger.ledger_game import ZERO, Game, last_token, sample
from tests.trainer_node.ledger.ledger_invariants import check_counts, check_rows, dump
from trainer_node.ledger.database.ledger_store import LedgerStore
from trainer_node.ledger.ledger_rows import MAX_BLAMED, MAX_UNKNOWN, OTHERS_FIRST_S
from trainer_node.ledger.staleness_rule import StalenessBounds

Play = Callable[..., Game]


def blamed(game: Game) -> dict[str, int]:
    return {row["name"]: row["blamed"] for row in game.ledger.workers()}


# -- results that make a group end


def test_old_version_of_the_leases_own_branch_counts_for_nothing(play: Play) -> None:
    """An engine that served version 2 when the lease began may be back at version 0: a switch has failed. But neither
    is a result of it accepted, nor a group of others dropped.
    """
    game = play(staleness=6)
    honest = game.join("honest")
    for _ in range(2):
        game.whole_step(honest)
    ids = game.add(8)
    kept = game.lease(honest, 2)
    back = game.join("back", slots=1)
    for _ in range(2 * MAX_BLAMED):
        (one,) = game.lease(back, 1)
        settled = game.hand_in(back, [one], ZERO)[0]
        assert (settled.reason, settled.detail) == ("stale", "sampled by 0.0, after the engine had served 0.2")
        game.source_s += OTHERS_FIRST_S
    assert blamed(game)["back"] == 0
    assert {game.state(each) for each in ids} <= {"open", "waiting"}
    assert game.hand_in(honest, kept)[0].verdict == "accepted"
    (own,) = game.lease(back, 1, ZERO)
    assert game.hand_in(back, [own], ZERO)[0].verdict == "accepted", "the worker names its engine's version again"


def test_one_caller_rejects_no_job(play: Play) -> None:
    game = play(staleness=3)
    game.add(1)
    liar, other = game.join("liar"), game.join("other")
    for _ in range(4):
        (one,) = game.lease(liar, 1)
        assert game.hand_in(liar, [one], reward=99)[0].reason == "malformed"
        game.source_s += OTHERS_FIRST_S
        game.ledger.heartbeat(other, {})
    assert "rejected" not in game.ledger.status()["jobs"]
    game.hand_in(other, game.lease(other))
    assert game.ledger.status()["groups"] == {"complete": 1}


def test_failed_job_goes_to_another_caller_first(play: Play) -> None:
    game = play()
    game.add(1)
    liar, other = game.join("liar"), game.join("other")
    (failed,) = game.lease(liar, 1)
    game.hand_in(liar, [failed], reward=99)
    assert failed.job.job not in {one.job.job for one in game.lease(liar)}
    assert failed.job.job in {one.job.job for one in game.lease(other)}


def test_worker_that_is_alone_plays_its_failed_job_again(play: Play) -> None:
    game = play()
    game.add(1)
    alone = game.join("alone")
    (failed,) = game.lease(alone, 1)
    game.hand_in(alone, [failed], reward=99)
    assert failed.job.job in {one.job.job for one in game.lease(alone)}


def test_absent_others_do_not_keep_a_failed_job_for_ever(play: Play) -> None:
    game = play()
    game.add(1)
    one, idle = game.join("a"), game.join("idle")
    (failed,) = game.lease(one, 1)
    game.hand_in(one, [failed], reward=99)
    for _ in range(4):
        game.source_s += OTHERS_FIRST_S / 3
        game.ledger.heartbeat(idle, {})
    assert failed.job.job in {each.job.job for each in game.lease(one)}


def test_invented_versions_are_blamed_after_a_few(play: Play) -> None:
    game = play(asks_hub=True, staleness=6)
    game.add(12)
    liar = game.join("liar", slots=32)
    for number in range(MAX_UNKNOWN + MAX_BLAMED):
        assert blamed(game)["liar"] == max(0, number - MAX_UNKNOWN)
        one = game.lease(liar, 1)
        assert (
            game.ledger.results(liar, [sample(one[0], Version(0, 9999), 0)], last_token)[0].reason == "unknown version"
        )
    with pytest.raises(RefusedError, match="malformed or forged"):
        game.lease(liar, 1)


def test_versions_that_no_hub_was_asked_for_are_not_blamed(play: Play) -> None:
    """A trainer may state a version later than an engine serves it."""
    game = play(staleness=6)
    game.add(12)
    session = game.join("a", slots=32)
    for _ in range(2 * MAX_UNKNOWN):
        one = game.lease(session, 1)
        game.ledger.results(session, [sample(one[0], Version(0, 1), 0)], last_token)
    assert blamed(game)["a"] == 0


# -- leases that are kept


def test_jobs_that_a_worker_keeps_are_played_by_others_while_the_learner_waits(play: Play) -> None:
    game = play(staleness=1)
    liar = game.join("liar", slots=16, device_class="x")
    game.add(8)
    (first, *rest) = game.lease(liar, 6)
    game.ledger.give_back(liar, [one.lease for one in rest])
    game.source_s += 29
    assert game.ledger.results(liar, [sample(first, game.version, 0, tokens=2)], last_token)[0].verdict == "accepted"
    kept: dict[bytes, Leased] = {}
    for one in game.lease(liar, 16):
        kept.setdefault(one.job.id, one)
    honest = game.join("honest", slots=64)
    waited_s = 0
    while (taken := game.take()).batch is None:
        game.source_s += 2
        waited_s += 2
        game.ledger.heartbeat(liar, {one.lease: waited_s for one in kept.values()})
        game.hand_in(honest, game.lease(honest, 6))
        assert waited_s < 200, "four times 29 s, and the time in which others play first"
    assert not taken.finished
    late = game.hand_in(liar, list(kept.values()))
    assert {one.reason for one in late} <= {None, "duplicate"}


def test_slowest_rate_counts_down_to_a_tenth_of_the_median_of_all_callers(play: Play) -> None:
    game = play(staleness=6)
    game.add(8)
    for name in ("a", "b"):
        session = game.join(name)
        leases = game.lease(session, 3)
        game.source_s += 1
        game.hand_in(session, leases)
    liar = game.join("liar", device_class="x")
    leases = game.lease(liar, 1)
    game.source_s += 25
    game.ledger.results(liar, [sample(leases[0], game.version, 0, tokens=2)], last_token)
    (one,) = game.lease(liar, 1)
    # Two tokens a second are the median: 16 tokens at 0.2 a second.
    assert one.latest_in_s == pytest.approx(80)


# -- shares


def test_fabricated_throughput_keeps_no_jobs_from_others(tmp_path: Path) -> None:
    game = Game(lambda: LedgerStore(tmp_path), staleness=3)
    game.policy = dataclasses.replace(game.policy, bounds=StalenessBounds(3, 64, None))
    game.ledger._policy = game.policy
    for _ in range(8):
        game.add(30)
    honest, liar = game.join("honest", slots=64), game.join("liar", slots=4096)
    game.source_s += 6
    game.hand_in(honest, game.lease(honest, 6))
    game.ledger.results(liar, [sample(one, game.version, 0, tokens=2000) for one in game.lease(liar, 1)], last_token)
    done = 0
    for _ in range(40):
        game.source_s += 0.5
        leases = game.lease(honest, 32)
        done += len(leases)
        game.hand_in(honest, leases)
        # The liar takes one job each time, and could take thousands.
        one = game.lease(liar, 1)
        game.ledger.results(liar, [sample(each, game.version, 0, tokens=2000) for each in one], last_token)
    assert game.ledger.status()["jobs"].get("open", 0) == 0, "the pace rule alone bounds the honest worker"
    assert done > 600
    game.ledger.close()


# -- workers that begin again


def test_restarted_worker_gets_leases_at_once(play: Play) -> None:
    game = play()
    first = game.join("a", slots=4)
    game.add(2)
    kept, *lost = game.lease(first, 4)
    one = Registration("a", 4, "sums", TASK_HASH)
    again = game.ledger.register("a", replace(one, leases=[kept.lease])).session
    assert game.ledger.heartbeat(again, {kept.lease: 1})[0].state == "held"
    assert {each.state for each in game.ledger.heartbeat(again, {each.lease: 1 for each in lost})} == {"abort"}
    assert len(game.lease(again, 4)) == 3
    game.ledger.register("a", one)
    assert game.ledger.status()["leases"]["held"] == 4, "a worker that does not say keeps its leases"
    again = game.ledger.register("a", replace(one, leases=[])).session
    assert len(game.lease(again, 4)) == 4


# -- evaluation and batches


def test_engine_switches_drop_no_evaluation(play: Play) -> None:
    game = play()
    session = game.join("a")
    game.whole_step(session)
    (evaluated,) = game.add(1, purpose="evaluate", pinned=ZERO)
    for _ in range(5):
        leases = game.lease(session, 3, ZERO)
        assert {one.reason for one in game.hand_in(session, leases, Version(0, 1))} == {"stale"}
    assert game.state(evaluated) == "open"
    game.hand_in(session, game.lease(session, 3, ZERO), ZERO)
    assert game.state(evaluated) == "complete"


def test_evaluation_is_greedy(play: Play) -> None:
    with pytest.raises(UsageError, match="temperature 0"):
        play().add(1, purpose="evaluate", pinned=ZERO, temperature=1.0)


def test_batch_of_which_no_group_can_be_trained_is_an_error(play: Play) -> None:
    game = play(staleness=6)
    session = game.join("a", slots=32)
    game.add(7)
    for _ in range(6):
        leases = game.lease(session, 3)
        assert game.take().batch is None
        game.hand_in(session, leases, reward=1)
    for _ in range(2):
        with pytest.raises(RefusedError, match=r"none of the 6 groups .* step 0 .*equal rewards: 6"):
            game.take()
    assert game.ledger.status()["groups"] == {"dropped": 6, "waiting": 1}
    assert game.ledger.status()["lost_lengths"] == {"equal rewards": {"64": 6}}
    game.hand_in(session, game.lease(session, 3))
    assert game.take().batch is not None, "a group that can be trained ends the error"


def test_group_that_was_opened_earlier_is_waited_for(play: Play) -> None:
    """A fast worker's groups with equal rewards do not end the run while another plays."""
    game = play(staleness=6)
    slow, fast = game.join("slow", slots=32), game.join("fast", slots=32)
    game.add(7)
    leases = game.lease(slow, 3)
    for _ in range(6):
        game.hand_in(fast, game.lease(fast, 3), reward=1)
        assert game.take().batch is None
    game.hand_in(slow, leases)
    assert game.take().batch is not None


def test_shortened_groups_are_counted_by_length(play: Play) -> None:
    game = play(staleness=1)
    slow, session = game.join("slow"), game.join("a")
    game.add(1)
    (kept,) = game.lease(slow, 1)
    game.ledger.heartbeat(slow, {kept.lease: 5000})
    game.hand_in(session, game.lease(session, 2))
    for _ in range(2):
        game.whole_step(session)
    assert game.ledger.status()["lost_lengths"] == {"shortened": {"8192": 1}}


# -- a simulated run


@dataclass
class Sim:
    """Honest workers take 4 s for a job and have four slots. The learner takes 3 s for a step."""

    game: Game
    draw: random.Random
    honest: dict[bytes, list[tuple[float, Leased]]] = field(default_factory=dict)
    accepted: int = 0
    steps: int = 0
    numbers: int = 1000

    def tick(self, now_s: float) -> None:
        game = self.game
        if game.ledger.prompts(0).waiting < 16:
            game.ledger.add_groups([group(self.numbers + n) for n in range(16)])
            self.numbers += 16
        for session, plays in self.honest.items():
            done = [lease for ends_s, lease in plays if ends_s <= now_s]
            plays[:] = [one for one in plays if one[0] > now_s]
            if done:
                self.accepted += sum(one.verdict == "accepted" for one in game.hand_in(session, done))
            held = game.ledger.heartbeat(session, {one.lease: int(now_s * 2) for _, one in plays})
            aborted = {one.lease for one in held if one.state == "abort"}
            plays[:] = [one for one in plays if one[1].lease not in aborted]
            if len(plays) < 4:
                found = game.lease(session, 4 - len(plays))
                plays += [(now_s + self.draw.uniform(3, 5), one) for one in found]

    def learn(self) -> None:
        batch = self.game.take().batch
        if batch is not None:
            self.game.ledger.applied(self.game.epoch, batch.id, self.game.step + 1)
            self.game.step += 1
            self.steps += 1
            self.game.publish()


class LyingWorker:
    """Draws from all tricks. ``slots``: as many as may be stated."""

    def __init__(self, game: Game, draw: random.Random) -> None:
        self._game, self._draw = game, draw
        self._kept: list[Leased] = []
        self._tokens = 0
        self._session = game.join("liar", slots=4096, device_class="x0")

    def tick(self) -> None:
        tricks = (self._keep, self._instant, self._stale, self._unknown, self._malformed, self._return, self._again)
        with pytest.MonkeyPatch.context():
            try:
                self._draw.choice(tricks)()
            except RefusedError as error:
                assert "malformed or forged" in str(error)  # noqa: PT017
        self._tokens += 1
        self._game.ledger.heartbeat(self._session, {one.lease: self._tokens for one in self._kept[-64:]})

    def _lease(self) -> Sequence[Leased]:
        return self._game.lease(self._session, self._draw.choice((1, 4, 32)))

    def _keep(self) -> None:
        self._kept += self._lease()

    def _instant(self) -> None:
        done = [sample(one, self._game.version, one.job.index % 2, tokens=15) for one in self._lease()]
        if done:
            self._game.ledger.results(self._session, done, last_token)

    def _stale(self) -> None:
        self._game.hand_in(self._session, self._lease()[:1], Version(0, max(0, self._game.step - 9)))

    def _unknown(self) -> None:
        for one in self._lease()[:1]:
            self._game.ledger.results(self._session, [sample(one, Version(0, 99999), 0)], last_token)

    def _malformed(self) -> None:
        self._game.hand_in(self._session, self._lease()[:1], reward=99)

    def _return(self) -> None:
        self._game.ledger.give_back(self._session, [one.lease for one in self._lease()])

    def _again(self) -> None:
        """Another device class, whose first leases last as guessed."""
        self._session = self._game.join("liar", slots=4096, device_class=f"x{self._draw.random()}")


SECONDS = 90
LEAST_SHARE = 0.75
"""Of the results that the honest workers have accepted without the liar. The liar has its own share of the jobs."""


def simulated(folder: Path, seed: int, *, liar: bool) -> Sim:
    game = Game(lambda: LedgerStore(folder, segment_bytes=1 << 20), staleness=2, asks_hub=True)
    sim = Sim(game, random.Random(seed))
    for number in range(3):
        sim.honest[game.join(f"honest{number}", slots=4)] = []
    dead, slow = game.join("dead", slots=8), game.join("slow", slots=2)
    lying = LyingWorker(game, random.Random(seed)) if liar else None
    slow_plays: list[tuple[float, Leased]] = []
    for second in range(SECONDS):
        game.source_s += 1
        sim.tick(second)
        if second == 2:
            game.lease(dead, 8)
        done = [lease for ends_s, lease in slow_plays if ends_s <= second]
        slow_plays = [one for one in slow_plays if one[0] > second]
        game.hand_in(slow, done)
        game.ledger.heartbeat(slow, {one.lease: second for _, one in slow_plays})
        if len(slow_plays) < 2:
            slow_plays += [(second + 40.0, one) for one in game.lease(slow, 2 - len(slow_plays))]
        if lying is not None:
            for _ in range(2):
                lying.tick()
        if second % 3 == 0:
            sim.learn()
        game.ledger.expire()
    rows = dump(game.store)
    check_rows(rows)
    check_counts(rows, game.ledger)
    _finish(game)
    game.ledger.close()
    return sim


def _finish(game: Game) -> None:
    """No credit has leaked: without the liar, the run goes on for more batches than its bound on staleness."""
    honest, wanted = game.join("fresh", slots=64), game.step + 4
    for _ in range(200):
        game.source_s += 40
        if game.take().batch is not None:
            game.learn()
            if game.step == wanted:
                return
        game.add(4)
        leases = game.lease(honest, 32)
        game.hand_in(honest, leases)
    raise AssertionError(f"the run stands still: {game.ledger.status()}")


@pytest.mark.parametrize(
    "seed", [1, pytest.param(2, marks=pytest.mark.prove), pytest.param(3, marks=pytest.mark.prove)]
)
def test_lying_worker_costs_the_others_nothing_but_its_share(tmp_path: Path, seed: int) -> None:
    alone, beside = (simulated(tmp_path / str(liar), seed, liar=liar) for liar in (False, True))
    assert beside.accepted >= LEAST_SHARE * alone.accepted, (alone.accepted, beside.accepted)
    assert beside.steps >= LEAST_SHARE * alone.steps, (alone.steps, beside.steps)
