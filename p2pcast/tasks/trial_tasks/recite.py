"""Task ``recite``: phrases of a long text, repeated, with a vocabulary of its own. For trials of long contexts and of
sparse attention.

A prompt is a text of phrases. A phrase has eight tokens: one of the starters, and body tokens, which stand in no other
phrase of the text. Two phrases can follow a phrase, one in three cases of four and the other in the fourth. The text
begins within a phrase. The answer continues it: the reward is the share of the answer's phrases that are phrases of the
text.

So the tokens of an answer differ in difficulty. A body token follows from each place of its phrase in the text, a
starter from the frequencies of what followed there.

A job's prompt is a number, from which the tokens are drawn. This number is also the problem that is held out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple

import blake3
import numpy as np

from p2pcast.ground.errors import RemoteError, UsageError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.held_out import HoldsOut
from p2pcast.tasks.play import Play, Replay
from p2pcast.tasks.seeded_draws import draw_below
from p2pcast.tasks.task import Demonstration, Prompt, Sampler, Trajectory
from p2pcast.tasks.task_hash import HashedTask, Settings

SPECIAL: Final = ("<pad>", "<begin>")
PAD, BEGIN = range(2)
PHRASE: Final = 8
"""Tokens of a phrase."""
FIRST_STARTER, STARTERS = 8, 64
FIRST_BODY: Final = FIRST_STARTER + STARTERS
BODIES: Final = STARTERS * (PHRASE - 1)
VOCABULARY: Final = FIRST_BODY + BODIES
MOST_TOKENS: Final = 1 << 17
SELDOM: Final = 4
"""Of so many phrases one has the follower that is less probable."""
_PROMPT: Final = re.compile(rb"[0-9a-f]{16}")


class Drawn(NamedTuple):
    """``prompt``: all of its tokens. ``phrases``: those of the text, of shape (phrases, tokens). ``answer``: a right
    one.
    """

    prompt: np.ndarray
    phrases: np.ndarray
    answer: np.ndarray


class Recite(HashedTask, HoldsOut):
    """``tokens``: of the prompt. ``asked``: phrases of an answer. ``phrases``: most different ones of a text.
    ``repeats``: times that a phrase stands in the text, on average, at least. ``held_out``: share of the problems
    excluded from training, in percent.
    """

    name = "recite"
    vocabulary = VOCABULARY
    stop_token_ids = ()

    def __init__(
        self, tokens: int = 2048, asked: int = 8, phrases: int = STARTERS, repeats: int = 4, held_out: int = 0
    ) -> None:
        in_range = {
            f"tokens={tokens}": 1 + PHRASE <= tokens <= MOST_TOKENS,
            f"asked={asked}": asked >= 1,
            f"phrases={phrases}": 1 <= phrases <= STARTERS,
            f"repeats={repeats}": repeats >= 1,
        }
        for setting, fits in in_range.items():
            if not fits:
                raise UsageError(
                    f"{setting} of task recite is out of range: prompts have {1 + PHRASE} to {MOST_TOKENS} tokens and"
                    f" at most {STARTERS} phrases"
                )
        self.tokens, self.asked, self.phrases, self.repeats = tokens, asked, phrases, repeats
        self._stands, self._cut = divmod(tokens - 1, PHRASE)
        self.stated = min(phrases, self._stands // repeats)
        """Number of different phrases of a text."""
        if not self.stated:
            raise UsageError(f"tokens={tokens} of task recite has no room for a phrase {repeats} times: change repeats")
        self.hold_out(held_out)

    @property
    def answer_tokens(self) -> int:
        return PHRASE * self.asked

    @property
    def settings(self) -> Settings:
        mine = {"tokens": self.tokens, "asked": self.asked, "phrases": self.phrases, "repeats": self.repeats}
        return {**mine, **self.held_out_settings}

    def prompts(self, *seed: int | str) -> Iterator[Prompt]:
        for number in count():
            drawn = draw_below(1 << 64, "recite", *seed, number)
            yield Prompt(f"{drawn:016x}".encode(), self.answer_tokens)

    def problem(self, prompt: bytes) -> str:
        return _checked(prompt).decode()

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        for prompt in self.chosen(self.prompts("demonstrations", seed), held_out=False):
            drawn = self.drawn(prompt.prompt)
            mask = np.repeat(np.array([0, 1], "u1"), [len(drawn.prompt), len(drawn.answer)])
            yield Demonstration(np.concatenate([drawn.prompt, drawn.answer]).astype("<u4"), mask)

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        play = Play(self.drawn(job.prompt).prompt.tolist())
        sample = await play.turn(sampler, job, job.max_tokens, self.stop_token_ids)
        return play.end(sample.stop)

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        drawn = self.drawn(job.prompt)
        replay = Replay(token_ids, mask)
        replay.environment(drawn.prompt.tolist())
        said = replay.turn(job.max_tokens)
        replay.end()
        known = set(map(tuple, drawn.phrases.tolist()))
        right = [tuple(said[PHRASE * i : PHRASE * (i + 1)]) in known for i in range(self.asked)]
        return sum(right) / self.asked

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(_word, token_ids))

    def drawn(self, prompt: bytes) -> Drawn:
        """Raises RemoteError for a prompt of another task."""
        numbers = _Numbers(_checked(prompt))
        starters = FIRST_STARTER + numbers.order("starters", STARTERS)[: self.stated]
        bodies = FIRST_BODY + numbers.order("bodies", BODIES)[: self.stated * (PHRASE - 1)]
        phrases = np.concatenate([starters[:, None], bodies.reshape(self.stated, PHRASE - 1)], axis=1)
        walk = phrases[self._walk(numbers)]
        text, answer = walk[: 1 + self._stands].ravel()[PHRASE - self._cut :], walk[1 + self._stands :].ravel()
        return Drawn(np.concatenate([[BEGIN], text]), phrases, answer)

    def _walk(self, numbers: _Numbers) -> list[int]:
        """Numbers of the phrases, from the one in which the text begins to the last of the answer. A phrase's usual
        follower has the next number; the others make another circle.
        """
        other = numbers.order("followers", self.stated)
        follower = dict(zip(other.tolist(), np.roll(other, -1).tolist(), strict=True))
        walk: list[int] = numbers.below("first", self.stated, 1).tolist()
        for draw in numbers.below("walk", SELDOM, self._stands + self.asked).tolist():
            walk.append((walk[-1] + 1) % self.stated if draw else follower[walk[-1]])
        return walk


class _Numbers:
    """Random numbers of a prompt, equal on every machine."""

    def __init__(self, prompt: bytes) -> None:
        self._prompt = prompt

    def _bits(self, purpose: str, count: int) -> np.ndarray:
        drawn = blake3.blake3(b"recite\0" + self._prompt + b"\0" + purpose.encode()).digest(4 * count)
        return np.frombuffer(drawn, "<u4").astype(np.int64)

    def below(self, purpose: str, most: int, count: int) -> np.ndarray:
        return self._bits(purpose, count) % most

    def order(self, purpose: str, count: int) -> np.ndarray:
        """The numbers below ``count`` in random order."""
        return np.argsort(self._bits(purpose, count), kind="stable")


def _word(token: int) -> str:
    if token < len(SPECIAL):
        return SPECIAL[token]
    for name, first in (("b", FIRST_BODY), ("s", FIRST_STARTER)):
        if token >= first:
            return f"{name}{token - first}"
    return f"<{token}>"


def _checked(prompt: bytes) -> bytes:
    if not _PROMPT.fullmatch(prompt):
        raise RemoteError("the job's prompt is none of task recite")
    return prompt
