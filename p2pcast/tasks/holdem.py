"""Task ``holdem``: hands of heads-up no-limit Texas Hold'em, played in text against a seeded opponent. Needs the extra
``holdem``.

Each turn the task states the player's cards, the board, the pot and the odds (ECHO-2, appendix F.3), and what the
opponent did since. The policy answers with ``Action: call`` and the like; its last such line counts. The opponent mixes
folds, calls and raises by chance. pokerkit keeps the rules.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from typing import Any, Final

from p2pcast.ground.errors import LocalError
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.rollout_fields import MAX_TOKENS
from p2pcast.tasks.chat_tokens import ChatTokens
from p2pcast.tasks.poker_task import PokerTask, deal_of
from p2pcast.tasks.seeded_draws import draw_below
from p2pcast.tasks.task_hash import Settings
from p2pcast.tasks.text_task import TextTask

BLINDS: Final = (1, 2)
MIN_STACK, MAX_STACK = 20, 100_000
MOST_TURNS: Final = 12
"""Turns of full length for which a hand's limit of tokens is enough; few hands take more."""
RANKS: Final = "23456789TJQKA"
SUITS: Final = "cdhs"
STREETS: Final = ("Preflop", "Flop", "Turn", "River")
SYSTEM: Final = (
    "You play one hand of heads-up no-limit Texas Hold'em. The blinds are {small} and {big} chips, and both players "
    "start with {stack} chips. Your aim is to win as many chips as you can. You may think first. Then end your turn "
    "with one line: 'Action: fold', 'Action: check', 'Action: call', or 'Action: raise N', where N is your whole bet "
    "of this street after the raise. An action that is not legal forfeits the hand."
)
ACTION: Final = re.compile(
    r"^[ \t*]{0,8}Action:[ \t*]{0,8}(fold|check|call|raise)\b(?:[ \t]{1,8}(?:to[ \t]{1,8})?(\d{1,9})\b)?",
    re.IGNORECASE | re.MULTILINE,
)
CHANCES: Final = (("fold", 15), ("call", 60), ("raise", 25))
"""The opponent's actions, in percent. Free checks replace folds."""


class Holdem(TextTask, PokerTask):
    """``stack``: chips of each player at the start. ``turn_tokens``: most tokens of a turn. ``held_out``: share of the
    deals excluded from training, in percent.
    """

    name = "holdem"
    modules = (*TextTask.modules, "p2pcast.tasks.seeded_draws")

    def __init__(self, tokenizer: str, stack: int = 200, turn_tokens: int = 128, held_out: int = 0) -> None:
        super().__init__(tokenizer)
        self.hold_out(held_out)
        if not MIN_STACK <= stack <= MAX_STACK:
            raise LocalError(f"stack={stack} of task holdem: give {MIN_STACK} to {MAX_STACK}")
        if not 1 <= turn_tokens <= MAX_TOKENS // MOST_TURNS:
            raise LocalError(f"turn_tokens={turn_tokens} of task holdem: give 1 to {MAX_TOKENS // MOST_TURNS}")
        self.stack, self.turn_tokens = stack, turn_tokens
        self.hand_tokens = turn_tokens * MOST_TURNS

    @property
    def settings(self) -> Settings:
        try:
            version = importlib.metadata.version("pokerkit")
        except importlib.metadata.PackageNotFoundError:
            raise LocalError("task holdem needs pokerkit: pip install 'p2pcast[holdem]'") from None
        chosen: Settings = {"pokerkit": version, "stack": self.stack, "turn_tokens": self.turn_tokens}
        return {**super().settings, **chosen, **self.held_out_settings}

    def hand(self, job: Job) -> HoldemHand:
        return HoldemHand(*deal_of(job.prompt), self.stack, self.chat)


