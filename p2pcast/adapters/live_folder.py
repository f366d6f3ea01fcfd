"""Waits until engines serve the content of a step folder, for frameworks that write folders."""

from __future__ import annotations

from urllib.parse import quote, urlencode

from p2pcast.daemon.daemon_requests import TIMEOUT_S, ask
from p2pcast.version import Version

WAIT_S = 600.0
"""Longest wait in seconds, by default."""


def wait_live(hub: str, folder: str, *, fraction: float = 1.0, timeout_s: float = WAIT_S) -> Version:
    """The version of what the step folder of this name holds now, once ``fraction`` of all engines serve it.

    ``hub``: URL of the hub's HTTP server; from another machine ``$P2PCAST_HTTP_TOKEN`` is needed. ``folder``: a name in
    the hub's CHECKPOINTS. ``timeout_s``: 3600 at most. Blocks. Raises RetryableError (not in time, or the hub is out of
    reach), UsageError (a name that the hub does not read) and RefusedError.
    """
    query = urlencode({"folder": folder, "what": "live", "fraction": fraction, "timeout_s": timeout_s}, quote_via=quote)
    answer = ask(hub.rstrip("/"), f"/wait?{query}", timeout_s=timeout_s + TIMEOUT_S)
    return Version.parse(str(answer["version"]))
