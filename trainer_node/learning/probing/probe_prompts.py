"""Probe sequences: prompts of a task's held-out problems, as the task would ask a policy.

Short prompts follow one another in one sequence: only tokens with many tokens before them show all weights of an
attention. Equal tasks, seeds and limits give equal sequences, so a resumed run has the same probe set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator, Iterable, Sequence
from itertools import islice
from typing import Final

from p2pcast.ground.errors import UsageError
from p2pcast.ground.version import Version
from p2pcast.rollouts.job import Group, job_of
from p2pcast.rollouts.probe_set import MAX_PROBE_TOKENS, ProbeSet
from p2pcast.tasks.child_processes.prompt_reader import FaultyPromptError, prompts_of
from p2pcast.tasks.task import Prompt, Sample, Task

logger = logging.getLogger("p2pcast.learner")

LEAST_TOKENS: Final = 63
"""Tokens up to which prompts are added to one sequence: with the token that an engine samples after them, they fit a
server with --max-model-len 64.
"""
MOST_PROMPTS: Final = 1024
"""Prompts that are looked at for one probe set."""
PLAY_S: Final = 30.0
"""Longest time in seconds from the start of a play to its first prompt."""


class _PromptReadError(Exception):
    """Ends a play once its first prompt is known."""


class _PromptReader:
    """A sampler that ends the play. ``prompt_ids``: of the play's first turn."""

    def __init__(self) -> None:
        self.prompt_ids: tuple[int, ...] | None = None

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        self.prompt_ids = tuple(int(token) for token in prompt_ids)
        raise _PromptReadError


def probe_set_of(
    task: Task, prompts: Iterable[Prompt], count: int, vocabulary: int, positions: int | None = None
) -> ProbeSet | None:
    """``count``: sequences; each has an equal share of MAX_PROBE_TOKENS, and is cut there. ``positions``: of the model;
    each sequence leaves one for the token that an engine samples. Prompts in one sequence are cut at LEAST_TOKENS, and
    a longer prompt is not, since engines play it. None, with a warning, if the task has no prompt of two tokens, or
    tokens that the model does not have.
    """
    most = MAX_PROBE_TOKENS // count
    if positions is not None:
        most = min(most, max(2, positions - 1))
    found: list[tuple[int, ...]] = []
    tokens: tuple[int, ...] = ()
    longest = 0
    for prompt in islice(prompts, MOST_PROMPTS):
        asked = _asked(task, prompt)
        if asked is None:
            return None
        tokens, longest = tokens + asked, max(longest, len(asked))
        if len(tokens) >= min(LEAST_TOKENS, most):
            found.append(tokens[: min(most, max(LEAST_TOKENS, longest))])
            tokens, longest = (), 0
        if len(found) == count:
            break
    else:
        found += [tokens] if len(tokens) >= 2 else []
    try:
        return ProbeSet.checked(found, vocabulary)
    except UsageError as error:
        logger.warning("engines are not probed: the prompts of task %s are no probe set: %s", task.name, error)
        return None


def probe_prompts_of(name: str, task: Task, seed: int) -> Generator[Prompt]:
    """Prompts of held-out problems; of problems that are trained on, for a task that holds none out. ``name``: of the
    task, as on the command line. Raises FaultyPromptError, LocalError.
    """
    with contextlib.closing(prompts_of(name, task, seed, held_out=True)) as prompts:
        try:
            first = next(prompts, None)
        except FaultyPromptError:
            raise
        except UsageError:
            first = None
        if first is not None:
            yield first
            yield from prompts
            return
    with contextlib.closing(prompts_of(name, task, seed)) as prompts:
        yield from prompts


def _asked(task: Task, prompt: Prompt) -> tuple[int, ...] | None:
    """The token ids of the play's first prompt; None, with an error in the log, if the task fails before it."""
    group = Group(
        id=bytes(16),
        size=1,
        purpose="evaluate",
        task=task.name,
        task_hash=task.hash,
        prompt=prompt.prompt,
        seed=0,
        temperature=0.0,
        max_tokens=prompt.max_tokens,
        stop_token_ids=tuple(task.stop_token_ids),
        pinned=Version(0, 0),
    )
    reader = _PromptReader()
    job = job_of(group, 0, bytes(16), Version(0, 0))

    async def play() -> None:
        await asyncio.wait_for(task.play(reader, job), PLAY_S)

    try:
        asyncio.run(play())
    except Exception:
        # The reader's error ends the play, and a task may turn it into another one.
        if reader.prompt_ids is None:
            logger.exception("engines are not probed: task %s failed before its first prompt", task.name)
    return reader.prompt_ids
