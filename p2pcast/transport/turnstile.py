"""Who may begin a TLS handshake, and who gives way to whom. Pure: time is passed in.

The first answer in a handshake costs us a signature and two multiplications on a curve, and whoever asks for it some bytes that can be sent again and again. So an address has an allowance of handshakes that
came to nothing: one that ends with somebody who has shown who it is costs nothing. All addresses that have not brought anybody yet share another allowance besides, so that many of them are worth no more than a few.

Promises: of those who wait, addresses are served in turn, and of each the newest first, which is most likely to be waiting still; whoever has gone meanwhile costs nothing; where there is no room for all, the oldest of the address with the most gives way: a flood from one place pushes out itself and nobody else;
what is remembered of addresses is bounded.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

BURST: Final = 64
"""Handshakes that one address may have open, or have had for nothing. A peer with all its stripes needs no more at once."""
RATE_S: Final = 10.0
"""So many more each second."""
STRANGERS_BURST: Final = 256
STRANGERS_RATE_S: Final = 100.0
"""Of all addresses together that have not brought anybody: about a tenth of a core."""
MAX_ADDRESSES: Final = 16384
"""Remembered at one time. Those forgotten first have a full allowance anyway, or are strangers."""


def place(host: str) -> str:
    """An address, as far as it stands for somebody: of IPv6 the network, which whoever has one has all of."""
    if ":" not in host:
        return host
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False).network_address)
    except ValueError:
        return host


@dataclass(slots=True)
class Allowance:
    """``left`` at ``at``; it grows by ``rate_s`` up to ``most``."""

    most: float
    rate_s: float
    left: float
    at: float

    def look(self, now: float) -> float:
        self.left = min(self.most, self.left + max(0.0, now - self.at) * self.rate_s)
        self.at = now
        return self.left

    def wait_s(self, now: float) -> float:
        """Until one may be taken."""
        return max(0.0, (1.0 - self.look(now)) / self.rate_s)

    def give_back(self, now: float) -> None:
        self.left = min(self.most, self.look(now) + 1.0)


@dataclass(slots=True)
class _Known:
    allowance: Allowance
    proven: bool = False
    """Somebody from there has shown who it is."""


@dataclass(slots=True)
class Crowd(Generic[T]):
    """Those who are inside, by address; ``most`` of them."""

    most: int
    _inside: dict[str, dict[T, None]] = field(default_factory=dict)
    _of: dict[T, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, one: T) -> bool:
        return one in self._of

    def enter(self, one: T, host: str) -> T | None:
        """Who has to give way for it: the oldest of the address with the most, which may be its own."""
        out = None
        if len(self._of) >= self.most:
            fullest = max(self._inside.values(), key=len)
            out = next(iter(fullest))
            self.leave(out)
        where = place(host)
        self._inside.setdefault(where, {})[one] = None
        self._of[one] = where
        return out

    def leave(self, one: T) -> None:
        where = self._of.pop(one, None)
        if where is not None:
            del self._inside[where][one]
            if not self._inside[where]:
                del self._inside[where]

    def all(self) -> list[T]:
        return list(self._of)


class Turnstile(Generic[T]):
    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        """Those heard of last at the end."""
        self._strangers = Allowance(STRANGERS_BURST, STRANGERS_RATE_S, STRANGERS_BURST, 0.0)
        self._lines: dict[str, list[T]] = {}
        """Who waits, by address, in the order of their turns."""

    def arrive(self, one: T, host: str) -> None:
        self._lines.setdefault(place(host), []).append(one)

    def give_up(self, one: T, host: str) -> None:
        line = self._lines.get(where := place(host))
        if line is not None and one in line:
            line.remove(one)
            if not line:
                del self._lines[where]

    def next(self, now: float, waits: Callable[[T], bool] = lambda _: True) -> T | float | None:
        """Whose turn it is; else in how many seconds to ask again, or None where nobody waits. ``waits``: whether one is still there."""
        soonest = None
        for where in list(self._lines):
            known = self._about(where, now)
            wait_s = known.allowance.wait_s(now)
            if not known.proven:
                wait_s = max(wait_s, self._strangers.wait_s(now))
            if wait_s > 0:
                soonest = wait_s if soonest is None else min(soonest, wait_s)
                continue
            line = self._lines.pop(where)
            while line:
                if waits(one := line.pop()):
                    known.allowance.left -= 1.0
                    if not known.proven:
                        self._strangers.left -= 1.0
                    if line:
                        self._lines[where] = line  # behind the others
                    return one
        return soonest

    def proved(self, host: str, now: float) -> None:
        """A handshake of this address has ended with somebody who showed who it is."""
        known = self._about(place(host), now)
        known.allowance.give_back(now)
        if not known.proven:
            self._strangers.give_back(now)
        known.proven = True

    def _about(self, where: str, now: float) -> _Known:
        known = self._known.pop(where, None)
        if known is None:
            known = _Known(Allowance(BURST, RATE_S, BURST, now))
        self._known[where] = known
        if len(self._known) > MAX_ADDRESSES:
            del self._known[next(iter(self._known))]
        return known
