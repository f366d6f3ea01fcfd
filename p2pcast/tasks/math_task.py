"""Task ``math``: questions of mathematics, answered in a box. Needs the extra ``math``.

A job holds its question and the right answer, so that workers need no copy of the questions. The rewards are those
of PULSE, appendix C.3: 0.7 for the right answer and 0.15 for its box. Thinking before the answer is worth 0.1, and an
end right after it 0.05. math-verify compares the answers. A comparison that hangs is worth 0.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from p2pcast.ground.errors import LocalError, RemoteError
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.rollout_fields import MAX_TOKENS
from p2pcast.tasks.held_out import HoldsOut
from p2pcast.tasks.math_answers import reward_of
from p2pcast.tasks.play import Play, Replay
from p2pcast.tasks.question_files import read_questions
from p2pcast.tasks.seeded_draws import draw_below
from p2pcast.tasks.task import Prompt, Sampler, Trajectory
from p2pcast.tasks.task_hash import Settings
from p2pcast.tasks.text_task import TextTask

SYSTEM: Final = (
    "Solve the problem. Write your reasoning between <think> and </think>. Then write the final answer inside "
    "\\boxed{}, and nothing after it."
)
BUILT_IN: Final = (
    ("What is 17 * 23?", "391"),
    ("A bag holds 3 red and 5 blue balls. One ball is drawn. What is the probability that it is red?", "\\frac{3}{8}"),
    ("Solve 2x + 7 = 31 for x.", "12"),
    ("What is the area of a circle with a radius of 3?", "9\\pi"),
    ("What is the sum of the integers from 1 to 100?", "5050"),
    ("Simplify \\sqrt{50}.", "5\\sqrt{2}"),
    ("A train covers 180 km in 2.5 hours. What is its mean speed in km/h?", "72"),
    ("How many primes are smaller than 30?", "10"),
)
"""Questions to try the task with."""
PACKAGES: Final = ("math-verify", "latex2sympy2-extended", "sympy")


class Math(TextTask, HoldsOut):
    """``questions``: a JSONL file or the folder of a Hugging Face dataset; without them, a few built-in ones.
    ``split``: of a folder's files. ``max_tokens``: most sampled tokens of an answer. ``held_out``: share of the
    questions excluded from training, in percent.
    """

    name = "math"
    modules = (*TextTask.modules, "p2pcast.tasks.math_answers")
    check_cpu_s = 1.0
    failed_check_reward = 0.0

    def __init__(
        self,
        tokenizer: str,
        questions: str = "",
        split: str = "train",
        question_column: str = "question",
        answer_column: str = "answer",
        max_tokens: int = 1024,
        held_out: int = 0,
    ) -> None:
        super().__init__(tokenizer)
        self.hold_out(held_out)
        if not 1 <= max_tokens <= MAX_TOKENS:
            raise LocalError(f"max_tokens={max_tokens} of task math: give 1 to {MAX_TOKENS}")
        if questions and not Path(questions).exists():
            raise LocalError(f"questions={questions} of task math: no such file or folder")
        self._questions, self._split = questions, split
        self._columns = (question_column, answer_column)
        self._max_tokens = max_tokens

    @property
    def settings(self) -> Settings:
        """Without the questions: each job holds its own."""
        try:
            versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        except importlib.metadata.PackageNotFoundError:
            raise LocalError("task math needs math-verify: pip install 'p2pcast[math]'") from None
        return {**super().settings, **versions, **self.held_out_settings}

    def prompts(self, *seed: int | str) -> Iterator[Prompt]:
        """Each pass over the questions has an order of its own."""
        known = read_questions(Path(self._questions), self._split, *self._columns) if self._questions else BUILT_IN
        passes = 0
        while True:
            drawn = [draw_below(1 << 64, "math", *seed, passes, number) for number in range(len(known))]
            for number in sorted(range(len(known)), key=drawn.__getitem__):
                question, answer = known[number]
                asked_for = json.dumps({"question": question, "answer": answer}).encode()
                yield Prompt(
                    asked_for, self._max_tokens, f"question {number + 1} of {self._questions or 'the built-in'}"
                )
            passes += 1

    def problem(self, prompt: bytes) -> str:
        question, _ = asked(prompt)
        return question

    async def play(self, sampler: Sampler, job: Job) -> Trajectory:
        question, _ = asked(job.prompt)
        play = Play(self.chat.opening(SYSTEM, question))
        sample = await play.turn(sampler, job, job.max_tokens, self.stop_token_ids)
        return play.end(sample.stop)

    def reward(self, job: Job, token_ids: np.ndarray, mask: np.ndarray) -> float:
        question, answer = asked(job.prompt)
        replay = Replay(token_ids, mask)
        replay.environment(self.chat.opening(SYSTEM, question))
        said = replay.turn(job.max_tokens, self.stop_token_ids)
        replay.end()
        return reward_of(self.chat.spoken(said), answer, ended=self.chat.ended(said))


def asked(prompt: bytes) -> tuple[str, str]:
    """Question and right answer of a job's prompt. Raises RemoteError for that of another task."""
    try:
        found = json.loads(prompt)
        question, answer = found["question"], found["answer"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise RemoteError("the job's prompt is no question with its answer") from None
    if type(question) is not str or type(answer) is not str:
        raise RemoteError("the job's prompt is no question with its answer")
    return question, answer
