"""Task ``leduc``: hands of Leduc poker against a seeded opponent who plays at random. Needs the extra ``leduc``.

Each turn of the policy is one token: fold, call or raise. Any other token, or an action that is not legal, forfeits the
hand. Demonstrations are hands of a player that draws each action among the legal ones: they teach legality, not play.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

from p2pcast.ground.errors import LocalError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.play import Play
from p2pcast.tasks.poker_task import PokerTask, deal_of
from p2pcast.tasks.seeded_draws import draw_below
from p2pcast.tasks.task import Demonstration, Sample
from p2pcast.tasks.task_hash import HashedTask, Settings

BEGIN = 1
ACTIONS: Final = (3, 4, 5)
"""Tokens of open_spiel's actions 0 to 2: fold, call, raise."""
SEATS: Final = (6, 7)
RANKS: Final = (8, 9, 10)
"""Jack, queen, king; a suit decides nothing."""
PUBLIC, OPPONENT, YOUR_TURN = 11, 12, 13
NAMES: Final = (
    "<pad>", "<begin>", "<end>", "fold", "call", "raise", "seat-0", "seat-1", "J", "Q", "K", "public", "opponent",
    "your-turn", "<unused>", "<unused>",
)  # fmt: skip
CARDS_OF_A_RANK: Final = 2
STACK: Final = 100
"""Chips of each player before the ante."""
MOST_TURNS: Final = 8
"""Of one hand: more than the rules allow."""


class Leduc(HashedTask, PokerTask):
    """``held_out``: share of the deals excluded from training, in percent."""

    name = "leduc"
    vocabulary = len(NAMES)
    turn_tokens = 1
    hand_tokens = MOST_TURNS

    def __init__(self, held_out: int = 0) -> None:
        self.hold_out(held_out)

    @property
    def stop_token_ids(self) -> Sequence[int]:
        return ()

    def hand(self, job: Job) -> LeducHand:
        return LeducHand(*deal_of(job.prompt))

    @property
    def settings(self) -> Settings:
        _spiel()
        return {"open_spiel": importlib.metadata.version("open_spiel"), **self.held_out_settings}

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        for prompt in self.chosen(self.prompts("demonstrations", seed), held_out=False):
            yield _demonstration(LeducHand(*deal_of(prompt.prompt)), seed, prompt.prompt)

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(NAMES[token] if token < len(NAMES) else f"<{token}>" for token in token_ids)


class LeducHand:
    """One hand, as one player sees it."""

    def __init__(self, deal: int, seat: int) -> None:
        self._deal, self._seat = deal, seat
        self._state = _spiel().load_game("leduc_poker").new_initial_state()
        self._unobserved = [BEGIN, SEATS[seat]]
        self.forfeited = False
        self._others_play()

    @property
    def over(self) -> bool:
        return self.forfeited or bool(self._state.is_terminal())

    @property
    def chips(self) -> float:
        """The change of the player's chips. A hand that was forfeited or not finished loses what was bet."""
        if self._state.is_terminal():
            return float(self._state.returns()[self._seat])
        return float(self._state.money()[self._seat] - STACK)

    @property
    def legal(self) -> list[int]:
        """Tokens of the legal actions, at the player's turn."""
        return [ACTIONS[action] for action in self._state.legal_actions()]

    def observe(self) -> list[int]:
        """Tokens that the player has not observed yet; the last one asks for an action."""
        observed, self._unobserved = [*self._unobserved, YOUR_TURN], []
        return observed

    def act(self, said: Sequence[int]) -> None:
        token = said[0]
        if token not in self.legal:
            self.forfeited = True
            return
        self._state.apply_action(ACTIONS.index(token))
        self._others_play()

    def _others_play(self) -> None:
        """Cards and the opponent's actions, until the player's turn or the end."""
        state = self._state
        while not state.is_terminal() and (state.is_chance_node() or state.current_player() != self._seat):
            dealt = state.is_chance_node()
            choices = [action for action, _ in state.chance_outcomes()] if dealt else state.legal_actions()
            action = choices[draw_below(len(choices), "hand", self._deal, *state.history())]
            if not dealt:
                self._unobserved += [OPPONENT, ACTIONS[action]]
            elif (place := len(state.history())) == self._seat:
                self._unobserved.append(RANKS[action // CARDS_OF_A_RANK])
            elif place >= len(SEATS):
                self._unobserved += [PUBLIC, RANKS[action // CARDS_OF_A_RANK]]
            state.apply_action(action)


def _demonstration(hand: LeducHand, seed: int, prompt: bytes) -> Demonstration:
    play = Play(hand.observe())
    while True:
        token = hand.legal[draw_below(len(hand.legal), "player", seed, prompt.decode(), *play.token_ids)]
        play.add_turn(Sample([token], [0.0], (), "length"))
        hand.act([token])
        if hand.over:
            played = play.end("task")
            return Demonstration(played.token_ids, played.mask)
        play.add_environment(hand.observe())


@cache
def _spiel() -> Any:
    try:
        import pyspiel
    except ImportError:
        raise LocalError("task leduc needs open_spiel: pip install 'p2pcast[leduc]'") from None
    return pyspiel
