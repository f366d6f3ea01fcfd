"""``python -m netem.fleet.die_with_parent PARENT NICE COMMAND…``: becomes COMMAND at that niceness. The kernel sends
SIGTERM to it when PARENT dies, the process that started it.

Promise: whatever happens to the parent, SIGKILL included, the command does not outlive it. This module imports nothing
of this repository, so the guard can run the file beside another tree.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: signal.Signals) -> None:
    """Let the kernel send that signal to this process when its parent dies. Raises SystemExit if the parent is dead."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)


def main() -> None:
    parent, nice, *command = sys.argv[1:]
    os.nice(int(nice))
    die_with(int(parent), signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
