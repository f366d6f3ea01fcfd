"""p2pcast processes at the hosts of an emulated network: forked from a process that has loaded everything
(``netem.fleet.forkserver``), and otherwise the same as users start.

Promises:

- All daemons are gone at the end of the block.
- If the process that asked for them dies, the kernel kills them.

A daemon that ends unexpectedly is one clear error with the end of its log.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from p2pcast.ground.errors import LocalError

BORN_S = 300.0
"""Start of the fork server on a machine that has to compile kernels first."""
GRACE_S = 15.0
"""Time from the first signal to SIGKILL."""
POLL_S = 0.02
TAIL_LINES = 12
MODULE = "netem.fleet.forkserver"


@dataclass(slots=True)
class Daemon:
    name: str
    pid: int
    log: Path
    code: int | None = None
    """Exit code of an ended daemon; negative for a signal."""
    expected: bool = False
    """Whether the daemon may end."""

    def failure(self, what: str) -> LocalError:
        """An error that says ``what`` happened, with the end of the log."""
        tail = ""
        with suppress(OSError):
            tail = " / ".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        return LocalError(f"{what}; the last lines of {self.name}: {tail or 'none'}")

    def signal(self, number: signal.Signals) -> None:
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Daemons:
    """Starts daemons; as a context manager, ends them. ``logs``: folder for their output. ``modules``: imported before
    the first start, for daemons that need more than hubs and peers do.
    """

    def __init__(self, logs: Path, modules: Sequence[str] = ()) -> None:
        self._logs, self._modules = logs, modules
        self.daemons: dict[str, Daemon] = {}
        self._born: queue.Queue[int | None] = queue.Queue()
        self._by_pid: dict[int, Daemon] = {}
        self._codes: dict[int, int] = {}

    def __enter__(self) -> Daemons:
        # In its own session: Ctrl-C reaches only the process that made the network, which ends its daemons in order.
        with (self._logs / "fork-server.log").open("ab") as log:
            self._fork_server = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, *self._modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read_answers, name="p2pcast-fork-server", daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._fork_server.stdin is not None
        assert self._fork_server.stdout is not None
        try:
            if kind is None:
                self.stop(*self.daemons)
        finally:
            # The fork server kills the remaining processes at the end of its input.
            with suppress(OSError):
                self._fork_server.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._fork_server.wait(GRACE_S)
            self._fork_server.kill()
            self._fork_server.wait()
            self._reader.join(GRACE_S)
            self._fork_server.stdout.close()

    def start(
        self, name: str, words: Sequence[str | Path], space: str | None = None, *, entry: str | None = None
    ) -> Daemon:
        """``p2pcast WORDS``, in the network namespace at the path ``space``. ``entry``: a module whose ``main`` runs in
        place of the command. A name may be reused after its daemon has ended; the log is then continued.
        """
        assert self._fork_server.stdin is not None
        if name in self.daemons and self.daemons[name].code is None:
            raise ValueError(f"{name} is running")
        log = self._logs / f"{name}.log"
        asked = {"argv": [str(word) for word in words], "log": str(log), "net": space, "entry": entry}
        with suppress(BrokenPipeError):
            self._fork_server.stdin.write(json.dumps(asked).encode() + b"\n")
            self._fork_server.stdin.flush()
        try:
            pid = self._born.get(timeout=BORN_S)
        except queue.Empty:
            pid = None
        if pid is None:
            raise Daemon("the fork server", 0, self._logs / "fork-server.log").failure(f"{name} could not be started")
        self.daemons[name] = self._by_pid[pid] = Daemon(name, pid, log)
        if pid in self._codes:
            self.daemons[name].code = self._codes[pid]
        return self.daemons[name]

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of running daemons."""
        return {name: daemon.pid for name, daemon in self.daemons.items() if daemon.code is None}

    def check(self) -> None:
        """Raises LocalError if a daemon has ended unexpectedly."""
        for daemon in self.daemons.values():
            if daemon.code is not None and not daemon.expected:
                raise daemon.failure(f"{daemon.name} ended with {_exit(daemon.code)}")

    def stop(self, *names: str, polite: signal.Signals = signal.SIGTERM) -> None:
        """End these daemons; daemons that outlive ``GRACE_S`` are killed."""
        chosen = [self.daemons[name] for name in names]
        for daemon in chosen:
            daemon.expected = True
            daemon.signal(polite)
            # A stopped process handles other signals only after SIGCONT.
            daemon.signal(signal.SIGCONT)
        deadline = time.monotonic() + GRACE_S
        while any(daemon.code is None for daemon in chosen):
            if time.monotonic() > deadline:
                for daemon in chosen:
                    daemon.signal(signal.SIGKILL)
            if self._fork_server.poll() is not None:
                return
            time.sleep(POLL_S)

    def _read_answers(self) -> None:
        assert self._fork_server.stdout is not None
        for line in self._fork_server.stdout:
            said = json.loads(line)
            pid = said["pid"]
            if "code" not in said:
                self._codes.pop(pid, None)
                self._born.put(pid)
                continue
            self._codes[pid] = said["code"]
            if pid in self._by_pid:
                self._by_pid[pid].code = said["code"]
        self._born.put(None)


def _exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
