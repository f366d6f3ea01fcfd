"""``python -m netem.chaos.crash.killed_command COMMAND…``: the p2pcast command, killed at the disk step or mirror
request that ``P2PCAST_KILL_AT`` names (``N`` or ``N torn``).
"""

from __future__ import annotations

import os

from netem.chaos.crash.killer import Killer
from p2pcast.cli import main
from p2pcast.files import disk
from p2pcast.mirror import requests

KILL_AT = "P2PCAST_KILL_AT"

if __name__ == "__main__":
    if at := os.environ.get(KILL_AT, "").split():
        killer = Killer(int(at[0]), torn="torn" in at[1:])
        with disk.watched(killer), requests.watched(killer):
            main()
    else:
        main()
