"""Starts and stops workers with commands, such as a cloud's own tool or a script over ssh.

Each command gets the worker's name in ``P2PCAST_WORKER``, and is killed with all its children when its time is up. Its
output goes to a file instead of a pipe, because a process that a start command leaves behind could hold a pipe open.
The list command prints the names of running workers, one per line. Without it, workers that an earlier controller
started are unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Sequence
from typing import IO

from p2pcast.files.atomic_files import explained
from p2pcast.ground.errors import LocalError

TIME_LIMIT_S = 600.0
"""Time limit of a command, in seconds: clouds take minutes to start a machine."""
GRACE_S = 5.0
"""Time from SIGTERM to SIGKILL, in seconds."""
SHOWN_BYTES = 2000
"""How much of the end of a failed command's output the error shows, in bytes."""
MOST_OUTPUT_BYTES = 1 << 20
"""Most output of the list command, in bytes: enough for the names of thousands of workers."""


class CommandProvider:
    changes = True

    def __init__(
        self,
        start: Sequence[str],
        stop: Sequence[str],
        listing: Sequence[str] | None = None,
        *,
        limit_s: float = TIME_LIMIT_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._start, self._stop, self._listing = list(start), list(stop), listing and list(listing)
        self._limit_s, self._grace_s = limit_s, grace_s
        self._started: dict[str, None] = {}

    async def running(self) -> Sequence[str]:
        if not self._listing:
            return list(self._started)
        text = await self._run(self._listing, "")
        return list(dict.fromkeys(name for line in text.splitlines() if (name := line.strip())))

    async def start(self, name: str) -> None:
        await self._run(self._start, name)
        self._started[name] = None

    async def stop(self, name: str) -> None:
        await self._run(self._stop, name)
        self._started.pop(name, None)

    async def _run(self, command: Sequence[str], name: str) -> str:
        """Run a command and return its output. Raises LocalError if it fails or takes too long."""
        with tempfile.TemporaryFile() as output:
            with explained("run", command[0]):
                process = await asyncio.create_subprocess_exec(
                    *command,
                    env={**os.environ, "P2PCAST_WORKER": name},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                async with asyncio.timeout(self._limit_s):
                    status = await process.wait()
            except TimeoutError:
                raise LocalError(
                    f"{_about(command, name)}: no end after {self._limit_s:g} s, so it was killed{_end(output)}"
                ) from None
            finally:
                await self._kill(process)
            if status:
                how = f"ended by signal {-status}" if status < 0 else f"exit status {status}"
                raise LocalError(f"{_about(command, name)}: {how}{_end(output)}")
            output.seek(0)
            return output.read(MOST_OUTPUT_BYTES).decode(errors="replace")

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        """Terminate a command that is still running, and its children."""
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._grace_s):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            # Children may outlive the command that was terminated.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _about(command: Sequence[str], name: str) -> str:
    return f"provider command {command[0]}" + (f" for worker {name}" if name else "")


def _end(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - SHOWN_BYTES))
    text = output.read().decode(errors="replace").strip()
    return f"; its output ends with:\n{text}" if text else ""
