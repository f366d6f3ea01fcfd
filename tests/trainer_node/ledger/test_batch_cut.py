"""The pace rule and the cut, in a simulation of a run that checks every promise after every event."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_node.ledger.batch_cut import OVERSAMPLE, CandidateGroup, GroupVerdict, cut, judge, last_chance
from trainer_node.ledger.staleness_rule import StalenessBounds, room


def test_room_shrinks_with_groups_ahead_and_with_the_learner():
    bounds = StalenessBounds(staleness=3, batch_groups=4)
    assert room(bounds, 0, served_step=0, learner_step=0) == 16
    assert room(bounds, 15, served_step=0, learner_step=0) == 1
    assert room(bounds, 16, served_step=0, learner_step=0) == 0
    assert room(bounds, 0, served_step=0, learner_step=4) == 0, "the engine is too old for the next batch"
    assert room(bounds, 0, served_step=2, learner_step=0) == 24


def test_at_the_end_of_a_run_no_more_groups_open_than_will_be_trained():
    bounds = StalenessBounds(staleness=3, batch_groups=4, last_step=10)
    assert room(bounds, 0, served_step=9, learner_step=9) == 4
    assert room(bounds, 4, served_step=9, learner_step=9) == 0
    assert room(bounds, 0, served_step=10, learner_step=10) == 0


def test_verdicts():
    fresh = CandidateGroup(1, [5, 5], [0.0, 1.0])
    assert judge(fresh, 5) is GroupVerdict.USE
    assert judge(fresh, 6) is GroupVerdict.STALE
    assert judge(CandidateGroup(1, [5, 5], [1.0, 1.0]), 5) is GroupVerdict.EQUAL
    assert judge(CandidateGroup(1, [5, 4, 4], [1.0, 0.0, 0.0]), 5) is GroupVerdict.STALE
    assert judge(CandidateGroup(1, [5], [1.0]), 5) is GroupVerdict.SHORT
    assert judge(CandidateGroup(1, [5, 5], [0.0, 1.0], unsettled=1), 5) is GroupVerdict.WAIT


@pytest.mark.parametrize(
    ("rewards", "cut_off", "keep", "zero"),
    [
        ([1.0, 1.0, 1.0], [True, False, False], GroupVerdict.EQUAL, GroupVerdict.USE),
        ([1.0, 1.0, 1.0], [False, False, False], GroupVerdict.EQUAL, GroupVerdict.EQUAL),
        ([1.0, 1.0, 1.0], [True, True, True], GroupVerdict.EQUAL, GroupVerdict.EQUAL),
        ([-1.0, -1.0, -1.0], [True, False, False], GroupVerdict.EQUAL, GroupVerdict.EQUAL),
        ([0.0, 0.0, 0.0], [True, False, False], GroupVerdict.EQUAL, GroupVerdict.EQUAL),
        ([5.0, -1.0, 2.0], [True, True, True], GroupVerdict.USE, GroupVerdict.EQUAL),
        ([5.0, 0.0, 0.0], [True, False, False], GroupVerdict.USE, GroupVerdict.EQUAL),
        ([5.0, -1.0, -1.0], [True, False, False], GroupVerdict.USE, GroupVerdict.EQUAL),
        ([5.0, -1.0, 1.0], [True, False, False], GroupVerdict.USE, GroupVerdict.USE),
        ([0.0, 1.0, 1.0], (), GroupVerdict.USE, GroupVerdict.USE),
    ],
)
def test_a_group_is_judged_by_the_rewards_that_its_learner_pays(rewards, cut_off, keep, zero):
    group = CandidateGroup(1, [5, 5, 5], rewards, cut_off=cut_off)
    assert judge(group, 5) is judge(group, 5, "keep") is judge(group, 5, "mask") is keep
    assert judge(group, 5, "zero") is zero
    done = cut(StalenessBounds(3, 1), [group], 5, 0, "zero")
    assert (done.batch is not None) == (zero is GroupVerdict.USE)
    urgent = replace(group, unsettled=1)
    assert last_chance(urgent, 5, "zero") == (zero is GroupVerdict.USE)
    assert last_chance(urgent, 5) == (keep is GroupVerdict.USE)


def test_a_stale_result_does_not_change_the_pay_of_fresh_results():
    """The learner does not see it: neither its reward nor that it was cut off."""
    worst_is_stale = CandidateGroup(1, [4, 5, 5], [-3.0, -1.0, 0.0], cut_off=[False, False, True])
    assert judge(worst_is_stale, 4, "zero") is GroupVerdict.USE
    assert judge(worst_is_stale, 5, "zero") is GroupVerdict.EQUAL
    cut_is_stale = CandidateGroup(1, [4, 5, 5], [1.0, 1.0, 1.0], cut_off=[True, False, False])
    assert judge(cut_is_stale, 4, "zero") is GroupVerdict.USE
    assert judge(cut_is_stale, 5, "zero") is GroupVerdict.EQUAL


def test_the_oldest_groups_come_first():
    groups = [CandidateGroup(n, [step, step], [0.0, 1.0]) for n, step in ((1, 7), (2, 5), (3, 6), (4, 5))]
    done = cut(StalenessBounds(3, 3), groups, 8, 0)
    assert [g.opened for g in done.batch] == [2, 4, 3]


def test_a_batch_is_cut_short_once_enough_groups_were_played():
    equal = [CandidateGroup(n, [5, 5], [1.0, 1.0]) for n in range(OVERSAMPLE * 4 - 1)]
    one = CandidateGroup(99, [5, 5], [0.0, 1.0])
    assert cut(StalenessBounds(3, 4), [*equal[1:], one], 5, 0).batch is None
    done = cut(StalenessBounds(3, 4), [*equal, one], 5, 0)
    assert done.batch == (one,)
    assert len(done.dropped) == len(equal)
    assert cut(StalenessBounds(3, 4), equal, 5, 1).batch is None, "nothing to train is no batch"


def test_results_on_their_last_step_are_trained_without_the_stragglers_of_their_group():
    bounds = StalenessBounds(staleness=3, batch_groups=2)
    urgent = CandidateGroup(1, [5, 5, 5], [0.0, 1.0, 1.0], unsettled=1)
    whole = [CandidateGroup(n, [6, 6], [0.0, 1.0]) for n in (2, 3)]
    assert cut(bounds, [urgent, *whole], 7, 0).batch == tuple(whole), "one more step may bring the last result"
    assert cut(bounds, [urgent, *whole], 8, 0).batch == (urgent, whole[0])
    assert cut(bounds, [urgent, whole[0]], 8, 0).batch is None, "a batch waits for whole groups"


@pytest.mark.parametrize(
    "group",
    [
        CandidateGroup(1, [5], [0.0], unsettled=1),
        CandidateGroup(1, [5, 5], [1.0, 1.0], unsettled=1),
        CandidateGroup(1, [6, 6], [0.0, 1.0], unsettled=1),
        CandidateGroup(1, [4, 4], [0.0, 1.0], unsettled=1),
    ],
    ids=["one result", "equal rewards", "fresh for another step", "stale already"],
)
def test_other_groups_with_open_jobs_wait(group):
    assert not last_chance(group, 5)
    whole = [CandidateGroup(n, [7, 7], [0.0, 1.0]) for n in (2, 3)]
    assert cut(StalenessBounds(3, 2), [group, *whole], 8, 0).batch == tuple(whole)


# -- a run


@dataclass
class Group:
    number: int
    served: int
    ready_at: int
    rewards: list[float]


@dataclass
class Run:
    """Learner, broadcast and workers in ticks. ``lag``: ticks from publication until engines serve a version."""

    bounds: StalenessBounds
    publish_every: int
    lag: int
    straggling: float
    equal: float
    draw: random.Random
    slots: int

    def play(self, steps: int) -> tuple[int, int]:
        """(groups trained, groups stale). Raises AssertionError when the run stands still."""
        bounds, step, served, published = self.bounds, 0, 0, [(0, 0)]
        open_: list[Group] = []
        number = played = trained = stale = idle = 0
        tick = 0
        while step < steps:
            tick += 1
            served = max(v for v, at in published if at + self.lag <= tick or v == 0)
            running = sum(g.ready_at > tick for g in open_)
            while running < self.slots and room(bounds, len(open_), served, step) > 0:
                number, running = number + 1, running + 1
                takes = self.draw.randint(1, 3) * (12 if self.draw.random() < self.straggling else 1)
                rewards = [1.0, 1.0] if self.draw.random() < self.equal else [0.0, 1.0]
                open_.append(Group(number, served, tick + takes, rewards))
            groups = [
                CandidateGroup(g.number, [g.served] * 2, g.rewards)
                if g.ready_at <= tick
                else CandidateGroup(g.number, [], [], 2)
                for g in open_
            ]
            done = cut(bounds, groups, step, played)
            gone = {g.opened for g, _ in done.dropped}
            stale += sum(verdict is GroupVerdict.STALE for _, verdict in done.dropped)
            played += len(gone)
            if done.batch is not None:
                assert all(step - min(g.steps) <= bounds.staleness for g in done.batch)
                gone |= {g.opened for g in done.batch}
                trained += len(done.batch)
                step, played, idle = step + 1, 0, 0
                waits = room(bounds, len(open_) - len(gone), published[-1][0], step) == 0 and len(open_) == len(gone)
                if step % self.publish_every == 0 or waits or step == steps:
                    published.append((step, tick))
            open_ = [g for g in open_ if g.number not in gone]
            idle += 1
            assert idle < 1000, f"the run stands still at step {step}: {open_}"
        return trained, stale


@pytest.mark.parametrize("staleness", [0, 1, 3, 6])
@given(seed=st.integers(0, 1 << 32), data=st.data())
def test_no_run_stands_still_or_trains_on_stale_rollouts(staleness, seed, data):
    publish_every = data.draw(st.integers(1, staleness + 1))
    run = Run(
        StalenessBounds(staleness, data.draw(st.integers(1, 6)), last_step=40),
        publish_every,
        data.draw(st.integers(0, 20)),
        data.draw(st.sampled_from([0.0, 0.1, 0.3])),
        data.draw(st.sampled_from([0.0, 0.3, 0.6])),
        random.Random(seed),
        data.draw(st.integers(1, 32)),
    )
    trained, _ = run.play(40)
    assert trained > 0
