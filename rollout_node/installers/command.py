"""``exec:CMD``: a user's command installs each version.

Staging writes the version's folder into ``scratch``. Committing runs the command, without a shell, with these
environment variables:

- ``P2PCAST_VERSION`` (branch.step) and ``P2PCAST_STEP``
- ``P2PCAST_DIR``: the version's folder
- ``P2PCAST_SHADOW``: the safetensors file in memory, which does not change while the command runs

Exit status 0 means that the version is in use. Its folder is kept even if later versions fail. The command's output
goes to ``scratch/command.log``. p2pcast cannot read the weights that the command installs, so a check never finds the
target at a wrong version, and an audit reports every tensor as unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from p2pcast.codec.layout import Layout
from p2pcast.files.atomic_files import explained
from p2pcast.ground import limits
from p2pcast.ground.errors import LocalError, P2PCastError, UsageError
from p2pcast.ground.plain_text import decodable
from p2pcast.ground.version import Version
from p2pcast.process.daemon_process import original_umask
from rollout_node.installers.checkpoint_folder import FolderInstaller, SmallFiles
from rollout_node.installers.installer import Abilities, Audit, CommitReport

LOG_NAME = "command.log"
KEEP = 2
"""Number of folders to keep: the version in use and the next one."""
_GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL for a command that has run too long."""
_SHOWN_LINES = 5


class CommandInstaller:
    """Runs ``command`` for each version, for at most ``timeout_s``."""

    def __init__(
        self, command: str, scratch: Path, files: SmallFiles, *, timeout_s: float = 600.0, name: str | None = None
    ) -> None:
        """Raises UsageError if ``command`` is not a valid command line."""
        self.name = name or decodable(f"exec:{command}")
        try:
            self._argv = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"{self.name}: {error}") from None
        if not self._argv:
            raise UsageError("exec: needs a command, as in exec:'./reload --quick'")
        self._scratch = scratch
        self._timeout_s = timeout_s
        self._folders = FolderInstaller(scratch, files, keep=KEEP, name=self.name)
        self._shadow = Path()
        self.abilities = Abilities()
        self.committed: Version | None = None
        self.ready = False

    @property
    def commit_needs_shadow(self) -> bool:
        return True

    async def start(self) -> None:
        """Raises LocalError if the command does not exist or the scratch folder cannot be used."""
        if shutil.which(self._argv[0]) is None:
            raise LocalError(f"{self.name}: there is no command {self._argv[0]!r}, or it may not be run")
        await self._folders.start()

    async def check(self) -> None: ...

    async def stage(self, version: Version, shadow: Path) -> None:
        try:
            await self._folders.stage(version, shadow)
        except BaseException:
            self.ready = False
            raise
        self._shadow = shadow

    async def commit(self, version: Version) -> CommitReport:
        """Run the command; ``pause_s`` is its duration, an upper bound. Raises LocalError if the command fails or takes
        too long.
        """
        try:
            folder = await self._folders.publish(version)
        except P2PCastError:
            self.ready = False
            raise
        # It is unknown which version is in use until the command has finished.
        self.committed, self.ready = None, False
        began = time.monotonic()
        await self._execute(version, folder)
        took_s = time.monotonic() - began
        await self._folders.settle(version)
        self.committed, self.ready = version, True
        return CommitReport(took_s, detail={"command_s": round(took_s, 6), "folder": str(folder)})

    async def audit(self, layout: Layout, digests: Mapping[int, int]) -> Audit:
        if self.committed is None:
            raise LocalError(f"{self.name}: no version is in use here, so there is nothing to audit")
        return Audit(self.committed, [], [t.name for t in layout.tensors])

    async def close(self) -> None:
        await self._folders.close()

    async def _execute(self, version: Version, folder: Path) -> None:
        log = self._scratch / LOG_NAME
        environment = {
            **os.environ,
            "P2PCAST_VERSION": str(version),
            "P2PCAST_STEP": str(version.step),
            "P2PCAST_DIR": str(folder),
            "P2PCAST_SHADOW": str(self._shadow),
        }
        with explained("run", self._argv[0]), log.open("wb") as output:
            # Write to a file, not a pipe: a process that the command leaves behind could keep a pipe open.
            process = await asyncio.create_subprocess_exec(
                *self._command(),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await process.wait()
        except TimeoutError:
            raise LocalError(
                f"{self.name}: version {version} not committed: no end after {self._timeout_s:g} s, so it was stopped"
                f"{_last_lines(log)}"
            ) from None
        finally:
            await _stop(process)
        if status:
            how = f"ended by signal {-status}" if status < 0 else f"exit status {status}"
            raise LocalError(f"{self.name}: version {version} not committed: {how}{_last_lines(log)}")

    def _command(self) -> list[str]:
        """Return the command line, run with the umask of the user's shell instead of the peer's, so that other users
        may read the files that the command writes.
        """
        if (mask := original_umask()) < 0:
            return self._argv
        return ["/bin/sh", "-c", f'umask {mask:03o} && exec "$@"', "sh", *self._argv]


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Stop a command that is still running, and its children."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    except TimeoutError:
        pass
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _last_lines(log: Path) -> str:
    """Return the last lines of the command's output, for a message."""
    with explained("read", log), log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4 * limits.KIB))
        lines = file.read().decode(errors="replace").splitlines()
    shown = [line.strip() for line in lines if line.strip()][-_SHOWN_LINES:]
    return ": " + " | ".join(shown) if shown else f" (it printed nothing; see {log})"
