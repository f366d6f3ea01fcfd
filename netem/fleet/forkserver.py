"""``python -m netem.fleet.forkserver``: imports p2pcast once, and forks a process for each request. Makes fleets
possible that would otherwise exceed a machine's memory.

A forked process runs the ``p2pcast`` command with its own command line, log, session and exit code. It starts without
imports, and shares all unmodified memory with the others.

A request is a line of JSON on stdin: {"argv", "log"}. Optional keys are {"net"}, the path of the process's network
namespace, and {"entry"}, a module whose ``main`` runs in place of the ``p2pcast`` command. Arguments are modules to be
imported first. Stdout has a line {"pid"} for each request, in order, and a line {"pid", "code"} for each ended process
(negative: the signal). All processes end at the end of stdin, or if this process is killed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from netem.fleet.die_with_parent import die_with
from p2pcast.codec.kernel_warmup import warm_up

CLONE_NEWNET = 0x40000000
COMMAND = "p2pcast.cli"
"""The module of the ``p2pcast`` command."""
BORN_S = 300.0
"""Start of the fork server on a machine that has to compile kernels first."""
END_S = 15.0
"""Time for the server to kill its processes."""


class Forked:
    """A forked process with the interface of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def end(self, code: int) -> None:
        """Record the exit code; negative for a signal."""
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The client of a fork server process. ``modules``: imported before the first fork. ``log``: the server's own."""

    def __init__(self, log: Path, modules: Sequence[str]) -> None:
        self._born: queue.Queue[Forked | None] = queue.Queue()
        self._running: dict[int, Forked] = {}
        # In its own session: Ctrl-C reaches only the process that asked for it, which ends its children in order.
        with log.open("ab") as errors:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-m", "netem.fleet.forkserver", *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONFAULTHANDLER": "1"},
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read_answers, name="p2pcast-fork-server", daemon=True)
        self._reader.start()

    def fork(self, argv: Sequence[str], log: Path, net: str | None, entry: str | None) -> Forked | None:
        """None if the server has ended, or does not answer."""
        assert self._server.stdin is not None
        asked = {"argv": list(argv), "log": str(log), "net": net, "entry": entry}
        with suppress(BrokenPipeError):
            self._server.stdin.write(json.dumps(asked).encode() + b"\n")
            self._server.stdin.flush()
        try:
            return self._born.get(timeout=BORN_S)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Kill all processes that still run."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with suppress(OSError):
            self._server.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._server.wait(END_S)
        self._server.kill()
        self._server.wait()
        self._reader.join(END_S)
        self._server.stdout.close()

    def _read_answers(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            said = json.loads(line)
            if "code" in said:
                self._running.pop(said["pid"]).end(said["code"])
            else:
                forked = self._running[said["pid"]] = Forked(said["pid"])
                self._born.put(forked)
        for forked in self._running.values():
            forked.end(-signal.SIGKILL)  # no process outlives the server
        self._born.put(None)


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
        os.setsid()
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
