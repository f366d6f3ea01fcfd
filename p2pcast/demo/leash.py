"""``python -m p2pcast.demo.leash PARENT NICE COMMAND…``: become COMMAND, at that niceness, and be told to end (SIGTERM) when the
process PARENT dies, which started this one.

Promise: whatever happens to the demo, SIGKILL included, what it started does not stay behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, nice, *command = sys.argv[1:]
    os.nice(int(nice))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # it had died before we asked
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
