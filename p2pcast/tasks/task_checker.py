"""The child of ``task_process``: computes rewards of one task. Run as ``python -m p2pcast.tasks.task_checker``.

    first     ["ready", [hash, reward of a failed check]] or ["failed", text]
    request   [[job, token_ids, mask, claims], …]; claims: null or [stop, turns, loss_mask]
    answers   of each check ["reward", number] or ["forged" | "failed" | "hung", text];
              instead of the next one, after ``TOGETHER_S``: ["later", null], which ends the request

Messages are those of ``child_channel``. Claims are fields of a result, checked against the task's own play of the same
tokens; turns and loss_mask may be null. Asyncio tasks of a play end with its check.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Self

import numpy as np

from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import reward_fault
from p2pcast.tasks.child_processes.child_channel import ChildChannel, OutOfTime, cpu_limit, limit_memory
from p2pcast.tasks.child_processes.child_faults import fault_with_place
from p2pcast.tasks.play import leading, up_to_stop
from p2pcast.tasks.task import ForgedPlayError, Sample, Task, Trajectory

TOGETHER_S = 0.05
"""Time in seconds after which no further checks of a request are made, because other requests wait."""


def main() -> None:
    """argv: the task's name, the memory limit in bytes, the process id of the parent."""
    name, memory_bytes, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    channel = ChildChannel(parent)
    if (task := channel.task(name)) is None:
        return
    limit_memory(memory_bytes)
    channel.send(["ready", [task.hash, getattr(task, "failed_check_reward", None)]])
    with CheckLoop() as loop:
        for request in channel.requests():
            for answer in answers_of(task, request, loop):
                channel.send(answer)


def answers_of(task: Task, request: Sequence[list[Any]], loop: CheckLoop) -> Iterator[list[Any]]:
    until_s = time.monotonic() + TOGETHER_S
    for number, one in enumerate(request):
        if number and time.monotonic() > until_s:
            yield ["later", None]
            return
        yield answer_of(task, one, loop)


def answer_of(task: Task, request: list[Any], loop: CheckLoop) -> list[Any]:
    packed, ids, marks, claims = request
    try:
        job, token_ids, mask = Job.from_bytes(packed), np.frombuffer(ids, "<u4"), np.frombuffer(marks, "u1")
        with nullcontext() if (cpu_s := getattr(task, "check_cpu_s", None)) is None else cpu_limit(cpu_s):
            found = float(task.reward(job, token_ids, mask))
            if claims is not None:
                check_claims(task, job, token_ids, mask, loop, *claims)
    except OutOfTime:
        return ["hung", f"the check took more than {cpu_s:g} s of processor time"]
    except ForgedPlayError as error:
        return ["forged", fault_with_place(error)]
    except Exception as error:  # noqa: BLE001 - whatever a user's task raises
        return ["failed", fault_with_place(error)]
    return ["reward", found] if (wrong := reward_fault(found)) is None else ["failed", wrong]


def check_claims(
    task: Task,
    job: Job,
    token_ids: np.ndarray,
    mask: np.ndarray,
    loop: CheckLoop,
    stop: str,
    turns: bytes | None,
    loss: bytes | None,
) -> None:
    """Raises ForgedPlayError for what the task's own play would not have produced."""
    recorded = _RecordedTurns(token_ids, mask)
    try:
        played = loop.run(task.play(recorded, job))
    finally:
        # A task may catch the sampler's error.
        if recorded.forged is not None:
            raise recorded.forged
    if not (np.array_equal(played.token_ids, token_ids) and np.array_equal(played.mask, mask)):
        raise ForgedPlayError("the task plays these turns with other tokens of its own")
    if stop != played.stop:
        raise ForgedPlayError(f"the play stopped with {played.stop!r}, not {stop!r}")
    if turns is not None and not np.array_equal(np.frombuffer(turns, "<u4"), played.turns):
        raise ForgedPlayError("the turns of the policy begin elsewhere")
    stated = getattr(task, "loss_mask", None)
    if stated is None and loss is not None:
        raise ForgedPlayError(f"a loss mask, and task {task.name} states none")
    if stated is not None and not np.array_equal(np.frombuffer(loss or b"", "u1"), stated(job, token_ids, mask)):
        raise ForgedPlayError("the loss mask is not the task's")


class CheckLoop:
    """One event loop for all plays of a process. ``asyncio.run`` would cost more than the play of most results: it
    makes a loop and handles SIGINT, and Python then writes the whole play as text.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, play: Coroutine[Any, Any, Trajectory]) -> Trajectory:
        """Run a play. Raises what the play raises. Tasks that the play leaves running are cancelled."""
        loop = self._runner.get_loop()
        try:
            return loop.run_until_complete(play)
        finally:
            if asyncio.all_tasks(loop):
                self._runner.close()
                self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()


class _RecordedTurns:
    """A sampler that replays a finished play: a turn ends with a stop token or at its limit."""

    def __init__(self, token_ids: np.ndarray, mask: np.ndarray) -> None:
        self._token_ids: list[int] = token_ids.tolist()
        self._mask = mask
        self.forged: ForgedPlayError | None = None

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        try:
            return self._turn(len(prompt_ids), max_tokens, stop_token_ids)
        except ForgedPlayError as error:
            self.forged = error
            raise

    def _turn(self, start: int, most: int, stop_token_ids: Sequence[int]) -> Sample:
        count = leading(self._mask[start : start + most] != 0)
        said = up_to_stop(self._token_ids[start : start + count], stop_token_ids)
        ended = bool(said) and said[-1] in stop_token_ids
        if not ended and (not count or count < most):
            raise ForgedPlayError(f"the turn from token {start} on ends before its limit, and not with a stop token")
        return Sample(said, [0.0] * len(said), (), "end" if ended else "length")


if __name__ == "__main__":
    main()
