"""The parent's end of a child process that runs a user's code and answers requests.

Promises: ``kill`` ends the process with all that it started. The process sees no secret of the environment. An answer
above MAX_ANSWER_BYTES is not read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Any

import msgpack

from p2pcast import limits
from p2pcast.daemon.user_code import child_environment
from p2pcast.tasks.child_processes.child_channel import LENGTH_BYTES

MAX_ANSWER_BYTES = 8 * limits.MIB
BROKEN = (OSError, EOFError, ValueError, msgpack.UnpackException)
"""Raised for a process that died or writes nonsense. TimeoutError, which is an OSError, has to be caught before."""


class KillableChild:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, module: str, *words: str) -> KillableChild:
        """``python -m module words… PID``, with the process id of this process. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *words, str(os.getpid())),
            env=child_environment() | {"PYTHONHASHSEED": "0"},  # equal requests visit sets in equal order
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(process)

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def ask(self, request: bytes) -> tuple[str, Any]:
        """Raises BROKEN."""
        self.send(request)
        return await self.answer()

    def send(self, request: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(len(request).to_bytes(LENGTH_BYTES, "little") + request)

    async def answer(self) -> tuple[str, Any]:
        """Raises BROKEN."""
        assert self._process.stdout is not None
        size = int.from_bytes(await self._process.stdout.readexactly(LENGTH_BYTES), "little")
        if size > MAX_ANSWER_BYTES:
            raise ValueError("too long an answer")
        answer = msgpack.unpackb(await self._process.stdout.readexactly(size))
        if type(answer) is not list or len(answer) != 2:
            raise ValueError("an answer has two parts")
        return answer[0], answer[1]

    async def kill(self) -> None:
        """The process, and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._process.wait()
