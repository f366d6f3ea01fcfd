"""p2pcast's own processes, each at a host of an emulated network: forked from one that has loaded everything (``netem.nursery``), else what users start.

Promises: whatever happens, they are gone when the block is left, and killed by the kernel when the process that asked for them dies; one that ends when it should not
is one clear error with the end of its log.
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

from p2pcast.errors import LocalError

BORN_S = 120.0
"""Until the nursery has loaded everything, on a machine that compiles kernels first."""
GRACE_S = 15.0
"""From the polite signal to SIGKILL."""
POLL_S = 0.02
TAIL_LINES = 12
MODULE = "netem.nursery"


@dataclass(slots=True)
class Daemon:
    name: str
    pid: int
    log: Path
    code: int | None = None
    """Once it has ended: its exit code, negative by a signal."""
    expected: bool = False
    """Whether it may have ended."""

    def failure(self, what: str) -> LocalError:
        """``what`` went wrong, with the end of the log."""
        tail = ""
        with suppress(OSError):
            tail = " / ".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
        return LocalError(f"{what}; the last that {self.name} said: {tail or 'nothing'}")

    def signal(self, number: signal.Signals) -> None:
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Daemons:
    """Starts them; as a context manager, ends them. ``logs``: the folder for their output."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.daemons: dict[str, Daemon] = {}
        self._born: queue.Queue[int | None] = queue.Queue()
        self._by_pid: dict[int, Daemon] = {}
        self._codes: dict[int, int] = {}

    def __enter__(self) -> Daemons:
        # In a session of its own: Ctrl-C is for whoever made the network, who ends what runs inside in order.
        with (self._logs / "nursery.log").open("ab") as log:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
            )
        self._hearing = threading.Thread(target=self._hear, name="p2pcast-nursery", daemon=True)
        self._hearing.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        try:
            if kind is None:
                self.stop(*self.daemons)
        finally:
            # At the end of its input it kills whoever is left.
            with suppress(OSError):
                self._nursery.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._nursery.wait(GRACE_S)
            self._nursery.kill()
            self._nursery.wait()
            self._hearing.join(GRACE_S)
            self._nursery.stdout.close()

    def start(self, name: str, words: Sequence[str | Path], space: str | None = None) -> Daemon:
        """``p2pcast WORDS``, in the network namespace at that path. A name may be used again once its daemon has ended; the log goes on."""
        assert self._nursery.stdin is not None
        if name in self.daemons and self.daemons[name].code is None:
            raise ValueError(f"{name} is running")
        log = self._logs / f"{name}.log"
        asked = {"argv": [str(word) for word in words], "log": str(log), "net": space}
        with suppress(BrokenPipeError):
            self._nursery.stdin.write(json.dumps(asked).encode() + b"\n")
            self._nursery.stdin.flush()
        try:
            pid = self._born.get(timeout=BORN_S)
        except queue.Empty:
            pid = None
        if pid is None:
            raise Daemon("the nursery", 0, self._logs / "nursery.log").failure(f"{name} could not be started")
        self.daemons[name] = self._by_pid[pid] = Daemon(name, pid, log)
        if pid in self._codes:
            self.daemons[name].code = self._codes[pid]
        return self.daemons[name]

    @property
    def pids(self) -> dict[str, int]:
        """Of those that run."""
        return {name: daemon.pid for name, daemon in self.daemons.items() if daemon.code is None}

    def check(self) -> None:
        """Raises LocalError when one has ended that should not have."""
        for daemon in self.daemons.values():
            if daemon.code is not None and not daemon.expected:
                raise daemon.failure(f"{daemon.name} ended with {_exit(daemon.code)}")

    def stop(self, *names: str, polite: signal.Signals = signal.SIGTERM) -> None:
        """End these. What outlives ``GRACE_S`` is killed."""
        chosen = [self.daemons[name] for name in names]
        for daemon in chosen:
            daemon.expected = True
            daemon.signal(polite)
            # One that stands still hears nothing else.
            daemon.signal(signal.SIGCONT)
        deadline = time.monotonic() + GRACE_S
        while any(daemon.code is None for daemon in chosen):
            if time.monotonic() > deadline:
                for daemon in chosen:
                    daemon.signal(signal.SIGKILL)
            if self._nursery.poll() is not None:
                return
            time.sleep(POLL_S)

    def _hear(self) -> None:
        assert self._nursery.stdout is not None
        for line in self._nursery.stdout:
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
