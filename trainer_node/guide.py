"""What peers are told of one another: their places in the plan, how to reach whom they may need, who could dial them, from whom to pull.

Promises: a peer is told only what is new to it, and a change of the plan is told to those near it alone, unless there is news of who can reach whom; who sent garbage
feeds nobody any more, which is said once for each verdict however often its witness repeats itself.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

from p2pcast.events import Events
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Body, Type
from topology.sideways import sideways
from topology.sources import Sources
from topology.tree import ROOT
from trainer_node.fleet import Fleet
from trainer_node.lookout import Lookout
from trainer_node.membership import Membership
from trainer_node.peer import Peer
from trainer_node.session import Session

logger = logging.getLogger("p2pcast.hub")

BACKUPS = 8
"""Ancestors that a peer is told of; after so many at once are gone, the hub."""


class Guide:
    """``sessions``: by peer. Its ``lookout`` is run by its owner."""

    def __init__(
        self,
        membership: Membership,
        sessions: Mapping[str, Session],
        fleet: Fleet,
        events: Events,
        identity: Identity,
        tls: ssl.SSLContext | None,
        knows: Callable[[bytes], bool] = lambda artifact: True,
    ) -> None:
        self.sources = Sources()
        self.knows = knows
        """Whether an artifact is one of this run's that the hub has. Of any other nothing is remembered, whatever peers say."""
        self.lookout = Lookout(membership.reach, identity, tls, self._looked)
        self._membership = membership
        self._sessions = sessions
        self._fleet = fleet
        self._events = events
        self._known_reach: tuple[int, bool] = (-1, True)

    # -- places

    def send_plans(self) -> None:
        """To whom the newest plan says something new: those near what changed, all once there is news of who reaches whom."""
        plan, reach, now = self._membership.plan, self._membership.reach, time.monotonic()
        peers = self._membership.peers
        moved, near = self._membership.news()
        self._fleet.planned(
            plan.epoch, [[peers[p].name, "hub" if above == ROOT else peers[above].name] for p, above in moved.items()]
        )
        known, self._known_reach = self._known_reach, (reach.turn, reach.plain)
        for ident in near if known == self._known_reach and reach.plain else self._sessions:
            session = self._sessions[ident]
            parent = peers.get(plan.parent[ident])
            # Called by the hub alone may somebody dial whom he cannot be dialled by; so neighbours, who matter when it is gone, are of another kind.
            backups = [
                peers[b] for b in plan.backups(ident, BACKUPS) if b in peers and (reach.plain or reach.links(b, ident, now))
            ]
            neighbours = [peers[n] for n in sideways(plan, ident) if reach.plain or reach.dials(ident, n, now)]
            named = [p for p in (parent, *backups, *neighbours) if p is not None]
            if session.is_news(reach.turn, tuple(p.place for p in named)):
                session.send_ways([self._ways(ident, p, now) for p in named])
            session.send_plan(plan.epoch, None if parent is None else parent.place, [b.place for b in backups])
            session.send_neighbours([n.place for n in neighbours])

    def _ways(self, ident: str, peer: Peer, now: float) -> list[Any]:
        reach = self._membership.reach
        ways = reach.ways(ident, peer.ident)
        return [bytes.fromhex(peer.ident), bool(ways) and reach.dials(ident, peer.ident, now), [list(way) for way in ways]]

    # -- who reaches whom

    def _looked(self) -> None:
        """It turned out who can reach whom."""
        self._membership.looked(time.monotonic())
        self.send_plans()

    def hangs(self, peer: Peer, above: str) -> None:
        """It says that it is fed by another peer: one of the two could dial the other."""
        made = (above, peer.ident) if peer.dialled_by_parent else (peer.ident, above)
        self._membership.reach.reached(*made)
        self.lookout.learnt()

    def called(self, session: Session, body: Body) -> None:
        """It wants to be dialled by another peer."""
        peer, target = session.peer, body["node"].hex()
        assert peer is not None
        ways, other = self._membership.reach.ways(target, peer.ident), self._sessions.get(target)
        if other is None or not ways:
            session.link.send(Type.UNREACHED, {"node": body["node"]})
        else:
            called = {"node": session.link.remote, "stripes": body["stripes"], "ways": [list(way) for way in ways]}
            other.link.send(Type.CALLED, called)

    def missed(self, session: Session, node: bytes) -> None:
        """It has tried to reach another peer, and could not."""
        peer = session.peer
        assert peer is not None
        self._membership.reach.unreached(peer.ident, node.hex(), time.monotonic())
        if (other := self._sessions.get(node.hex())) is not None:
            other.link.send(Type.UNREACHED, {"node": session.link.remote})
        self.lookout.look(node.hex())
        self.lookout.learnt()

    # -- pulling, and who spoils it

    def sought(self, session: Session, body: Body) -> None:
        """It wants to know who holds an artifact."""
        peer, peers, reach, now = session.peer, self._membership.peers, self._membership.reach, time.monotonic()
        assert peer is not None
        ident, region = peer.ident, peer.region
        unfit = {node.hex() for node in body["without"]} | self._membership.detached | self._membership.muted(now)
        holders: list[str] = []
        if self.knows(body["artifact"]):
            holders = self.sources.seek(ident, body["artifact"], unfit, lambda p: peers[p].region == region)
        found = [peers[p] for p in holders if p in peers]
        found = [p for p in found if reach.plain or reach.links(p.ident, ident, now)]
        session.link.send(Type.WAYS, {"peers": [self._ways(ident, p, now) for p in found]})
        session.link.send(Type.SOURCES, {"artifact": body["artifact"], "peers": [list(p.place) for p in found]})

    def garbled(self, witness: Peer, rows: list[tuple[bytes, int]], now: float) -> None:
        """It says who has sent it how many pieces that did not match."""
        blame = self._membership.blame
        named = [(node.hex(), pieces) for node, pieces in rows]
        muted, given_up = blame.muted(now), {ident for ident, _ in named if blame.quarantined(ident)}
        for ident in self._membership.blamed(witness.ident, named, now):
            name, quarantined = self._membership.peers[ident].name, blame.quarantined(ident)
            if ident in (given_up if quarantined else muted):
                continue
            self._events.emit("garbled", peer=name, node=ident, witness=witness.name, quarantined=quarantined)
            logger.warning(
                "%s sent %s pieces that do not match: it feeds nobody %s",
                name, witness.name, "any more" if quarantined else "for a while",
            )  # fmt: skip
        self.send_plans()

    def withheld(self, now: float) -> None:
        """What peers said that they lack is judged."""
        anew = self._membership.withheld(now)
        for ident, witness in anew:
            quarantined = self._membership.withholding.quarantined(ident)
            names = [self._membership.peers[i].name if i in self._membership.peers else i for i in (ident, witness)]
            self._events.emit("withheld", peer=names[0], node=ident, witness=names[1], quarantined=quarantined)
            logger.warning(
                "peer %s did not pass on to %s what was sealed: it feeds no other peer %s",
                names[0], names[1], "any more" if quarantined else "for a while",
            )  # fmt: skip
        if anew:
            self.send_plans()
