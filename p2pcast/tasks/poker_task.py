"""Base of tasks that play hands of poker against a seeded opponent.

A group shares the deal and the seat. The opponent's answer depends on the deal and on the hand so far, so that equal
actions meet equal answers. An action that is not legal forfeits the hand. The reward is the change of chips: the sum of
the changes of all turns (ECHO-2, equations 20 to 22).

A held-out problem is a deal, in both seats: the deal's number decides the cards and the opponent's chance. Cards alone
recur in training, since Leduc poker has few.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, Literal, Protocol

import numpy as np

from p2pcast.ground.errors import RemoteError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.held_out import HoldsOut
from p2pcast.tasks.play import Play, Replay
from p2pcast.tasks.seeded_draws import draw_below
from p2pcast.tasks.task import Prompt, Sampler, Trajectory

MAX_DEAL: Final = (1 << 64) - 1
PLAYERS: Final = 2


class Hand(Protocol):
    """One hand, as one player sees it. ``chips``: the change of the player's chips; a hand that was forfeited or not
    finished loses what was bet.
    """

    forfeited: bool

    @property
    def over(self) -> bool: ...
    @property
    def chips(self) -> float: ...

    def observe(self) -> list[int]:
        """Tokens that the player has not observed yet; they ask for an action."""

    def act(self, said: Sequence[int]) -> None:
        """The player's turn."""


class PokerTask(HoldsOut):
    """``turn_tokens``: most tokens of a turn. ``hand_tokens``: most sampled tokens of a hand."""

    turn_tokens: int
    hand_tokens: int

    @property
    @abstractmethod
    def stop_token_ids(self) -> Sequence[int]: ...

    @abstractmethod
    def hand(self, job: Job) -> Hand:
        """The job's hand before its first action. Raises RemoteError for a job of another task."""

    def prompts(self, *seed: int | str) -> Iterator[Prompt]:
        for number, deal in enumerate(self._deals(*seed)):
            yield self._prompt(deal, number % PLAYERS)

    def problem(self, prompt: bytes) -> str:
        deal, _ = deal_of(prompt)
        return str(deal)

    def evaluation_jobs(self, seed: int) -> Iterator[Prompt]:
        """Each held-out deal in both seats, one after the other."""
        chosen = super().evaluation_jobs(seed)
        return (self._prompt(deal_of(prompt.prompt)[0], seat) for prompt in chosen for seat in range(PLAYERS))

    def _deals(self, *seed: int | str) -> Iterator[int]:
        return (draw_below(MAX_DEAL + 1, self.name, *seed, number) for number in count())

    def _prompt(self, deal: int, seat: int) -> Prompt:
        return Prompt(json.dumps({"deal": deal, "seat": seat}).encode(), self.hand_tokens)

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        hand = self.hand(job)
        play = Play(hand.observe())
        while True:
            sample = await play.turn(sampler, job, self.turn_tokens, self.stop_token_ids)
            hand.act(sample.token_ids)
            if hand.over or play.sampled == job.max_tokens:
                stop: Literal["task", "length"] = "task" if hand.over else "length"
                return play.end(stop, [("forfeit", "yes" if hand.forfeited else "no")])
            play.add_environment(hand.observe())

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        hand, replay, left = self.hand(job), Replay(token_ids, mask), job.max_tokens
        while left and not hand.over:
            replay.environment(hand.observe())
            said = replay.turn(min(self.turn_tokens, left), self.stop_token_ids)
            hand.act(said)
            left -= len(said)
        replay.end()
        return hand.chips


def deal_of(prompt: bytes) -> tuple[int, int]:
    """Deal and seat of a job's prompt. Raises RemoteError for that of another task."""
    try:
        asked = json.loads(prompt)
        deal, seat = asked["deal"], asked["seat"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RemoteError("the job's prompt is no deal of cards") from None
    if type(deal) is not int or not 0 <= deal <= MAX_DEAL or type(seat) is not int or not 0 <= seat < PLAYERS:
        raise RemoteError("the job's prompt is no deal of cards")
    return deal, seat
