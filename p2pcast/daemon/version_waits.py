"""Reads what a GET /wait request waits for: a condition, and the version that has to meet it."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_STEP, MAX_WAIT_S
from p2pcast.ground.version import Version

DEFAULT_WAIT_S = 60.0

Reached = Callable[[Version, float | None], tuple[bool, dict[str, Any]]]
"""(version, fraction of the peers; None: the daemon's default) → whether the version is reached, and facts for the
answer.
"""


class WaitQuery(NamedTuple):
    """``wanted``: a version, a step of the newest branch, or a folder's name."""

    what: str
    wanted: Version | int | str
    fraction: float | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class VersionWaits:
    """``newest``: the newest known version, whose branch counts for steps. ``folder_version``: the version of a step
    folder's content; None while it is not published; it may raise UsageError.
    """

    conditions: Mapping[str, Reached]
    newest: Callable[[], Version | None]
    folder_version: Callable[[str], Awaitable[Version | None]] | None = None

    def read(self, query: Mapping[str, str]) -> WaitQuery:
        """Parse a request's query. Raises UsageError."""
        what = query.get("what", "live")
        if what not in self.conditions:
            raise UsageError(f"what={what!r} cannot be waited for: give one of {', '.join(self.conditions)}")
        fraction = _number(query, "fraction", 1.0)
        timeout_s = _number(query, "timeout_s", MAX_WAIT_S)
        return WaitQuery(what, _wanted(query), fraction, DEFAULT_WAIT_S if timeout_s is None else timeout_s)

    async def version(self, wanted: Version | int | str) -> Version | None:
        """Return the wanted version; None while a folder's content is not published. Raises UsageError."""
        if isinstance(wanted, str):
            if self.folder_version is None:
                raise UsageError("only a hub knows folders: give version=BRANCH.STEP, or step=STEP")
            return await self.folder_version(wanted)
        newest = self.newest() or Version(0, 0)
        return wanted if isinstance(wanted, Version) else Version(newest.branch, wanted)


NO_WAITS = VersionWaits({}, lambda: None)


def _wanted(query: Mapping[str, str]) -> Version | int | str:
    """Return a version, a step of the newest branch, or a folder's name. Raises UsageError."""
    if sum(name in query for name in ("version", "step", "folder")) != 1:
        raise UsageError("give one of version=BRANCH.STEP, step=STEP of the newest branch, and folder=NAME at a hub")
    if "folder" in query:
        return query["folder"]
    text = query.get("step")
    if text is None:
        return Version.parse(query["version"])
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MAX_STEP):
        raise UsageError(f"step={text[:40]!r} is not a number from 0 to {MAX_STEP}")
    return int(text)


def _number(query: Mapping[str, str], name: str, most: float) -> float | None:
    """Return a number from 0 to ``most``; None if it is missing. Raises UsageError."""
    text = query.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise UsageError(f"{name}={text[:40]!r} is not a number from 0 to {most:g}")
    return value
