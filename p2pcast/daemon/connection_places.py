"""Decides which of a server's connections is closed to free a place for a new one. Pure.

A connection is *held* while a request is under way whose end must not be forced: by a caller that has proven a right,
or by a reader of events. All other connections may lose their place: those without a request, with half of a request,
or with an answer that their caller does not read.

Guarantees:

- A new connection always gets a place. When all places are taken, a connection of the address with the most gives way:
  the one without a request for longest. When an address has all of its own places, one of that address gives way.
- A held connection keeps its place.
- Callers that prove nothing hold at most half of all places and of an address's places; all callers hold at most seven
  eighths. So a flood of requests, too, leaves places that give way.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from p2pcast.sockets.handshake_admission import PendingConnections, address_block

T = TypeVar("T", bound=Hashable)

STRANGERS_HOLD: Final = 1 / 2
"""Share of the places up to which connections without a proven right are held."""
ALL_HOLD: Final = 7 / 8
"""Share of the places up to which connections are held."""


@dataclass(slots=True)
class _Block:
    """Connections of one address block."""

    open: int = 0
    held: int = 0


class ConnectionPlaces(Generic[T]):
    """``most``: connections of all addresses. ``most_of_address``: of one address block."""

    def __init__(self, most: int, most_of_address: int) -> None:
        self.most, self.most_of_address = most, min(most, most_of_address)
        self._quiet: PendingConnections[T] = PendingConnections(most)
        """Connections that may give way, in the order of their last requests."""
        self._held: set[T] = set()
        self._block_of: dict[T, str] = {}
        self._blocks: dict[str, _Block] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def add(self, one: T, host: str) -> T | None:
        """Add a connection. Returns the connection that loses its place to it, or None."""
        block, out = address_block(host), None
        if (known := self._blocks.get(block)) is not None and known.open >= self.most_of_address:
            out = self._quiet.oldest(block)
        elif len(self._block_of) >= self.most:
            out = self._quiet.oldest()
        if out is not None:
            self.remove(out)
        self._block_of[one] = block
        self._blocks.setdefault(block, _Block()).open += 1
        self._quiet.add(one, block)
        return out

    def hold(self, one: T, *, proven: bool) -> None:
        """A request has begun that keeps its connection's place, as far as the shares allow. ``proven``: its caller has
        proven a right.
        """
        if one not in self._quiet:
            return
        share, block = (ALL_HOLD if proven else STRANGERS_HOLD), self._blocks[self._block_of[one]]
        if len(self._held) < int(share * self.most) and block.held < int(share * self.most_of_address):
            self._quiet.remove(one)
            self._held.add(one)
            block.held += 1

    def touch(self, one: T) -> None:
        """A request begins or has been answered: the connection is held no longer, and the last to give way."""
        if (block := self._block_of.get(one)) is not None:
            self._free(one, block)
            self._quiet.add(one, block)

    def remove(self, one: T) -> None:
        """Remove a connection that has closed. Unknown connections are ignored."""
        if (block := self._block_of.pop(one, None)) is not None:
            self._free(one, block)
            self._blocks[block].open -= 1
            if not self._blocks[block].open:
                del self._blocks[block]

    def _free(self, one: T, block: str) -> None:
        self._quiet.remove(one)
        if one in self._held:
            self._held.remove(one)
            self._blocks[block].held -= 1
