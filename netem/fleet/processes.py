"""Child processes for the demo and benches: each in its own session, with its output in a file. All of them end with
the block.

Promises: ``stop_all`` ends whole process groups, with SIGINT first. A child that ends unexpectedly is one clear error
with the end of its log.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from p2pcast.ground.errors import LocalError

GRACE_S = 60.0
"""Time from the first signal to SIGABRT: on a busy machine a daemon may take many seconds to end."""
ABORT_S = 5.0
"""Time from SIGABRT to SIGKILL: Python writes where each thread stands."""
TAIL_LINES = 25
POLL_S = 0.02


class DemoError(LocalError):
    """The demo cannot continue."""


@dataclass(slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    expected: bool = False
    """Whether the child may end."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, lines: int = TAIL_LINES) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def failure(self, what: str) -> DemoError:
        """An error that says ``what`` happened, with the end of the log."""
        return DemoError(f"{what}; the end of {self.log}:\n{self.tail()}")

    def signal(self, number: signal.Signals) -> None:
        """Signal the child's whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Processes:
    """Starts children; as a context manager, ends them. ``logs``: folder for their output."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.children: dict[str, Child] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_all()

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        nice: int = 0,
        output: Path | None = None,
    ) -> Child:
        """A name may be reused after its child has ended; the log is then continued. ``output``: a file for stdout
        instead of the log.
        """
        if name in self.children and self.children[name].alive:
            raise ValueError(f"{name} is running")
        log = self._logs / f"{name}.log"
        prefix = [sys.executable, "-P", "-m", "netem.fleet.die_with_parent", str(os.getpid()), str(nice)]
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
        self.children[name] = Child(name, process, log)
        return self.children[name]

    def check(self) -> None:
        """Raises DemoError if a child has ended unexpectedly."""
        for child in self.children.values():
            if not child.expected and not child.alive:
                raise child.failure(f"{child.name} ended with {describe_exit(child.process.returncode)}")

    def stop(self, *names: str, polite: signal.Signals = signal.SIGTERM) -> dict[str, int]:
        """End these children and return their exit codes. Children that outlive ``GRACE_S`` are killed, after they have
        logged where they stand.
        """
        chosen = [self.children[name] for name in names if name in self.children]
        for child in chosen:
            child.expected = True
        for number, time_s in ((polite, GRACE_S), (signal.SIGABRT, ABORT_S)):
            for child in chosen:
                if child.alive:
                    child.signal(number)
            deadline = time.monotonic() + time_s
            while any(child.alive for child in chosen) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        for child in chosen:
            child.signal(signal.SIGKILL)  # also the rest of the group
            child.process.wait()
        return {child.name: child.process.returncode for child in chosen}

    def stop_all(self) -> None:
        self.stop(*self.children)


def describe_exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def free_port() -> int:
    """A loopback port without a listener at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
