"""A rollout worker waits for a version at the peer of its machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2pcast.daemon.daemon_requests import TIMEOUT_S, ask, daemon_url
from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import LocalError, RetryableError, UsageError
from p2pcast.ground.version import Version

SLICE_S = 5.0
"""Length of one request, in seconds: between two requests the waiting worker looks whether it is still wanted."""
RETRY_MIN_S, RETRY_MAX_S = 0.1, 2.0
"""Delays after a request that the peer did not answer, in seconds."""


def peer_folder(text: str) -> Path:
    """The state folder on this machine. Raises UsageError for a variable that is not set."""
    path = os.path.expandvars(text)
    if "$" in path:
        raise UsageError(f"the peer's state folder {text!r} names a variable that this machine's worker does not have")
    return Path(path).expanduser()


def peer_status(folder: Path) -> dict[str, Any]:
    """Run, node and staged version of the peer, now. Raises RetryableError (no peer runs on the folder)."""
    return ask(daemon_url(None, folder), "/versions", None, timeout_s=TIMEOUT_S, state=folder)


def wait_staged(folder: Path, version: Version, timeout_s: float, wanted: Callable[[], bool]) -> Version:
    """Waits until the peer has staged ``version`` or a newer one, and returns which. A peer that is restarted meanwhile
    gets until the time limit. Raises RetryableError at the time limit, and when ``wanted`` returns False.
    """
    deadline = time.monotonic() + timeout_s
    backoff = Backoff(RETRY_MIN_S, RETRY_MAX_S, None)
    while wanted():
        began = time.monotonic()
        slice_s = min(SLICE_S, max(0.0, deadline - began))
        path = f"/wait?version={version}&what=staged&timeout_s={slice_s:g}"
        try:
            answer = ask(daemon_url(None, folder), path, None, timeout_s=slice_s + TIMEOUT_S, state=folder)
            return Version.parse(str(answer["staged"]))
        except UsageError:
            raise
        except (LocalError, RetryableError) as error:
            if time.monotonic() >= deadline:
                raise RetryableError(
                    f"the peer at {folder} has not staged version {version} or a newer one within {timeout_s:g} s"
                    f" ({error}); look at `p2pcast status --state {folder}`"
                ) from None
            # A peer that refuses or restarts answers at once; an ordinary slice has taken its time.
            if time.monotonic() - began < slice_s:
                time.sleep(min(backoff.next_s(), max(0.0, deadline - time.monotonic())))
    raise RetryableError(f"a later sync has begun: version {version} is not waited for any more")
