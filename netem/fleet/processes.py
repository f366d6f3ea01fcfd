"""Child processes of demos, benches and fleets: each in its own session, with its output in a file. A child is a
command, or a fork of a process that has imported everything (``netem.fleet.forkserver``).

Promises: all children end with the block, as whole process groups, and SIGTERM comes first. If this process dies, the
kernel ends them. A child that ends unexpectedly is one clear error with the end of its log.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from netem.fleet import die_with_parent
from netem.fleet.forkserver import Forked, ForkServer
from p2pcast.ground.errors import LocalError

GRACE_S = 60.0
"""Time from the first signal to SIGABRT: on a busy machine a daemon may take many seconds to end."""
BREAK_S = 20.0
"""The same after an error or Ctrl-C, in seconds: a runner kills a program that takes a minute to end."""
ABORT_S = 5.0
"""Time from SIGABRT to SIGKILL: Python writes where each thread stands."""
TAIL_LINES = 25
POLL_S = 0.02
FEW_THREADS = {"OMP_NUM_THREADS": "1"}
"""Environment of processes that share a machine."""
PORTS = range(20_000, 32_768)
"""Below those that Linux assigns by itself, above those that Ray does."""
_NEXT_PORTS = itertools.cycle(random.Random().sample(PORTS, len(PORTS)))
"""In an order of this process's own: others on this machine look for ports too."""


class FleetError(LocalError):
    """A process failed, or an expected state was not reached in time."""


@dataclass(slots=True)
class ChildProcess:
    name: str
    process: subprocess.Popen[bytes] | Forked
    log: Path
    expected: bool = False
    """Whether the child may end."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def code(self) -> int | None:
        """Exit code of an ended child; negative for a signal."""
        return self.process.poll()

    def tail(self, lines: int = TAIL_LINES) -> str:
        return _tail(self.log, lines)

    def failure(self, what: str) -> FleetError:
        """An error that says ``what`` happened, with the end of the log."""
        return FleetError(f"{what}; the end of {self.log}:\n{self.tail()}")

    def signal(self, number: signal.Signals) -> None:
        """Signal the child's whole process group."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:  # not yet in its own group, or ended
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the child, which may end from now on, and wait for its end."""
        self.expected = True
        self.process.kill()
        self.process.wait()


class Processes:
    """Starts children; as a context manager, ends them. ``logs``: folder for their output. ``modules``: imported before
    the first fork, for children that need more than hubs and peers do.
    """

    def __init__(self, logs: Path, modules: Sequence[str] = ()) -> None:
        self._logs, self._modules = logs, modules
        self._fork_server: ForkServer | None = None
        self.children: dict[str, ChildProcess] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop(*self.children, grace_s=GRACE_S if kind is None else BREAK_S)
        finally:
            self.close()

    def close(self) -> None:
        """Kill the forked children that still run."""
        if self._fork_server is not None:
            self._fork_server.close()

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        nice: int = 0,
        output: Path | None = None,
    ) -> ChildProcess:
        """A name may be reused after its child has ended; the log is then continued. ``output``: a file for stdout
        instead of the log.
        """
        log = self._log(name)
        # By its path: the environment may be that of another source tree.
        prefix = [sys.executable, "-P", die_with_parent.__file__, str(os.getpid()), str(nice)]
        with contextlib.ExitStack() as files:
            stderr = files.enter_context(log.open("ab"))
            stdout = stderr if output is None else files.enter_context(output.open("ab"))
            process = subprocess.Popen(
                [*prefix, *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "PYTHONFAULTHANDLER": "1", **(environment or {})},
                start_new_session=True,
            )
        return self._started(name, process)

    def fork(
        self, name: str, words: Sequence[str | Path], space: str | None = None, *, entry: str | None = None
    ) -> ChildProcess:
        """``p2pcast WORDS``, in the network namespace at the path ``space``. ``entry``: a module whose ``main`` runs in
        place of the command.
        """
        log = self._log(name)
        if self._fork_server is None:
            self._fork_server = ForkServer(self._logs / "fork-server.log", self._modules)
        process = self._fork_server.fork([str(word) for word in words], log, space, entry)
        if process is None:
            raise FleetError(f"{name} could not be started: {_tail(self._logs / 'fork-server.log', TAIL_LINES)}")
        return self._started(name, process)

    def _log(self, name: str) -> Path:
        if name in self.children and self.children[name].alive:
            raise ValueError(f"{name} is running")
        return self._logs / f"{name}.log"

    def _started(self, name: str, process: subprocess.Popen[bytes] | Forked) -> ChildProcess:
        self.children[name] = ChildProcess(name, process, self._logs / f"{name}.log")
        return self.children[name]

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of running children."""
        return {name: child.process.pid for name, child in self.children.items() if child.alive}

    def check(self) -> None:
        """Raises FleetError if a child has ended unexpectedly."""
        for child in self.children.values():
            if not child.expected and (code := child.code) is not None:
                raise child.failure(f"{child.name} ended with {describe_exit(code)}")

    def stop(
        self, *names: str, polite: signal.Signals = signal.SIGTERM, grace_s: float | None = None
    ) -> dict[str, int]:
        """End these children and return their exit codes. Children that outlive ``grace_s`` (by default GRACE_S) are
        killed, after they have logged where they stand.
        """
        chosen = [self.children[name] for name in names if name in self.children]
        for child in chosen:
            child.expected = True
        for number, time_s in ((polite, GRACE_S if grace_s is None else grace_s), (signal.SIGABRT, ABORT_S)):
            for child in chosen:
                if child.alive:
                    child.signal(number)
                    child.signal(signal.SIGCONT)  # a stopped process handles other signals only after SIGCONT
            deadline = time.monotonic() + time_s
            while any(child.alive for child in chosen) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        for child in chosen:
            child.signal(signal.SIGKILL)  # also the rest of the group
        return {child.name: child.process.wait() for child in chosen}

    def stop_all(self) -> None:
        self.stop(*self.children)


def _tail(log: Path, lines: int) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    return ""


def describe_exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def free_port() -> int:
    """A loopback port without a listener, another one each time. Linux gives it to no connection and to no socket that
    asks for any port, so it is still free when a process takes it, or takes it again.
    """
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", next(_NEXT_PORTS))) as probe:
            return int(probe.getsockname()[1])
