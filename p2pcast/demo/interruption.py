"""Kills a peer in the middle of a transfer, and knows that it was the middle.

The model is small, so a delta is a matter of milliseconds. The moment is found on the victim's disk: an artifact that comes in is a file in ``partial/``
until it is sealed. When one appears the process is frozen; if it is still unsealed then, the process is killed as it stands, else it goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.0003
"""Between two looks at the folder."""
FREEZE_S = 1.0
"""SIGSTOP has taken effect by then."""


@dataclass(frozen=True, slots=True)
class Caught:
    """``artifact``: the unsealed artifact; ``bytes_on_disk`` of it had been written when the process died."""

    artifact: str
    bytes_on_disk: int


def kill_in_transfer(pid: int, state: Path, give_up: threading.Event) -> Caught | None:
    """Blocks until the process ``pid``, whose state folder is ``state``, was killed in mid-transfer, or until ``give_up`` (then None)."""
    partial = state / "partial"
    while not give_up.is_set():
        if not _names(partial):
            time.sleep(LOOK_S)
            continue
        try:
            os.kill(pid, signal.SIGSTOP)
        except ProcessLookupError:
            return None
        _wait_until_frozen(pid)
        for name in _names(partial):
            with contextlib.suppress(OSError):
                size = (partial / name).stat().st_size
                os.kill(pid, signal.SIGKILL)
                return Caught(name, size)
        os.kill(pid, signal.SIGCONT)
    return None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _wait_until_frozen(pid: int) -> None:
    """Until every thread has stopped."""
    deadline = time.monotonic() + FREEZE_S
    while time.monotonic() < deadline:
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
            states = [Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0] for task in tasks]
        except (FileNotFoundError, ProcessLookupError, IndexError):
            return
        if all(state in "TtZX" for state in states):
            return
