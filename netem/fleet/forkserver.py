"""``python -m netem.fleet.forkserver``: imports p2pcast once, and forks a process for each request. Makes fleets
possible that would otherwise exceed a machine's memory.

A forked process runs the ``p2pcast`` command with its own command line, log and exit code. It starts without imports,
and shares all unmodified memory with the others.

A request is a line of JSON on stdin: {"argv", "log"}. Optional keys are {"net"}, the path of the process's network
namespace, and {"entry"}, a module whose ``main`` runs in place of the ``p2pcast`` command. Arguments are modules to be
imported first. Stdout has a line {"pid"} for each request, in order, and a line {"pid", "code"} for each ended process
(negative: the signal). All processes end at the end of stdin, or if this process is killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from netem.fleet.die_with_parent import die_with
from p2pcast.codec.kernel_warmup import warm_up

CLONE_NEWNET = 0x40000000
COMMAND = "p2pcast.cli"
"""The module of the ``p2pcast`` command."""


class ForkedProcess:
    """A forked process with the interface of ``asyncio.subprocess.Process``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def returncode(self) -> int | None:
        return self.ended.result() if self.ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    def send_signal(self, number: int) -> None:
        if not self.ended.done():
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The client of a fork server process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._requested: list[asyncio.Future[ForkedProcess]] = []
        self._running: dict[int, ForkedProcess] = {}
        self._reader = asyncio.create_task(self._read_answers(), name="fork server")

    @classmethod
    async def start(cls) -> ForkServer:
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "netem.fleet.forkserver", stdin=pipe, stdout=pipe
            )
        )

    async def fork(self, argv: list[str], log: Path) -> ForkedProcess:
        assert self._process.stdin is not None
        self._requested.append(asyncio.get_running_loop().create_future())
        answer = self._requested[-1]
        self._process.stdin.write(json.dumps({"argv": argv, "log": str(log)}).encode() + b"\n")
        return await answer

    async def close(self) -> None:
        """Kill all processes that still run."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._reader

    async def _read_answers(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if "code" in said:
                self._running.pop(said["pid"]).ended.set_result(said["code"])
            else:
                forked = self._running[said["pid"]] = ForkedProcess(said["pid"])
                self._requested.pop(0).set_result(forked)


def main() -> None:
    for module in (COMMAND, "rollout_node.peer", "trainer_node.hub", *sys.argv[1:]):
        importlib.import_module(module)
    warm_up()
    gc.collect()
    gc.freeze()
    alive: set[int] = set()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    asked = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(alive)
        if 0 in ready:
            part = os.read(0, 65536)
            if not part:
                break
            *whole, asked = (asked + part).split(b"\n")
            for line in whole:
                alive.add(_fork(json.loads(line)))
    for pid in alive:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while alive:
        _reap(alive, os.waitpid(-1, 0))


def _fork(asked: dict[str, Any]) -> int:
    fork_server = os.getpid()
    pid = os.fork()
    if pid:
        _write({"pid": pid})
        return pid
    code = 1
    try:
        die_with(fork_server, signal.SIGKILL)
        _run_command(asked["argv"], asked["log"], asked.get("net"), asked.get("entry") or COMMAND)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # the traceback goes to the process's own log
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _run_command(argv: list[str], log: str, net: str | None, entry: str) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.closerange(3, 256)
    if net is not None:
        with open(net, "rb") as space:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
    sys.argv[1:] = argv
    importlib.import_module(entry).main()


def _reap(alive: set[int], ended: tuple[int, int] = (0, 0)) -> None:
    while True:
        if not ended[0]:
            try:
                ended = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
        if not ended[0]:
            return
        alive.discard(ended[0])
        _write({"pid": ended[0], "code": os.waitstatus_to_exitcode(ended[1])})
        ended = (0, 0)


def _write(what: dict[str, int]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    main()
