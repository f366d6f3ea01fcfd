"""The child of ``task_process``: computes rewards of one task. Run as ``python -m p2pcast.tasks.task_checker``.

    first     u32 length, msgpack ["ready", hash] or ["failed", text]
    request   u32 length, msgpack [job, token_ids, mask, claims]; claims: null or [stop, turns, loss_mask]
    answer    u32 length, msgpack ["reward", number] or ["forged" | "failed", text]

Claims are fields of a result, checked against the task's own play of the same tokens; turns and loss_mask may be null.
Lengths are little-endian. The parent's death and the end of the input end the child. The task's prints go to
stderr, so that no print can be taken for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np

from p2pcast.errors import P2PCastError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.task import ForgedPlayError, Sample, Task
from p2pcast.tasks.task_loader import load_task

LENGTH_BYTES = 4
MAX_TEXT = 300
"""Most characters of a failure."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """argv: the task's name, the memory limit in bytes, the process id of the parent."""
    name, memory_bytes, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _die_with(parent)
    requests, answers = _own_descriptors()
    try:
        task = load_task(name, Path.cwd())
    except P2PCastError as error:
        _send(answers, ["failed", str(error)[:MAX_TEXT]])
        return
    _limit_memory(memory_bytes)
    _send(answers, ["ready", [task.hash, getattr(task, "failed_check_reward", None)]])
    while len(header := requests.read(LENGTH_BYTES)) == LENGTH_BYTES:
        _send(answers, _answer(task, requests.read(int.from_bytes(header, "little"))))


def _answer(task: Task, request: bytes) -> list[Any]:
    packed, ids, marks, claims = msgpack.unpackb(request)
    try:
        job, token_ids, mask = Job.from_bytes(packed), np.frombuffer(ids, "<u4"), np.frombuffer(marks, "u1")
        found = float(task.reward(job, token_ids, mask))
        if claims is not None:
            _check_claims(task, job, token_ids, mask, *claims)
    except ForgedPlayError as error:
        return ["forged", str(error)[:MAX_TEXT]]
    except Exception as error:  # noqa: BLE001 - whatever a user's task raises
        return ["failed", f"{type(error).__name__}: {error}"[:MAX_TEXT]]
    return ["reward", found] if math.isfinite(found) else ["failed", f"a reward of {found}"]


def _check_claims(
    task: Task, job: Job, token_ids: np.ndarray, mask: np.ndarray, stop: str, turns: bytes | None, loss: bytes | None
) -> None:
    """Raises ForgedPlayError for what the task's own play would not have said."""
    recorded = _RecordedTurns(token_ids, mask)
    try:
        played = asyncio.run(task.play(recorded, job))
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


class _RecordedTurns:
    """A sampler that says what a finished play says: a turn ends with a stop token or at its limit."""

    def __init__(self, token_ids: np.ndarray, mask: np.ndarray) -> None:
        self._token_ids, self._mask = token_ids, mask
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
        sampled = self._mask[start : start + most] != 0
        count = len(sampled) if sampled.all() else int(sampled.argmin())
        said = self._token_ids[start : start + count]
        stops = np.flatnonzero(np.isin(said, list(stop_token_ids)))
        if len(stops):
            said = said[: int(stops[0]) + 1]
        elif not count or count < most:
            raise ForgedPlayError(f"the turn from token {start} on ends before its limit, and not with a stop token")
        return Sample(said.tolist(), [0.0] * len(said), (), "end" if len(stops) else "length")


def _send(answers: BinaryIO, answer: list[Any]) -> None:
    packed = msgpack.packb(answer)
    answers.write(len(packed).to_bytes(LENGTH_BYTES, "little") + packed)
    answers.flush()


def _own_descriptors() -> tuple[BinaryIO, BinaryIO]:
    """Private copies of stdin and stdout. Afterwards the task reads nothing there, and prints to stderr."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, answers


def _limit_memory(memory_bytes: int) -> None:
    """Address space beyond what the interpreter and the task's modules map already."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + memory_bytes
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _die_with(parent: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the request took effect
        os._exit(1)


if __name__ == "__main__":
    main()