class HoldemHand:
    """One hand between seat 0, the big blind, and seat 1, the small blind."""

    def __init__(self, deal: int, seat: int, stack: int, chat: ChatTokens) -> None:
        self._deal, self._seat, self._stack, self._chat = deal, seat, stack, chat
        self._cards = shuffled(deal)
        self._state = _new_state(stack)
        self._happened: list[str] = []
        self._said: Sequence[int] = ()
        self._actions: list[str] = []
        self.forfeited = False
        self._others_play()

    @property
    def over(self) -> bool:
        return self.forfeited or not self._state.status

    @property
    def chips(self) -> float:
        """The change of the player's chips. A hand that was forfeited or not finished loses what was bet."""
        return float(self._state.stacks[self._seat] - self._stack)

    def observe(self) -> list[int]:
        system = SYSTEM.format(small=BLINDS[0], big=BLINDS[1], stack=self._stack)
        text = self.facts()
        self._happened = []
        return self._chat.reply(self._said, text) if self._said else self._chat.opening(system, text)

    def facts(self) -> str:
        """The state, as the player sees it, and the legal actions."""
        state, other = self._state, 1 - self._seat
        cards, board = (_shown(found) for found in (state.hole_cards[self._seat], _board(state)))
        owed, pot = state.checking_or_calling_amount, state.total_pot_amount
        lines = [
            *self._happened,
            f"{STREETS[state.street_index]}. Your cards: {cards}. Board: {board or 'none'}.",
            f"Pot: {pot}. Your stack: {state.stacks[self._seat]}. Opponent's stack: {state.stacks[other]}.",
        ]
        if owed:
            lines.append(f"To call: {owed}, which is {100 * owed / (pot + owed):.0f}% of the pot after the call.")
        legal: list[str] = [name for name in ("fold", "check", "call") if name in self._legal()]
        if "raise" in self._legal():
            legal.append(f"raise {_lowest(state)} to {_highest(state)}")
        return "\n".join([*lines, f"Legal: {', '.join(legal)}."])

    def act(self, said: Sequence[int]) -> None:
        self._said = said
        lines = ACTION.findall(self._chat.spoken(said)) if self._chat.ended(said) else []
        action, amount = lines[-1] if lines else ("", "")
        action = action.lower()
        legal = action in self._legal() and bool(amount) == (action == "raise")
        if legal and amount:
            legal = _lowest(self._state) <= int(amount) <= _highest(self._state)
        if not legal:
            self.forfeited = True
            return
        self._do(action, int(amount or 0))
        self._others_play()

    def _legal(self) -> set[str]:
        state = self._state
        passive = {"fold", "call"} if state.checking_or_calling_amount else {"check"}
        return passive | ({"raise"} if state.can_complete_bet_or_raise_to() else set())

    def _do(self, action: str, amount: int) -> None:
        if action == "fold":
            self._state.fold()
        elif action == "raise":
            self._state.complete_bet_or_raise_to(amount)
        else:
            self._state.check_or_call()
        self._actions.append(f"{action} {amount}")

    def _others_play(self) -> None:
        """Cards and the opponent's actions, until the player's turn or the end."""
        state = self._state
        while state.status and state.actor_index != self._seat:
            if state.can_burn_card():
                state.burn_card("??")
            elif state.can_deal_hole():
                state.deal_hole(self._cards.pop() + self._cards.pop())
            elif state.can_deal_board():
                cards = [self._cards.pop() for _ in range(3 if state.street_index == 1 else 1)]
                state.deal_board("".join(cards))
                self._happened.append(f"Dealt: {' '.join(cards)}.")
            else:
                self._opponent_acts()

    def _opponent_acts(self) -> None:
        """By chance, which depends on the deal and on all actions so far."""
        place, action = self._drawn(100, "action"), "raise"
        for name, chance in CHANCES:
            if place < chance:
                action = name
                break
            place -= chance
        legal, amount = self._legal(), 0
        if action not in legal or (action == "fold" and not self._said):  # the player has a turn in every hand
            action = "check" if "check" in legal else "call"
        if action == "raise":
            lowest, highest = _lowest(self._state), _highest(self._state)
            amount = min(highest, lowest + self._drawn(max(1, self._state.total_pot_amount), "amount"))
        self._do(action, amount)
        self._happened.append(f"Opponent: {action}{f' to {amount}' if amount else ''}.")

    def _drawn(self, most: int, purpose: str) -> int:
        return draw_below(most, "holdem", purpose, self._deal, *self._actions)


def shuffled(deal: int) -> list[str]:
    """The deck of a deal."""
    cards = [rank + suit for rank in RANKS for suit in SUITS]
    return sorted(cards, key=lambda card: draw_below(1 << 64, "deck", deal, card))


def _new_state(stack: int) -> Any:
    try:
        from pokerkit import Automation, NoLimitTexasHoldem
    except ImportError:
        raise LocalError("task holdem needs pokerkit: pip install 'p2pcast[holdem]'") from None
    dealt = (Automation.CARD_BURNING, Automation.HOLE_DEALING, Automation.BOARD_DEALING)
    automations = tuple(found for found in Automation if found not in dealt)
    return NoLimitTexasHoldem.create_state(automations, True, 0, BLINDS, BLINDS[1], (stack, stack), 2)


def _lowest(state: Any) -> int:
    return int(state.min_completion_betting_or_raising_to_amount)


def _highest(state: Any) -> int:
    return int(state.max_completion_betting_or_raising_to_amount)


def _board(state: Any) -> list[Any]:
    return [card for cards in state.board_cards for card in cards]


def _shown(cards: Sequence[Any]) -> str:
    return " ".join(map(repr, cards))
