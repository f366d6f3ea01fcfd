"""The parent's end of a child process that runs a user's code and answers requests.

Guarantees: ``kill`` kills the process and everything that it started. The process sees no secrets in its environment.
An answer above MAX_ANSWER_BYTES is not read. What the process prints becomes plain lines of the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import msgpack

from p2pcast.daemon.user_code import child_environment
from p2pcast.ground import limits
from p2pcast.ground.errors import RetryableError
from p2pcast.tasks.child_processes.child_channel import LENGTH_BYTES
from p2pcast.tasks.child_processes.child_output import ChildOutput

MAX_ANSWER_BYTES = 8 * limits.MIB
BROKEN = (OSError, EOFError, ValueError, msgpack.UnpackException)
"""Raised if a process died or its output is invalid. Catch TimeoutError, which is an OSError, before these."""
START_S = 120.0
"""Time limit in seconds for a process to import its task."""
PROCESS_BYTES = 2 * limits.GIB
"""Default memory limit of a process, in bytes beyond what it has mapped at its start."""


class ChildDownError(RetryableError):
    """A task's process cannot be started. The fault is this machine's, not a result's."""


class KillableChild:
    """One child process."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        requests: asyncio.WriteTransport,
        answers_pipe: asyncio.ReadTransport,
        answers: asyncio.StreamReader,
        output: ChildOutput,
    ) -> None:
        self._output = output
        self._process, self._requests, self._answers_pipe, self._answers = process, requests, answers_pipe, answers

    @classmethod
    async def start(cls, module: str, *words: str, pass_fds: Sequence[int] = ()) -> KillableChild:
        """Start ``python -m module words… PID``, with the process id of this process. Raises OSError."""
        # Pipes of our own: an event loop may take sockets, and a child that writes to its input would break them.
        to_child, from_child, said = _pipes(3)
        ends = [os.fdopen(to_child[1], "wb", 0), os.fdopen(from_child[0], "rb", 0), os.fdopen(said[0], "rb", 0)]
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *words, str(os.getpid())),
                env=child_environment() | {"PYTHONHASHSEED": "0"},  # equal requests visit sets in equal order
                stdin=to_child[0],
                stdout=from_child[1],
                stderr=said[1],
                start_new_session=True,
                pass_fds=pass_fds,
            )
        except BaseException:
            for end in ends:
                end.close()
            raise
        finally:
            os.close(to_child[0])
            os.close(from_child[1])
            os.close(said[1])
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        output = ChildOutput(f"{module.rpartition('.')[2]} {process.pid}")
        transports: list[Any] = []
        try:
            transports += (await loop.connect_write_pipe(asyncio.Protocol, ends.pop(0)))[:1]
            transports += (await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), ends.pop(0)))[:1]
            transports += (await loop.connect_read_pipe(lambda: output, ends.pop(0)))[:1]
        except BaseException:  # a pipe that was being connected is closed by the event loop
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for one in (*transports, *ends):
                one.close()
            await process.wait()
            raise
        return cls(process, transports[0], transports[1], reader, output)

    @classmethod
    async def of_task(
        cls,
        purpose: str,
        module: str,
        task: str,
        task_hash: bytes,
        *words: str,
        start_s: float = START_S,
        pass_fds: Sequence[int] = (),
    ) -> tuple[KillableChild, Any]:
        """A process that has imported a task of this hash, and what it says of the task besides. ``purpose``: for
        messages. ``words`` follow the task's name. Raises ChildDownError.
        """
        try:
            child = await cls.start(module, task, *words, pass_fds=pass_fds)
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise ChildDownError(f"no process for {purpose} can be made ({why}): free memory or processes") from None
        try:
            async with asyncio.timeout(start_s):
                what, found = await child.answer()
        except BROKEN as error:
            await child.kill()
            why = f"no answer within {start_s:g} s" if isinstance(error, TimeoutError) else type(error).__name__
            raise ChildDownError(f"the process for {purpose} did not start ({why}): see its messages above") from None
        except BaseException:
            await child.kill()
            raise
        if what != "ready" or type(found) is not tuple or len(found) != 2 or found[0] != task_hash:
            await child.kill()
            changed = f"task {task} has changed on disk: restart this program"
            raise ChildDownError(f"the process for {purpose} did not start: {found if what == 'failed' else changed}")
        return child, found[1]

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def end(self) -> str:
        """How the process ended, for messages."""
        code = self._process.returncode
        return "runs" if code is None else f"exited with status {code}" if code >= 0 else f"died of signal {-code}"

    async def ask(self, request: bytes) -> tuple[str, Any]:
        """Raises BROKEN."""
        self.send(request)
        return await self.answer()

    def send(self, request: bytes) -> None:
        self._requests.write(len(request).to_bytes(LENGTH_BYTES, "little") + request)

    async def answer(self) -> tuple[str, Any]:
        """Raises BROKEN."""
        size = int.from_bytes(await self._answers.readexactly(LENGTH_BYTES), "little")
        if size > MAX_ANSWER_BYTES:
            raise ValueError("too long an answer")
        answer = msgpack.unpackb(await self._answers.readexactly(size), use_list=False)
        if type(answer) is not tuple or len(answer) != 2:
            raise ValueError("an answer has two parts")
        return answer[0], answer[1]

    async def wait(self) -> None:
        await self._process.wait()

    async def kill(self) -> None:
        """Kill the process and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if not self._requests.is_closing():
            self._requests.abort()
        self._answers_pipe.close()
        try:
            await self._process.wait()
        finally:
            self._output.close()
        await asyncio.sleep(0)  # the transports close their pipes in the loop's next turn


def _pipes(count: int) -> list[tuple[int, int]]:
    """Make pipes. Raises OSError, and then leaves none open."""
    made: list[tuple[int, int]] = []
    try:
        for _ in range(count):
            made += [os.pipe()]
    except OSError:
        for end in (end for pipe in made for end in pipe):
            os.close(end)
        raise
    return made
