"""The child of ``task_process``: computes rewards of one task. Run as ``python -m p2pcast.tasks.task_checker``.

    first     u32 length, msgpack ["ready", hash] or ["failed", text]
    request   u32 length, msgpack [job, token_ids, mask]
    answer    u32 length, msgpack ["reward", number] or ["forged" | "failed", text]

Lengths are little-endian. The parent's death and the end of the input end the child. The task's prints go to
stderr, so that no print can be taken for an answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np

from p2pcast.errors import P2PCastError
from p2pcast.rollouts.job import Job
from p2pcast.tasks.task import ForgedPlayError, Task
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
    job, token_ids, mask = msgpack.unpackb(request)
    try:
        found = float(task.reward(Job.from_bytes(job), np.frombuffer(token_ids, "<u4"), np.frombuffer(mask, "u1")))
    except ForgedPlayError as error:
        return ["forged", str(error)[:MAX_TEXT]]
    except Exception as error:  # noqa: BLE001 - whatever a user's task raises
        return ["failed", f"{type(error).__name__}: {error}"[:MAX_TEXT]]
    return ["reward", found] if math.isfinite(found) else ["failed", f"a reward of {found}"]


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
