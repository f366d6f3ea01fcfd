from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_sampler import PlayerSampler, ScriptedSampler, jobs_of

from p2pcast.ground.errors import LocalError, RemoteError
from p2pcast.rollouts.job import Job

pytest.importorskip("pokerkit", reason="needs the extra holdem")

from p2pcast.tasks.holdem import BLINDS, Holdem, HoldemHand, shuffled

TASK = Holdem("bytes")
(END,) = TASK.stop_token_ids
BETTING = 60


def said(text: str) -> list[int]:
    return [*text.encode(), END]


def facing_a_call(count: int = 40) -> list[Job]:
    """Jobs in which the player has the small blind: the player acts first and has to call."""
    return [job for job in jobs_of(TASK, count) if b'"seat": 1' in job.prompt]


async def chips(job: Job, *turns: str) -> tuple[float, dict[str, str]]:
    found = await TASK.play(ScriptedSampler([said(turn) for turn in turns]), job)
    return TASK.reward(job, found.token_ids, found.mask), dict(found.tags)


def test_a_deal_is_a_whole_deck_of_its_own() -> None:
    assert shuffled(1) == shuffled(1)
    assert shuffled(1) != shuffled(2)
    assert len(set(shuffled(1))) == 52


async def test_a_group_shares_deal_and_seat() -> None:
    for number in range(0, 40, 4):
        members = jobs_of(TASK, 10, size=4)[number : number + 4]
        assert len({tuple(TASK.hand(job).observe()) for job in members}) == 1


async def test_equal_actions_meet_equal_answers() -> None:
    for job in jobs_of(TASK, 30):
        first, second = [await TASK.play(PlayerSampler([]), job) for _ in range(2)]
        assert first.token_ids.tolist() == second.token_ids.tolist()


def test_the_player_sees_its_own_cards_alone() -> None:
    for job in jobs_of(TASK, 40):
        hand = TASK.hand(job)
        own, other = (hand._state.hole_cards[seat] for seat in (hand._seat, 1 - hand._seat))
        assert all(repr(card) in hand.facts() for card in own)
        assert not any(repr(card) in hand.facts() for card in other)


@pytest.mark.parametrize(
    "turn",
    [
        "",
        "call",
        "Action: check",
        "Action: raise",
        "Action: raise 3",
        "Action: raise 201",
        "Action: raise 999999999999",
        "Action: raise -4",
        "Action: call 2",
        "Action: bluff",
        "Action: fold\nAction: check",
        "The Action: call",
        "\udcff".encode(errors="replace").decode() * 50,
    ],
)
async def test_an_illegal_action_forfeits_the_bet(turn: str) -> None:
    for job in facing_a_call():
        assert await chips(job, turn) == (-float(BLINDS[0]), {"forfeit": "yes"})


@pytest.mark.parametrize(
    "turn", ["Action: fold", "I think.\naction:  FOLD", "Action: raise 50\nAction: fold", "**Action: fold**"]
)
async def test_the_last_line_with_an_action_counts(turn: str) -> None:
    for job in facing_a_call():
        assert await chips(job, turn) == (-float(BLINDS[0]), {"forfeit": "no"})


async def test_a_turn_that_is_cut_off_forfeits_the_bet() -> None:
    for job in facing_a_call(10):
        turn = [*b"Action: fold".ljust(TASK.turn_tokens)]
        found = await TASK.play(ScriptedSampler([turn]), job)
        assert dict(found.tags) == {"forfeit": "yes"}
        assert found.mask.sum() == TASK.turn_tokens


async def test_chips_of_both_seats_sum_to_nothing_and_all_ends_occur() -> None:
    streets, rewards = set(), []
    for job in jobs_of(TASK, 300):
        found = await TASK.play(PlayerSampler([]), job)
        hand = TASK.hand(job)
        for start, end in zip(found.turns, [*found.turns[1:], None], strict=True):
            hand.observe()
            tokens, mask = found.token_ids[start:end], found.mask[start:end]
            hand.act(tokens[mask == 1].tolist())
        assert hand.over
        assert sum(hand._state.stacks) == 2 * TASK.stack
        assert TASK.reward(job, found.token_ids, found.mask) == hand.chips
        assert -TASK.stack <= hand.chips <= TASK.stack
        streets.add(len(hand._state.board_cards))
        rewards.append(hand.chips)
    assert streets == {0, 3, 4, 5}
    assert min(rewards) < -BLINDS[1] < BLINDS[1] < max(rewards)


TURNS = st.one_of(
    st.sampled_from(["Action: check", "Action: call", "Action: fold"]),
    st.integers(0, 400).map(lambda amount: f"Action: raise {amount}"),
    st.text(max_size=20),
)


@settings(deadline=None, max_examples=150)
@given(st.integers(0, (1 << 64) - 1), st.integers(0, 1), st.lists(TURNS, max_size=30))
def test_no_words_of_the_policy_break_a_hand(deal: int, seat: int, turns: list[str]) -> None:
    hand = HoldemHand(deal, seat, TASK.stack, TASK.chat)
    for turn in turns:
        if hand.over:
            break
        hand.observe()
        hand.act(said(turn))
        assert -TASK.stack <= hand.chips <= TASK.stack
        assert sum(hand._state.stacks) + hand._state.total_pot_amount == 2 * TASK.stack


async def test_all_in_is_dealt_to_the_river() -> None:
    ends = set()
    for job in facing_a_call(BETTING):
        reward, tags = await chips(job, f"Action: raise {TASK.stack}")
        assert tags == {"forfeit": "no"}
        ends.add(reward)
    assert ends <= {float(BLINDS[1]), float(TASK.stack), -float(TASK.stack), 0.0}
    assert {float(TASK.stack), -float(TASK.stack)} <= ends


async def test_an_unfinished_hand_loses_the_bet() -> None:
    unfinished = 0
    for job in jobs_of(TASK, 20):
        short = dataclasses.replace(job, max_tokens=len(said("Hm.\nAction: check")))
        found = await TASK.play(PlayerSampler([]), short)
        if found.stop == "length":
            unfinished += 1
            assert TASK.reward(short, found.token_ids, found.mask) < 0
    assert unfinished


def test_the_hash_covers_the_stakes() -> None:
    assert len({TASK.hash, Holdem("bytes", stack=50).hash, Holdem("bytes", turn_tokens=50).hash}) == 3


@pytest.mark.parametrize("given", [{"stack": 3}, {"stack": 1 << 40}, {"turn_tokens": 0}, {"turn_tokens": 1 << 30}])
def test_a_setting_out_of_bounds_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(LocalError, match="of task holdem: give"):
        Holdem("bytes", **given)


@pytest.mark.parametrize("prompt", [b"", b"{}", b"[1, 2]", b'{"deal": -1, "seat": 0}', b'{"deal": 1, "seat": true}'])
def test_a_prompt_of_another_task_is_refused(prompt: bytes) -> None:
    with pytest.raises(RemoteError):
        TASK.hand(dataclasses.replace(jobs_of(TASK, 1)[0], prompt=prompt))
