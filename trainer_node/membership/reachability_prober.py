"""Finds out which addresses of peers can be dialled.

The hub dials every address of a peer once the peer has joined, and again when another peer reports an address as
unreachable. An address that does not answer is dialled again from time to time. The hub sends only a handshake.
`topology.reachability` decides what follows from the answers.
"""

from __future__ import annotations

import asyncio
import logging
import ssl

from p2pcast.ground.addresses import Address, family_of, is_loopback, may_be_advertised, show_address, site_of
from p2pcast.ground.limits import MAX_NODE_ADDRESSES
from p2pcast.ground.observers import Observers
from p2pcast.ground.wakeup import Wakeup
from p2pcast.process.background_tasks import report_bug
from p2pcast.transport.dial import probe as dial_probe
from p2pcast.wire import messages
from p2pcast.wire.connection import Identity
from topology.reachability import Contact, Reach
from trainer_node.membership.peer_record import PeerRecord

logger = logging.getLogger("p2pcast.hub")

AT_ONCE = 16
"""Number of addresses that are dialled at the same time: thousands of peers may join at once."""
AGAIN_S = 60.0
"""Interval between two attempts to dial addresses that did not answer, in seconds."""
NOTIFY_S = 0.1
"""Shortest interval between two announcements, in seconds, because news may concern every peer."""


def whereabouts(body: messages.Join, observed: str) -> tuple[tuple[Contact, ...], tuple[int, ...]]:
    """Return a peer's addresses and IP versions, from its JOIN and its connection's source address. If the peer
    advertises an address, no others are inferred.
    """
    host, port = body.listen
    said: list[Address] = [(h, p) for h, p in body.ways or () if h]
    found: dict[Address, bool] = {}
    """Address → whether it is in the peer's own network."""
    if host:
        found = dict.fromkeys([(host, port), *said], False)
    else:
        if may_be_advertised(observed):
            found[observed, port] = False
        for address in said:
            found.setdefault(address, True)
    ways = tuple(
        Contact(address, family_of(address[0]), own=own, loopback=is_loopback(address[0]))
        for address, own in found.items()
    )
    stated = (4, 6) if body.families is None else body.families
    families = {f for f in (*stated, family_of(observed)) if f is not None}
    return ways[:MAX_NODE_ADDRESSES], tuple(sorted(families))


def note_addresses(peer: PeerRecord, body: messages.Join, observed: str) -> None:
    """Record the addresses of a new peer."""
    peer.site, peer.beside_hub = site_of(observed), is_loopback(observed)
    peer.ways, peer.families = whereabouts(body, observed)


class ReachabilityProber:
    """Dials peers; ``run`` runs until cancelled."""

    def __init__(self, reach: Reach, identity: Identity, tls: ssl.SSLContext | None) -> None:
        self.changed: Observers[[]] = Observers()
        """Called after changes that peers may have to be informed of."""
        self._reach = reach
        self._identity = identity
        self._tls = tls
        self._due: dict[str, list[Address]] = {}
        """Peer → its addresses that are yet to be dialled; peers take turns."""
        self._work = Wakeup()
        self._found = Wakeup()
        self._notified_turn = 0

    def probe(self, ident: str) -> None:
        """Dial each of a peer's addresses; if the peer joined again, only its new addresses."""
        if addresses := [address for address, _ in self._reach.answers(ident)]:
            self._due[ident] = addresses
            self._work.notify()

    def wake(self) -> None:
        """Announce changes of ``reach`` that were found elsewhere."""
        self._found.notify()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(AT_ONCE):
                group.create_task(self._try(), name=f"dial back {number}")
            group.create_task(self._again(), name="dial back again")
            group.create_task(self._announce(), name="announce reachability")

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
                answers = await dial_probe(address, self._identity, bytes.fromhex(ident), self._tls)
            except Exception as error:  # noqa: BLE001 - one peer's address must not stop the hub
                report_bug(f"dialling a peer back at {show_address(*address)}", error)
                answers = False
            if answers is not None:
                self._reach.answered(ident, address, answers)
            self._found.notify()

    async def _again(self) -> None:
        while True:
            await asyncio.sleep(AGAIN_S)
            for ident in self._reach.silent():
                self.probe(ident)

    async def _announce(self) -> None:
        while True:
            if self._reach.turn == self._notified_turn:
                await self._found.wait()
                continue
            self._notified_turn = self._reach.turn
            self.changed.notify()
            await asyncio.sleep(NOTIFY_S)
