"""The child's end of ``killable_child``: answers requests on private copies of stdin and stdout.

    request, answer   u32 length, little-endian; msgpack

The first message is an answer: the process is ready. Each request then has one answer. The parent's death and the end
of the input end the child. Prints of a user's code go to stderr, so that no print can be taken for an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from p2pcast.ground.errors import P2PCastError
from p2pcast.tasks.child_processes.child_faults import fault_with_place
from p2pcast.tasks.task import Task
from p2pcast.tasks.task_loader import load_task

LENGTH_BYTES = 4
_PR_SET_PDEATHSIG = 1


class ChildChannel:
    """The child's channel to its parent. ``parent``: the parent's process id."""

    def __init__(self, parent: int) -> None:
        _die_with(parent)
        self._requests, self._answers = _own_descriptors()
        self.closed = False
        """Whether this is a forked copy of the process that was started."""

    def task(self, name: str) -> Task | None:
        """Return the task with this name. If it cannot be loaded, report that to the parent and return None."""
        try:
            return load_task(name, Path.cwd())
        except P2PCastError as error:
            self.send(["failed", fault_with_place(error)])
            return None

    def requests(self) -> Iterator[Any]:
        """Yield requests until the input is closed."""
        while len(header := self._requests.read(LENGTH_BYTES)) == LENGTH_BYTES:
            yield msgpack.unpackb(self._requests.read(int.from_bytes(header, "little")))

    async def messages(self) -> AsyncIterator[Any]:
        """Yield requests as they arrive, while the event loop does other work."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._requests)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                size = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
                yield msgpack.unpackb(await reader.readexactly(size), use_list=False)

    def close_in_copies(self) -> None:
        """Close the channel in processes that a user's code forks from this one."""
        os.register_at_fork(after_in_child=self._close)

    def _close(self) -> None:
        self.closed = True
        for file in (self._requests, self._answers):
            with contextlib.suppress(OSError, ValueError):
                os.close(file.fileno())

    def send(self, answer: list[Any]) -> None:
        if self.closed:
            os._exit(1)
        packed = msgpack.packb(answer)
        self._answers.write(len(packed).to_bytes(LENGTH_BYTES, "little") + packed)
        self._answers.flush()


class OutOfTime(BaseException):
    """Code inside ``cpu_limit`` took too long. Not an Exception, so that libraries do not catch it."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the block after that much processor time of this process. Code that returns to Python too
    late for that ends the process (SIGXCPU). Main thread alone.
    """
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    latest = math.ceil(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (latest if hard == resource.RLIM_INFINITY else min(latest, hard), hard))
    signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))


def _out_of_time(*_: object) -> None:
    raise OutOfTime


def limit_memory(memory_bytes: int) -> None:
    """Address space beyond what the interpreter and the imported modules map already."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + memory_bytes
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _own_descriptors() -> tuple[BinaryIO, BinaryIO]:
    """Return private copies of stdin and stdout. Afterwards a user's code reads nothing, and prints to stderr."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, answers


def _die_with(parent: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the request took effect
        os._exit(1)
