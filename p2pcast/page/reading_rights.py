"""Rights to read a run's page from another machine: a link that works once, then a cookie.

Guarantees: a right reads, and commands nothing. It lives in memory alone and ends with the daemon. Numbers of links and
cookies are bounded; the oldest goes first.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Final

LINK_S: Final = 600.0
"""Seconds for which a link works."""
COOKIE_S: Final = 12 * 3600.0
MOST_LINKS, MOST_COOKIES = 64, 256
SECRET_BYTES: Final = 24


class ReadingRights:
    """``clock``: seconds from any origin."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._links: dict[bytes, float] = {}
        self._cookies: dict[bytes, float] = {}
        """When each right expires, by the hash of its secret."""

    def new_link(self) -> str:
        """Create a link and return its secret, which is valid for one ``enter``."""
        return self._new(self._links, LINK_S, MOST_LINKS)

    def enter(self, link: str) -> str | None:
        """Exchange a link's secret for a cookie's; None if the link is unknown, used or too old."""
        ends_s = self._links.pop(_hash(link), None)
        if ends_s is None or ends_s <= self._clock():
            return None
        return self._new(self._cookies, COOKIE_S, MOST_COOKIES)

    def admits(self, cookie: str) -> bool:
        return self._cookies.get(_hash(cookie), 0.0) > self._clock()

    def _new(self, known: dict[bytes, float], lives_s: float, most: int) -> str:
        now = self._clock()
        over = max(0, len(known) + 1 - most)
        for old in {*list(known)[:over], *(one for one, ends_s in known.items() if ends_s <= now)}:
            del known[old]
        secret = secrets.token_urlsafe(SECRET_BYTES)
        known[_hash(secret)] = now + lives_s
        return secret


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
