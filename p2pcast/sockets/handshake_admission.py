"""Decides which connections may begin a TLS handshake, and which are closed under load. Pure: time is passed
in.

The first answer in a handshake costs the server a signature and two curve multiplications, but costs an attacker only a
few bytes, which can be sent again and again. So each address has a token bucket of handshakes. A handshake that
authenticates a node returns its token. All addresses at which no node has authenticated yet also share one
bucket, so that many such addresses get no more than a few.

Guarantees:

- Addresses take turns. For each address, the newest connection comes first, because it is most likely still alive.
- A connection that closes before its turn costs its address nothing.
- When all places are taken, the oldest connection of the address with the most connections is closed. So a flood from
  one address closes only its own connections.
- The number of remembered addresses is bounded.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

BURST: Final = 64
"""Unauthenticated handshakes that one address may start at once. A peer with all its stripes needs no more."""
RATE_S: Final = 10.0
"""Unauthenticated handshakes of one address per second, beyond the burst."""
UNPROVEN_BURST: Final = 256
"""Handshakes that may start at once from all addresses together at which no node has authenticated."""
UNPROVEN_RATE_S: Final = 100.0
"""Handshakes per second from all unproven addresses together; they use about a tenth of a core."""
MAX_ADDRESSES: Final = 16384
"""Addresses remembered at the same time. An address forgotten first has a full bucket again, or is unproven."""


def address_block(host: str) -> str:
    """Return the unit of admission for an address: an IPv4 address itself, or the /64 of an IPv6 address, since whoever
    has one address in a /64 has all of them.
    """
    if ":" not in host:
        return host
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False).network_address)
    except ValueError:
        return host


@dataclass(slots=True)
class TokenBucket:
    """A token bucket, with ``tokens`` at the time ``updated_s``. It gains ``rate_per_s`` tokens, up to ``capacity``."""

    capacity: float
    rate_per_s: float
    tokens: float
    updated_s: float

    def refilled(self, now: float) -> float:
        """Refill the bucket up to the time ``now``, and return its number of tokens."""
        self.tokens = min(self.capacity, self.tokens + max(0.0, now - self.updated_s) * self.rate_per_s)
        self.updated_s = now
        return self.tokens

    def wait_s(self, now: float) -> float:
        """Refill the bucket, and return the seconds until a token is available."""
        return max(0.0, (1.0 - self.refilled(now)) / self.rate_per_s)

    def put_back(self, now: float) -> None:
        self.tokens = min(self.capacity, self.refilled(now) + 1.0)


@dataclass(slots=True)
class _AddressRecord:
    bucket: TokenBucket
    proven: bool = False
    """A node at this address has authenticated."""


@dataclass(slots=True)
class PendingConnections(Generic[T]):
    """At most ``capacity`` connections that have not authenticated yet, grouped by address block."""

    capacity: int
    _by_block: dict[str, dict[T, None]] = field(default_factory=dict)
    _block_of: dict[T, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, one: T) -> bool:
        return one in self._block_of

    def add(self, one: T, host: str) -> T | None:
        """Add a connection. If all places are taken, removes and returns the oldest connection of the address block
        with the most, which may be the new connection's own block.
        """
        out = None
        if len(self._block_of) >= self.capacity and (out := self.oldest()) is not None:
            self.remove(out)
        where = address_block(host)
        self._by_block.setdefault(where, {})[one] = None
        self._block_of[one] = where
        return out

    def oldest(self, block: str | None = None) -> T | None:
        """Return the oldest connection of an address block; if None is given, of the block with the most."""
        of_block = max(self._by_block.values(), key=len, default={}) if block is None else self._by_block.get(block, {})
        return next(iter(of_block), None)

    def remove(self, one: T) -> None:
        where = self._block_of.pop(one, None)
        if where is not None:
            del self._by_block[where][one]
            if not self._by_block[where]:
                del self._by_block[where]

    def all(self) -> list[T]:
        return list(self._block_of)


class HandshakeAdmission(Generic[T]):
    """The queue of connections waiting for their TLS handshake. See the module."""

    def __init__(self) -> None:
        self._records: dict[str, _AddressRecord] = {}
        """By address block; the most recently used at the end."""
        self._unproven = TokenBucket(UNPROVEN_BURST, UNPROVEN_RATE_S, UNPROVEN_BURST, 0.0)
        self._queues: dict[str, list[T]] = {}
        """Waiting connections by address block, in the order of the blocks' turns."""

    def enqueue(self, one: T, host: str) -> None:
        self._queues.setdefault(address_block(host), []).append(one)

    def cancel(self, one: T, host: str) -> None:
        queue = self._queues.get(where := address_block(host))
        if queue is not None and one in queue:
            queue.remove(one)
            if not queue:
                del self._queues[where]

    def next(self, now: float, waits: Callable[[T], bool] = lambda _: True) -> T | float | None:
        """Return the next connection to admit, or else the seconds until the next call, or None if none is waiting.
        ``waits``: whether a connection is still alive.
        """
        soonest = None
        for where in list(self._queues):
            record = self._record(where, now)
            wait_s = record.bucket.wait_s(now)
            if not record.proven:
                wait_s = max(wait_s, self._unproven.wait_s(now))
            if wait_s > 0:
                soonest = wait_s if soonest is None else min(soonest, wait_s)
                continue
            queue = self._queues.pop(where)
            while queue:
                if waits(one := queue.pop()):
                    record.bucket.tokens -= 1.0
                    if not record.proven:
                        self._unproven.tokens -= 1.0
                    if queue:
                        self._queues[where] = queue  # behind the other blocks
                    return one
        return soonest

    def authenticated(self, host: str, now: float) -> None:
        """A node at this address has authenticated: return the handshake's tokens."""
        record = self._record(address_block(host), now)
        record.bucket.put_back(now)
        if not record.proven:
            self._unproven.put_back(now)
        record.proven = True

    def _record(self, where: str, now: float) -> _AddressRecord:
        record = self._records.pop(where, None)
        if record is None:
            record = _AddressRecord(TokenBucket(BURST, RATE_S, BURST, now))
        self._records[where] = record
        if len(self._records) > MAX_ADDRESSES:
            del self._records[next(iter(self._records))]
        return record
