"""p2pcast processes that share what all of them load: ``python -m netem.nursery`` imports it once, and forks for each that is asked for.

What is forked runs the ``p2pcast`` command as any other process would, with a command line, a log and an exit code of its own; only its start costs nothing, and what
nobody writes to lies in memory once. For fleets that would not fit into a machine otherwise.

One line of JSON on stdin asks for a process: {"argv", "log"}, and {"net"}, the path of the network namespace that it is to live in, if not in this one; on stdout a line says {"pid"}, in the order of asking, and one {"pid", "code"} that one has ended (negative: by
that signal). At the end of stdin everything ends, and so it does when this process is killed.
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

from p2pcast.cli import main as command
from p2pcast.codec.warm import warm_up

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1


class Born:
    """One of its processes, with what ``asyncio.subprocess.Process`` has."""

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


class Nursery:
    """The side that asks."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._asked: list[asyncio.Future[Born]] = []
        self._born: dict[int, Born] = {}
        self._hearing = asyncio.create_task(self._hear(), name="nursery")

    @classmethod
    async def start(cls) -> Nursery:
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(sys.executable, "-m", "netem.nursery", stdin=pipe, stdout=pipe))

    async def bear(self, argv: list[str], log: Path) -> Born:
        assert self._process.stdin is not None
        self._asked.append(asyncio.get_running_loop().create_future())
        answer = self._asked[-1]
        self._process.stdin.write(json.dumps({"argv": argv, "log": str(log)}).encode() + b"\n")
        return await answer

    async def close(self) -> None:
        """Everything that still runs is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._hearing

    async def _hear(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said = json.loads(line)
            if "code" in said:
                self._born.pop(said["pid"]).ended.set_result(said["code"])
            else:
                born = self._born[said["pid"]] = Born(said["pid"])
                self._asked.pop(0).set_result(born)


def main() -> None:
    for module in ("rollout_node.peer", "trainer_node.hub"):
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
            _bury(alive)
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
        _bury(alive, os.waitpid(-1, 0))


def _fork(asked: dict[str, Any]) -> int:
    nursery = os.getpid()
    pid = os.fork()
    if pid:
        _say({"pid": pid})
        return pid
    code = 1
    try:
        _leash(nursery)
        _become(asked["argv"], asked["log"], asked.get("net"))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # it says so in its own log
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _leash(nursery: int) -> None:
    """Be killed when it dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != nursery:
        raise SystemExit(1)


def _become(argv: list[str], log: str, net: str | None) -> None:
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
    command()


def _bury(alive: set[int], ended: tuple[int, int] = (0, 0)) -> None:
    while True:
        if not ended[0]:
            try:
                ended = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
        if not ended[0]:
            return
        alive.discard(ended[0])
        _say({"pid": ended[0], "code": os.waitstatus_to_exitcode(ended[1])})
        ended = (0, 0)


def _say(what: dict[str, int]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    main()
