"""Task ``recall``: values of asked keys, stated far back in a long prompt, with a vocabulary of its own. For trials of
long contexts and of sparse attention.

A prompt is a text of filler words with statements, a key and a value, in random places; then the asked keys. The
answer repeats the asked keys, each with its value. A key is stated several times, and fewer than half of its statements
may give another value: the right one is that of most statements. So the tokens of an answer differ in difficulty: keys
follow from the end of the prompt, and values from several places of the whole prompt. The reward is the share of right
values.

A job's prompt is a number, from which the tokens are drawn. This number is also the problem that is held out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple

import blake3
import numpy as np

from p2pcast.errors import RemoteError, UsageError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.held_out import HoldsOut
from p2pcast.tasks.play import Play, Replay
from p2pcast.tasks.seeded_draws import draw_below
from p2pcast.tasks.task import Demonstration, Prompt, Sampler, Trajectory
from p2pcast.tasks.task_hash import HashedTask, Settings

SPECIAL: Final = ("<pad>", "<begin>", "<end>", "<ask>", "<answer>")
PAD, BEGIN, END, ASK, ANSWER = range(5)
FIRST_FILLER, FILLERS = 8, 56
FIRST_VALUE, VALUES = 64, 64
FIRST_KEY, KEYS = 128, 256
VOCABULARY: Final = FIRST_KEY + KEYS
MOST_TOKENS: Final = 1 << 17
_PROMPT: Final = re.compile(rb"[0-9a-f]{16}")


class Drawn(NamedTuple):
    """``prompt``: all of its tokens. ``keys``, ``values``: of the asked keys, as tokens. ``places``: of the right
    statements of each asked key in the prompt.
    """

    prompt: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    places: list[np.ndarray]


class Recall(HashedTask, HoldsOut):
    """``tokens``: of the prompt. ``asked``: keys asked for. ``spacing``: tokens of the text for each statement.
    ``statements``: of each key. ``held_out``: share of the problems excluded from training, in percent.
    """

    name = "recall"
    vocabulary = VOCABULARY
    stop_token_ids = (END,)

    def __init__(
        self, tokens: int = 2048, asked: int = 16, spacing: int = 16, statements: int = 3, held_out: int = 0
    ) -> None:
        in_range = {
            f"tokens={tokens}": 1 <= tokens <= MOST_TOKENS,
            f"asked={asked}": asked >= 1,
            f"spacing={spacing}": spacing >= 2,
            f"statements={statements}": statements >= 1,
        }
        for setting, fits in in_range.items():
            if not fits:
                raise UsageError(f"{setting} of task recall is out of range: prompts have 1 to {MOST_TOKENS} tokens")
        self.tokens, self.asked, self.spacing, self.statements = tokens, asked, spacing, statements
        self._text_tokens = tokens - asked - 3
        self.stated = self._text_tokens // spacing // statements
        """Number of keys in a prompt."""
        if not asked <= self.stated <= KEYS:
            raise UsageError(
                f"tokens={tokens} of task recall states {max(0, self.stated)} keys, and {asked} to {KEYS} are needed:"
                " change tokens, spacing or statements"
            )
        self.hold_out(held_out)

    @property
    def answer_tokens(self) -> int:
        return 2 * self.asked + 1

    @property
    def settings(self) -> Settings:
        own = {"tokens": self.tokens, "asked": self.asked, "spacing": self.spacing, "statements": self.statements}
        return {**own, **self.held_out_settings}

    def prompts(self, *seed: int | str) -> Iterator[Prompt]:
        for number in count():
            drawn = draw_below(1 << 64, "recall", *seed, number)
            yield Prompt(f"{drawn:016x}".encode(), self.answer_tokens)

    def problem(self, prompt: bytes) -> str:
        return _checked(prompt).decode()

    def demonstrations(self, seed: int) -> Iterator[Demonstration]:
        for prompt in self.chosen(self.prompts("demonstrations", seed), held_out=False):
            drawn = self.drawn(prompt.prompt)
            answer = _answer(drawn)
            mask = np.repeat(np.array([0, 1], "u1"), [len(drawn.prompt), len(answer)])
            yield Demonstration(np.concatenate([drawn.prompt, answer]).astype("<u4"), mask)

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
        pairs = zip(drawn.keys.tolist(), drawn.values.tolist(), strict=True)
        right = [said[2 * i : 2 * i + 2] == [*pair] for i, pair in enumerate(pairs)]
        return sum(right) / self.asked

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(_word, token_ids))

    def drawn(self, prompt: bytes) -> Drawn:
        """Raises RemoteError for a prompt of another task."""
        numbers = _Numbers(_checked(prompt))
        keys = FIRST_KEY + numbers.order("keys", KEYS)[: self.stated]
        values = numbers.below("values", VALUES, self.stated)
        others = (values + 1 + numbers.below("others", VALUES - 1, self.stated)) % VALUES
        mistaken = numbers.below("mistaken", (self.statements + 1) // 2, self.stated)
        wrong = np.arange(self.statements) < mistaken[:, None]
        stated_values = FIRST_VALUE + np.where(wrong, others[:, None], values[:, None])
        cells = numbers.order("cells", self._text_tokens // self.spacing)[: wrong.size].reshape(wrong.shape)
        shift = numbers.below("shift", self.spacing - 1, wrong.size).reshape(wrong.shape)
        places = 1 + cells * self.spacing + shift
        text = FIRST_FILLER + numbers.below("fillers", FILLERS, 1 + self._text_tokens)
        text[0] = BEGIN
        text[places] = keys[:, None]
        text[places + 1] = stated_values
        asked = keys[: self.asked]
        right = [row[~w] for row, w in zip(places[: self.asked], wrong, strict=False)]
        return Drawn(np.concatenate([text, [ASK], asked, [ANSWER]]), asked, FIRST_VALUE + values[: self.asked], right)


class _Numbers:
    """Random numbers of a prompt, equal on every machine."""

    def __init__(self, prompt: bytes) -> None:
        self._prompt = prompt

    def _bits(self, purpose: str, count: int) -> np.ndarray:
        drawn = blake3.blake3(b"recall\0" + self._prompt + b"\0" + purpose.encode()).digest(4 * count)
        return np.frombuffer(drawn, "<u4").astype(np.int64)

    def below(self, purpose: str, most: int, count: int) -> np.ndarray:
        return self._bits(purpose, count) % most

    def order(self, purpose: str, count: int) -> np.ndarray:
        """The numbers below ``count`` in random order."""
        return np.argsort(self._bits(purpose, count), kind="stable")


def _answer(drawn: Drawn) -> np.ndarray:
    return np.array([*np.stack([drawn.keys, drawn.values], axis=1).ravel(), END])


def _word(token: int) -> str:
    if token < len(SPECIAL):
        return SPECIAL[token]
    for name, first in (("k", FIRST_KEY), ("v", FIRST_VALUE), ("w", FIRST_FILLER)):
        if token >= first:
            return f"{name}{token - first}"
    return f"<{token}>"


def _checked(prompt: bytes) -> bytes:
    if not _PROMPT.fullmatch(prompt):
        raise RemoteError("the job's prompt is none of task recall")
    return prompt
