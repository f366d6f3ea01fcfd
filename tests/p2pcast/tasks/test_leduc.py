from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from scripted_sampler import RandomSampler, ScriptedSampler, jobs_of

from p2pcast.ground.errors import RemoteError

pytest.importorskip("pyspiel", reason="needs the extra leduc")

from p2pcast.tasks.leduc import ACTIONS, BEGIN, RANKS, SEATS, YOUR_TURN, Leduc

FOLD, CALL, RAISE = ACTIONS
TASK = Leduc()


async def test_a_group_shares_deal_and_seat() -> None:
    for number in range(0, 40, 4):
        members = jobs_of(TASK, 10, size=4)[number : number + 4]
        assert len({tuple(TASK.hand(job).observe()) for job in members}) == 1


async def test_equal_actions_meet_equal_answers() -> None:
    for job in jobs_of(TASK, 30):
        found = [await TASK.play(ScriptedSampler([[CALL]] * 8), job) for _ in range(2)]
        assert found[0].token_ids.tolist() == found[1].token_ids.tolist()


async def test_the_prompt_shows_the_seat_and_one_card() -> None:
    for job in jobs_of(TASK, 30):
        heard, asked = TASK.hand(job).observe(), json.loads(job.prompt)
        assert heard[:2] == [BEGIN, SEATS[asked["seat"]]]
        assert heard[-1] == YOUR_TURN
        assert sum(token in RANKS for token in heard) == 1


async def test_an_illegal_action_forfeits_the_bet() -> None:
    for job in jobs_of(TASK, 40):
        found = await TASK.play(ScriptedSampler([[BEGIN]]), job)
        assert found.stop == "task"
        assert found.tags == (("forfeit", "yes"),)
        assert TASK.reward(job, found.token_ids, found.mask) == -1.0  # the ante
        found = await TASK.play(ScriptedSampler([[RAISE], [BEGIN]]), job)
        if dict(found.tags)["forfeit"] == "yes":
            assert TASK.reward(job, found.token_ids, found.mask) in (-3.0, -5.0)


async def test_chips_of_both_seats_sum_to_nothing_and_all_ends_occur() -> None:
    rewards = set()
    for job in jobs_of(TASK, 200):
        sampler = RandomSampler(ACTIONS)
        found = await TASK.play(sampler, job)
        hand = TASK.hand(job)
        for place in found.turns.tolist():
            hand.act([int(found.token_ids[place])])
        assert hand.over
        assert TASK.reward(job, found.token_ids, found.mask) == hand.chips
        if not hand.forfeited:
            assert sum(hand._state.returns()) == 0
        rewards.add(hand.chips)
    assert min(rewards) < 0 < max(rewards)
    assert len(rewards) > 5


async def test_an_unfinished_hand_loses_the_bet() -> None:
    for job in jobs_of(TASK, 20):
        short = dataclasses.replace(job, max_tokens=1)
        found = await TASK.play(ScriptedSampler([[CALL]]), short)
        if found.stop == "length":
            assert TASK.reward(short, found.token_ids, found.mask) < 0


async def test_a_random_player_loses_and_wins_about_as_much() -> None:
    chips = []
    for job in jobs_of(TASK, 400):
        found = await TASK.play(RandomSampler(ACTIONS[1:]), job)
        chips.append(TASK.reward(job, found.token_ids, found.mask))
    assert abs(np.mean(chips)) < 2


@pytest.mark.parametrize("prompt", [b"", b"{}", b"[1, 2]", b'{"deal": -1, "seat": 0}', b'{"deal": 1, "seat": 2}'])
def test_a_prompt_of_another_task_is_refused(prompt: bytes) -> None:
    with pytest.raises(RemoteError):
        TASK.hand(dataclasses.replace(jobs_of(TASK, 1)[0], prompt=prompt))
