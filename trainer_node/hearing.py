"""What peers say over their control connections, and what follows from it: for the plan, for the barrier, for what the others are told.

Promises: a node has one session, its newest, and the end of an older one is no news of the peer; plans change by what peers report of themselves, and are told before
the next word is heard.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from p2pcast.addresses import show_address, unscoped
from p2pcast.errors import P2PCastError, RemoteError
from p2pcast.relay.lag import Inflow
from p2pcast.version import Version
from p2pcast.wire.messages import Body, Type
from trainer_node.barrier import Left
from trainer_node.broadcast import Broadcast
from trainer_node.commits import Commits
from trainer_node.engines import engine_rows
from trainer_node.fleet import Fleet
from trainer_node.guide import Guide
from trainer_node.keeping import Promise
from trainer_node.lookout import settle_in
from trainer_node.membership import Membership
from trainer_node.peer import Peer
from trainer_node.session import Session
from trainer_node.spans import Spans

logger = logging.getLogger("p2pcast.hub")


class HearingOwner(Protocol):
    """A hub, in what is none of the plan's business."""

    def welcome(self, session: Session) -> list[tuple[Type, Body]]:
        """What a peer that has just been given a place is told first."""
        ...

    def came(self, peer: Peer) -> None:
        """It has joined."""

    def showed(self, peer: Peer, durable: Sequence[bytes], opened: Sequence[bytes]) -> None:
        """It has reported; with its first report it shows signed records of what it knows of the run."""

    def went(self, peer: Peer) -> None:
        """It has left, or was lost."""

    def fleet_moved(self) -> None:
        """A peer has come to another version, or has gone."""

    def promise(self, base: Version, node: bytes) -> Promise | None:
        """Of a squash from ``base`` to the newest version, for this node."""
        ...

    def admitted(self, session: Session, name: str) -> str:
        """What a peer that asks for this name goes by. Raises RefusedError."""
        ...

    def learn_evictions(self, signed: list[bytes]) -> None:
        """A peer knows of these evictions. Raises IntegrityError."""

    def renew(self, session: Session, request: bytes) -> None:
        """It asks for its next certificate."""

    def is_sealed(self, artifact: bytes) -> bool:
        """Whether it lies in the hub's store."""
        ...

    def complained(self, objects: list[str]) -> None:
        """They are on the mirror, and are not what they should be."""

    def leads_changed(self, claims: dict[str, str]) -> None:
        """Engine → the node that leads it: to outlive this process."""


