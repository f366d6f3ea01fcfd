"""Waits until rollout machines have the content of a step folder, for frameworks that write folders."""

from __future__ import annotations

import time
from urllib.parse import quote, urlencode

from p2pcast.daemon.daemon_requests import TIMEOUT_S, ask
from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version

WAIT_S = 600.0
"""Longest wait in seconds, by default."""
POLL_S = 0.5
"""Seconds between two requests while hosts are missing from the run."""


def wait_live(hub: str, folder: str, *, hosts: int = 1, timeout_s: float = WAIT_S) -> Version:
    """The version of what the step folder of this name holds now, once all install targets of the run have it.

    ``hub``: URL of the hub's HTTP server; from another machine ``$P2PCAST_HTTP_TOKEN`` is needed. ``folder``: a name in
    the hub's CHECKPOINTS. ``hosts``: least number of targets. A host whose peer is down is not in the run, and its disk
    may still hold an earlier folder of this name. ``timeout_s``: 3600 at most. Blocks. Raises RetryableError (not in
    time, or the hub is out of reach), UsageError (a name that the hub does not read) and RefusedError.
    """
    until_s = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, until_s - time.monotonic())
        query = urlencode({"folder": folder, "what": "live", "fraction": 1, "timeout_s": left_s}, quote_via=quote)
        answer = ask(hub.rstrip("/"), f"/wait?{query}", timeout_s=left_s + TIMEOUT_S)
        version = Version.parse(str(answer["version"]))
        live = [text for text in dict(answer["engines"]).values() if text and Version.parse(text) >= version]
        if len(live) >= hosts:
            return version
        if time.monotonic() > until_s:
            raise RetryableError(
                f"{folder}: {len(live)} of {hosts} hosts have version {version}; do the other hosts' peers run?"
            )
        time.sleep(POLL_S)
