"""Kills a peer during a transfer, and verifies that the transfer was incomplete.

The model is small, so a delta takes only milliseconds. The victim's disk shows the moment: an incoming artifact is a
file in ``partial/`` until it is sealed. When such a file appears, the process is frozen. If the file is still unsealed
then, the process is killed; otherwise it continues.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.0003
"""Interval between two looks at the folder."""
FREEZE_S = 1.0
"""Time after which SIGSTOP has taken effect."""


@dataclass(frozen=True, slots=True)
class KilledTransfer:
    """``artifact``: the unsealed artifact. ``bytes_on_disk``: its size when the process died."""

    artifact: str
    bytes_on_disk: int


def middle_peer(chains: Sequence[Sequence[str]], *, spared: str) -> tuple[str, str | None]:
    """A peer in the middle of a chain, if possible between two peers, and never ``spared``; and its child."""
    places = [(chain, i) for chain in chains for i in range(len(chain)) if chain[i] != spared]
    chain, i = max(places, key=lambda place: (place[1] + 1 < len(place[0]), place[1] > 0))
    return chain[i], chain[i + 1] if i + 1 < len(chain) else None


def kill_in_transfer(pid: int, state: Path, give_up: threading.Event) -> KilledTransfer | None:
    """Blocks until the process ``pid`` with the state folder ``state`` was killed during a transfer, or until
    ``give_up`` is set (then returns None).
    """
    partial = state / "partial"
    while not give_up.is_set():
        if not _names(partial):
            time.sleep(POLL_S)
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
                return KilledTransfer(name, size)
        os.kill(pid, signal.SIGCONT)
    return None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _wait_until_frozen(pid: int) -> None:
    """Return when every thread has stopped."""
    deadline = time.monotonic() + FREEZE_S
    while time.monotonic() < deadline:
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
            states = [Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0] for task in tasks]
        except (FileNotFoundError, ProcessLookupError, IndexError):
            return
        if all(state in "TtZX" for state in states):
            return