class Hearing:
    """A ``SessionOwner``. ``ident``: the hub's node; ``sessions``: by peer, to be written here alone."""

    def __init__(
        self,
        owner: HearingOwner,
        ident: bytes,
        sessions: dict[str, Session],
        membership: Membership,
        guide: Guide,
        broadcast: Broadcast,
        fleet: Fleet,
        commits: Commits,
    ) -> None:
        self.guide = guide
        self.odd_reports = 0
        """Reports of which something was left out."""
        self._owner = owner
        self._ident = ident
        self._sessions = sessions
        self._membership = membership
        self._broadcast = broadcast
        self._fleet = fleet
        self._commits = commits
        self._ended = False
        self._spans = Spans()
        self._leads: dict[str, str] = {}
        """What is remembered of ``_spans.claims``."""

    def joined(self, session: Session, body: Body) -> None:
        ident = session.link.remote.hex()
        host, port = body["listen"]
        now = time.monotonic()
        name = self._owner.admitted(session, body["name"])
        peer = Peer(ident, name, body["region"], host or unscoped(session.link.remote_host), port, now)
        peer.staged = None if body["held"] is None else Version.of(body["held"])
        settle_in(peer, body, session.link.remote_host)
        engine = body["engine"]
        self._spans.join(ident, peer.name, None if engine is None else (engine[0], engine[1]), peer.place, now)
        self._remember_leads()
        old = self._sessions.pop(ident, None)
        if old is not None:
            old.link.close(RemoteError("the same node joined again"))
            self.guide.sources.left(ident)
            self._commits.happened(Left(ident))
        session.peer = peer
        self._sessions[ident] = session
        self._owner.came(peer)
        self._membership.join(peer, now)
        self.guide.lookout.look(ident)
        for told in self._owner.welcome(session):
            session.link.send(*told)
            if told[0] is Type.WELCOME:
                # Before the catalog: a lead that has the catalog and no names takes this hub for an older one.
                self._send_rosters()
        self._fleet.joined(peer)
        self.guide.send_plans()
        self._send_leads()
        logger.info("%s joined from %s (%d peers)", peer.name, show_address(peer.host, peer.port), len(self._sessions))

    def enrolled(self, session: Session, body: Body) -> None:
        self._owner.renew(session, body["request"])

    def left_out(self, session: Session, keys: tuple[str, ...], *, first: bool) -> None:
        self.odd_reports += 1
        if first and session.peer is not None:
            logger.warning("%s: its reports have invalid values, which are ignored: %s", session.peer.name, ", ".join(keys))

    def reported(self, session: Session, body: Body) -> None:
        peer = session.peer
        assert peer is not None
        staged = None if body["staged"] is None else Version.of(body["staged"])
        moved_on = staged != peer.staged
        self._owner.showed(peer, body.get("durable", ()), body.get("opened", ()))
        peer.staged = staged
        peer.committed = None if body["committed"] is None else Version.of(body["committed"])
        peer.report = body
        peer.engines = engine_rows(body)
        self._owner.fleet_moved()
        now = time.monotonic()
        self._fleet.reported(peer, now)
        self._commits.reported(peer)
        if (transfer := body.get("transfer")) is not None:
            size, micros = transfer
            self._membership.transferred(peer.ident, now, size, micros / 1e6)
        self._membership.heard(peer.ident, now)
        held = [artifact for artifact in body.get("held", ()) if self.guide.knows(artifact)]
        self.guide.sources.holds(peer.ident, held, body.get("dropped", ()))
        if "garbled" in body:
            self.guide.garbled(peer, body["garbled"], now)
        if "evicted" in body:
            self._owner.learn_evictions(body["evicted"])
        if "lacking" in body:
            rows = [(a, None if parent is None else parent.hex()) for a, parent in body["lacking"] if self._owner.is_sealed(a)]
            self._membership.lacks(peer.ident, rows, now)
        if "spoilt" in body:
            self._owner.complained(body["spoilt"])
        parent = body["parent"]
        if parent is not None:
            incarnation, counter = body.get("epoch", (0, 0))
            above = "" if parent == self._ident else parent.hex()
            if above:
                self.guide.hangs(peer, above)
            if self._membership.moved(peer.ident, above, (incarnation, counter)):
                self.guide.send_plans()
        said = body.get("inflow")
        inflow = None if said is None else Inflow(said[0], said[1] / 1e6, said[2])
        if inflow is not None and peer.ident in self._broadcast.awaited and self._membership.progressed(peer.ident, now, inflow):
            logger.info("%s falls behind: the plan is changed around it", peer.name)
            self.guide.send_plans()
        if moved_on:
            self.settle()

    def asked(self, session: Session, body: Body) -> None:
        base = Version.of(body["base"])
        promise = self._owner.promise(base, session.link.remote)
        answer: Body = {"base": list(base), "version": None, "bytes": 0, "wait_us": 0}
        if promise is not None:
            answer |= {"version": list(promise.version), "bytes": promise.bytes, "wait_us": int(promise.wait_s * 1e6)}
        session.link.send(Type.SQUASHING, answer)

    def end(self) -> None:
        """This hub ends, and takes the connections with it: no peer is told that another has left."""
        self._ended = True

    def left(self, session: Session, error: P2PCastError | None) -> None:
        peer = session.peer
        if self._ended or peer is None or self._sessions.get(peer.ident) is not session:
            return
        del self._sessions[peer.ident]
        self._owner.went(peer)
        self.guide.sources.left(peer.ident)
        self._membership.leave(peer.ident, time.monotonic(), failed=not session.farewell)
        self._fleet.left(peer, "" if session.farewell else str(error or "its connection ended"))
        self._commits.happened(Left(peer.ident))
        self._spans.leave(peer.ident, time.monotonic())
        logger.info(
            "%s %s (%d peers)",
            peer.name,
            "left" if session.farewell else f"was lost{f': {error}' if error else ''}",
            len(self._sessions),
        )
        self._owner.fleet_moved()
        self.guide.send_plans()
        self._send_leads()
        self.settle()

    def settle(self) -> None:
        """Between broadcasts the plan may change; at any time, around a peer that withholds what it should pass on."""
        now = time.monotonic()
        self.guide.withheld(now)
        slow = self._membership.detached
        staged = {i: None if s.peer is None else s.peer.staged for i, s in self._sessions.items() if i not in slow}
        if self._broadcast.settled(staged, now):
            changed = self._membership.replan(now)
        else:
            changed = not self._broadcast.under_way and self._membership.repair(now)
        if changed:
            self.guide.send_plans()

    def recall_leads(self, claims: dict[str, str]) -> None:
        """Engine → the node that led it, of an earlier process."""
        self._leads = dict(claims)
        self._spans.recall(claims, time.monotonic())

    def evicted(self, nodes: Iterable[bytes]) -> None:
        """The names of engines that they led are free."""
        for node in nodes:
            self._spans.leave(node.hex(), time.monotonic(), evicted=True)
        self._remember_leads()

    def _remember_leads(self) -> None:
        if (claims := self._spans.claims) != self._leads:
            self._leads = claims
            self._owner.leads_changed(claims)

    def _send_rosters(self) -> None:
        for ident, engine, members in self._spans.rosters():
            self._sessions[ident].link.send(Type.ENGINE, {"name": engine, "lead": None, "members": members})

    def _send_leads(self) -> None:
        self._send_rosters()
        for ident, engine, lead in self._spans.news():
            place = None if lead is None else [*lead]
            if lead is not None and (ways := self._membership.reach.ways(ident, lead[0].hex())):
                place = [lead[0], *ways[0]]
            self._sessions[ident].link.send(Type.ENGINE, {"name": engine, "lead": place})
