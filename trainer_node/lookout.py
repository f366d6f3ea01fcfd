"""Where peers are found: the addresses that each may have, and whether the hub gets in there.

The hub dials every address of a peer back once it has joined, and again when a peer says that it was not there, and from time to time where nobody answered. It
says nothing but a handshake; what follows from the answers is `topology.reach`'s to decide.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable

from p2pcast.addresses import Address, family_of, is_loopback, may_be_told, show_address, site_of
from p2pcast.bell import Bell
from p2pcast.limits import MAX_WAYS
from p2pcast.tasks import unforeseen
from p2pcast.transport.dial import probe
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Body
from topology.reach import Contact, Reach
from trainer_node.peer import Peer

logger = logging.getLogger("p2pcast.hub")

AT_ONCE = 16
"""Addresses that are being tried: thousands of peers may join at once."""
AGAIN_S = 60.0
"""Between two looks at those who did not answer."""
TELL_S = 0.1
"""What is found is told at most so often: it may concern everybody."""


def whereabouts(body: Body, observed: str) -> tuple[tuple[Contact, ...], tuple[int, ...]]:
    """A peer's addresses and families, from its JOIN and from where its connection came: as advertised, and nothing else; or as observed, and its own."""
    host, port = body["listen"]
    said: list[Address] = [(h, p) for h, p in body.get("ways", []) if h]
    found: dict[Address, bool] = {}
    """Address → whether it is of the peer's own network."""
    if host:
        found = dict.fromkeys([(host, port), *said], False)
    else:
        if may_be_told(observed):
            found[observed, port] = False
        for address in said:
            found.setdefault(address, True)
    ways = tuple(
        Contact(address, family_of(address[0]), own=own, loopback=is_loopback(address[0])) for address, own in found.items()
    )
    families = {f for f in (*body.get("families", (4, 6)), family_of(observed)) if f is not None}
    return ways[:MAX_WAYS], tuple(sorted(families))


def settle_in(peer: Peer, body: Body, observed: str) -> None:
    """Note where a newcomer is."""
    peer.site, peer.beside_hub = site_of(observed), is_loopback(observed)
    peer.ways, peer.families = whereabouts(body, observed)


class Lookout:
    """``run`` until cancelled. ``changed``: something was found that peers may have to be told of."""

    def __init__(self, reach: Reach, identity: Identity, tls: ssl.SSLContext | None, changed: Callable[[], None]) -> None:
        self._reach = reach
        self._identity = identity
        self._tls = tls
        self._changed = changed
        self._due: dict[str, list[Address]] = {}
        """Peer → its addresses that are still to be dialled; peers have turns."""
        self._work = Bell()
        self._found = Bell()
        self._told_turn = 0

    def look(self, ident: str) -> None:
        """Dial it back, at each of its addresses; of a peer that joins again, at its new ones alone."""
        if addresses := [address for address, _ in self._reach.answers(ident)]:
            self._due[ident] = addresses
            self._work.ring()

    def learnt(self) -> None:
        """Somebody has said something of who can be reached."""
        self._found.ring()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(AT_ONCE):
                group.create_task(self._try(), name=f"dial back {number}")
            group.create_task(self._again(), name="dial back again")
            group.create_task(self._tell(), name="who is in reach")

    async def _try(self) -> None:
        while True:
            while not self._due:
                await self._work.wait()
            ident = next(iter(self._due))
            address, *others = self._due.pop(ident)
            if others:
                self._due[ident] = others
            if address not in {known for known, _ in self._reach.answers(ident)}:
                continue
            try:
                answers = await probe(address, self._identity, bytes.fromhex(ident), self._tls)
            except Exception as error:  # noqa: BLE001 - one peer's address must not end the hub
                unforeseen(f"dialling a peer back at {show_address(*address)}", error)
                answers = False
            if answers is not None:
                self._reach.answered(ident, address, answers)
            self._found.ring()

    async def _again(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            for ident in self._reach.silent():
                self.look(ident)

    async def _tell(self) -> None:
        while True:
            if self._reach.turn == self._told_turn:
                await self._found.wait()
                continue
            self._told_turn = self._reach.turn
            self._changed()
            await asyncio.sleep(TELL_S)
