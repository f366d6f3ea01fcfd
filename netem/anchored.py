"""``python -m netem.anchored COMMAND…``: the p2pcast command, with an anchor every ``P2PCAST_ANCHOR_EVERY`` versions: so many of them can be watched in a minute."""

from __future__ import annotations

import os

from p2pcast.cli import main
from p2pcast.store import retention

ANCHOR_EVERY = "P2PCAST_ANCHOR_EVERY"

if __name__ == "__main__":
    # Before the hub's modules are loaded, which the command does when it runs.
    retention.ANCHOR_EVERY = int(os.environ[ANCHOR_EVERY])
    main()
