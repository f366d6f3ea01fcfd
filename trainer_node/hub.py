"""The hub: the trainer's side of a run. Watches checkpoints, publishes them, plans the chains, seeds the heads.

Promises: a version is announced as sealed only once it is durable here; a restarted hub is the same run (key, versions, epochs); a peer's death or slowness never
holds up publishing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from p2pcast import limits, metrics
from p2pcast.addresses import ANYWHERE, show_address, unscoped
from p2pcast.artifact.run_key import RunKey
from p2pcast.codec.warm import warm_up
from p2pcast.daemon import Memory, node_id
from p2pcast.errors import RefusedError, UsageError
from p2pcast.events import Events
from p2pcast.http import HttpServer
from p2pcast.mirror.names import run_folder
from p2pcast.mirror.objects import Objects
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.node import Node
from p2pcast.state.leftovers import claim, sweep
from p2pcast.state.staging import Staging
from p2pcast.store.files import atomic_write
from p2pcast.store.ladder import RUNGS
from p2pcast.store.state_format import state_lock
from p2pcast.store.store import Store, Stored
from p2pcast.tasks import Tasks, unforeseen
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.trust import bearer
from p2pcast.trust.roles import ENROL
from p2pcast.version import Version
from p2pcast.wire.connection import PARENT
from p2pcast.wire.messages import Body, Type
from p2pcast.wire.token import Token
from topology.sizes import of_steps
from topology.uplink import WINDOW_S, Uplink
from trainer_node import version_numbers
from trainer_node.admission import Admission
from trainer_node.barrier import Tick
from trainer_node.broadcast import Broadcast
from trainer_node.choosing import Choosing
from trainer_node.commits import Commits
from trainer_node.fleet import Fleet
from trainer_node.folders import Folders
from trainer_node.guide import Guide
from trainer_node.hearing import Hearing
from trainer_node.hub_config import HubConfig
from trainer_node.hub_view import HubView
from trainer_node.intake_session import Intake
from trainer_node.keeping import Keeping, Promise
from trainer_node.membership import DEFAULT_UPLINK_BPS, Membership
from trainer_node.mirroring import Mirroring
from trainer_node.outgoing import Outgoing
from trainer_node.pace import Pace, laggards
from trainer_node.past import FILE as PUBLISHED
from trainer_node.past import Past
from trainer_node.peer import Peer
from trainer_node.publishing import Publishing
from trainer_node.recall import ROSTER, Recall, Roster
from trainer_node.sealing import Sealing
from trainer_node.session import Session
from trainer_node.version_numbers import VersionNumbers
from trainer_node.watcher import steps_there

logger = logging.getLogger("p2pcast.hub")

BEAT_S = 1.0
"""Between PINGs to each peer."""
SILENCE_S = 5.0
"""A control connection that has been silent for so long is dead."""
PULLS = 64
"""Peers that may pull from the hub at one time, for what no other peer has: it gives way to versions."""


class Hub(QuietOwner):
    """``run`` until cancelled. Everything happens on one event loop; blocking work goes to executors."""

    def __init__(self, config: HubConfig) -> None:
        self.config = config
        self.view = HubView(self)
        self.events = Events()
        self.tasks = Tasks(self.events)
        self.fleet = Fleet(self.events)
        self.sessions: dict[str, Session] = {}
        self.sealing = Sealing(self)
        self.outgoing = Outgoing(self)
        self.broadcast = Broadcast()
        self.uplink = Uplink()
        """What plans were last sent by."""

    async def run(self) -> None:
        with state_lock(self.config.state), self.tasks.watching():
            await self._open()
            try:
                await self._serve()
            finally:
                await self._close()

    # -- beginning and end

    async def _open(self) -> None:
        state = self.config.state
        if self.config.checkpoints is not None and not self.config.checkpoints.is_dir():
            raise UsageError(
                f"{self.config.checkpoints}: there is no such folder; the trainer's checkpoints (step_N/) are expected in it"
            )
        claim(state, self.config.shadow)
        await asyncio.to_thread(sweep)
        self.key = RunKey.load_or_create(state / "run.key")
        self.memory = Memory(state / "hub.json", {"node": "", "incarnation": 0, "target": None, "leads": {}})
        self.past = Past(state / PUBLISHED, self._steps_there)
        self.past.move_from(self.memory)
        self.memory.update(incarnation=self.memory["incarnation"] + 1)
        self.ident = node_id(self.memory)
        self.admission = Admission(
            self,
            state,
            self.key,
            self.ident,
            plaintext=self.config.plaintext,
            lifetime_s=self.config.certificate_s,
            token_ttl_s=self.config.token_ttl_s,
        )
        self.store = Store(state, self.key.public, counts=self.config.counts)
        for path, why in self.store.damaged:
            logger.warning("not used: %s (%s)", path, why)
        self.node = Node(self.sealing, self.ident, self.key.public)
        self.downstream = Downstream(self.node, PULLS)
        for stored in self.store.artifacts.values():
            self.node.add_stored(stored.assembly, self.store.open_log(stored))
        self.staging = Staging()
        uplink_bps = self.config.uplink_bps or DEFAULT_UPLINK_BPS
        self.membership = Membership(
            self.memory["incarnation"], uplink_bps, self.config.chains, self.config.region, self.config.peer_cap_bps
        )
        self._recall_sizes()
        self.choosing = Choosing(self.config.codec, lambda: self.membership.way(time.monotonic(), self.staging.workers))
        self.numbers = VersionNumbers(state / version_numbers.FILE, version_numbers.this_boot())
        self.recall = Recall(
            self.store,
            self.numbers,
            Roster(state / ROSTER),
            restarted=self.memory["incarnation"] > 1,
            unlike=self._unlike,
        )
        self.publishing = Publishing(
            self.node, self.store, self.key, self.staging, self.config.shadow, self.choosing, self.membership.sizes, self.numbers
        )
        self.keeping = Keeping(
            self, self.key, self.publishing, rungs=RUNGS if self.config.squashes else (), anchor_every=self.config.anchor_every
        )
        self.pace = Pace(
            self.config.max_lag,
            lambda most: laggards(
                self.membership.peers.values(),
                (s.version for s in self.store.artifacts.values()),
                most,
                self.membership.detached,
            ),
            self.config.max_lag_wait_s,
            self.events,
        )
        self.intake = Intake(self.outgoing, self.publishing, self.node, self.store, self.staging, self.config.rank_timeout_s)
        self.commits = Commits(
            self, self.memory, self.events, self.config.commit, self.config.barrier_timeout_s, self.config.barrier_quorum
        )
        self.commits.start(self.store.newest())
        self.mirroring: Mirroring | None = None
        if self.config.mirror is not None:
            objects = Objects(self.config.mirror, run_folder(self.token.run))
            self.mirroring = Mirroring(self, objects, self.config.mirror_bps, self.config.counts)
        identity, tls = self.admission.identity, self.admission.tls
        self.listener = Listener(self, identity, None if tls is None else tls.server, sockets=self.config.sockets)
        client = None if tls is None else tls.client
        self.guide = Guide(
            self.membership, self.sessions, self.fleet, self.events, identity, client, self.node.holdings.__contains__
        )
        self.hearing = Hearing(
            self, self.ident, self.sessions, self.membership, self.guide, self.broadcast, self.fleet, self.commits
        )
        self.hearing.recall_leads(self.memory["leads"])
        self.http = HttpServer(
            self.view.status,
            self.view.ready,
            metrics.registry(self.view.families),
            {"commit": self.commits.command, **self.admission.commands},
            self.admission.bearer,
            self.events,
            self.view.waits(),
            bearer_file=state.resolve() / bearer.FILE,
            only_here=frozenset({"token/create"}),
            healthy=self.tasks.healthy,
        )

    def _steps_there(self) -> set[int]:
        return set() if self.config.checkpoints is None else steps_there(self.config.checkpoints)

    def _recall_sizes(self) -> None:
        """Of the state and of its deltas, from what an earlier process stored."""
        sizes, stored = self.membership.sizes, self.store.artifacts.values()
        if stored:
            sizes.state(max(stored, key=lambda s: s.version).assembly.layout.nbytes)
        sizes.published(*of_steps((s.base, s.version, s.manifest.log) for s in stored if s.base is not None))

    async def _serve(self) -> None:
        await self.listener.start(*self.config.listen)
        await self.http.start(*self.config.http)
        self._write_addresses()
        await self.staging.run(warm_up)
        await self.publishing.restore()
        async with self.tasks.group() as group:
            group.create_task(self.recall.run(self.config.recall_s), name="recall", ends=True)
            group.create_task(self.node.run(), name="node")
            group.create_task(self.downstream.run(), name="keepalives")
            group.create_task(self._beat(), name="control")
            group.create_task(self._measure_uplink(), name="uplink")
            group.create_task(self.guide.lookout.run(), name="lookout")
            # Before anything else is published, and while peers may join: a hub that was restarted hears from its peers first.
            await self.outgoing.begin_from(self.config.base)
            group.create_task(self.intake.run(), name="ranks")
            group.create_task(self.keeping.run(), name="keeping")
            if self.mirroring is not None:
                group.create_task(self.mirroring.run(), name="mirror")
            if self.config.checkpoints is not None:
                folders = Folders(self.outgoing, self.publishing, self.past, self.staging)
                group.create_task(folders.run(self.config.checkpoints), name="checkpoints")

    def _write_addresses(self) -> None:
        # Only now, when connections are answered: who finds the token file may join at once.
        self.token_changed()
        http = show_address(*self.http.address)
        atomic_write(self.config.state / "daemon.json", b'{"http": "http://%s"}\n' % http.encode(), 0o600)
        host, port = self.config.advertise or self.listener.address
        shown = show_address("HUB_HOST" if host in ANYWHERE else host, port)
        token = f" --token-file {self.config.token_file}" if self.config.token_file is not None else ""
        logger.info(
            "run %s, listening on %s, status at http://%s/status",
            self.token.run.hex()[:12],
            show_address(*self.listener.address),
            http,
        )
        logger.info(
            "join with: p2pcast join %s%s --install safetensors:DIR%s",
            shown,
            token,
            " --plaintext" if self.config.plaintext else "",
        )
        if self.config.plaintext:
            logger.warning(
                "--plaintext: links are NOT encrypted: whoever is on the way can read the weights and take over connections"
            )

    async def _close(self) -> None:
        with contextlib.suppress(OSError):
            (self.config.state / "daemon.json").unlink(missing_ok=True)
        # First of all: peers that this end takes away have not left, and are expected back by the next process.
        self.hearing.end()
        self.recall.close()
        await self.http.stop()
        self.intake.close()
        self.keeping.close()
        await self.listener.stop()
        await self.tasks.end()
        for session in list(self.sessions.values()):
            session.link.close()
        self.downstream.close()
        self.node.close()
        self.numbers.close()
        self.staging.close()
        self.past.close()
        if self.publishing.shadow is not None:
            self.publishing.shadow.close()
        self.admission.close()

    def _unlike(self, peer: str, version: Version) -> None:
        logger.error(
            "%s proves a version %s that this hub does not hold: this hub's state may be an older copy; the next version opens branch %d",
            peer,
            version,
            self.numbers.floor,
        )
        self.events.emit("unlike", peer=peer, version=str(version), branch=self.numbers.floor)

    # -- MirroringOwner

    def sending(self) -> bool:
        making = any(h.completed_at is None for h in self.node.holdings.values())
        return making or any(child.feeds.waiting for child in self.downstream.children.values())

    def stored(self) -> None:
        """What the store holds has changed."""
        if self.mirroring is not None:
            self.mirroring.news.ring()

    def dropped(self, artifacts: list[bytes]) -> None:
        for artifact in artifacts:
            self.guide.sources.gone(artifact)
        self.send_all(Type.CATALOG, {"artifacts": [], "dropped": artifacts})

    # -- KeepingOwner

    def kept(self, stored: Stored, took_s: float) -> None:
        self.sealing.add(stored)
        self.events.emit(
            "kept",
            version=str(stored.version),
            base=None if stored.base is None else str(stored.base),
            bytes=stored.manifest.log,
            took_s=round(took_s, 3),
        )
        self.stored()

    # -- HearingOwner

    def welcome(self, session: Session) -> list[tuple[Type, Body]]:
        said: Body = {
            "key": self.key.public,
            "epoch": list(self.membership.plan.epoch),
            "commit": self.commits.mode,
            "target": self.memory["target"],
            "host": unscoped(session.link.remote_host),
        }
        if session.peer is not None:
            said["name"] = session.peer.name
        if not self.config.plaintext:
            said["bearer"] = self.admission.bearer_of(session.link.remote)
        return [
            (Type.WELCOME, said),
            *((Type.EVICTED, body) for body in self.admission.evictions()),
            (Type.CATALOG, self.sealing.catalog()),
            *self.commits.greeting(),
        ]

    def came(self, peer: Peer) -> None:
        self.recall.joined(peer.ident)

    def showed(self, peer: Peer, durable: Sequence[bytes], opened: Sequence[bytes]) -> None:
        self.recall.heard(peer.ident, peer.name, durable, opened)

    def went(self, peer: Peer) -> None:
        self.recall.left(peer.ident)

    def fleet_moved(self) -> None:
        self.pace.moved()
        self.intake.changed()

    def promise(self, base: Version, node: bytes) -> Promise | None:
        return self.keeping.ask(base, node)

    def admitted(self, session: Session, name: str) -> str:
        return self.admission.joined(session.link, name, session.token)

    def learn_evictions(self, signed: list[bytes]) -> None:
        self.admission.learn_evictions(signed)

    def renew(self, session: Session, request: bytes) -> None:
        async def renewed() -> None:
            try:
                await self.admission.renew(session.link, request)
            finally:
                session.renewed()

        self.later(renewed(), f"renew {session.link.name}", vital=False)

    def leads_changed(self, claims: dict[str, str]) -> None:
        # Set here and written there: of two writes at once either has the newest claims.
        self.memory.facts["leads"] = claims
        self.later(self.staging.run(self.memory.update), "leads of engines")

    def is_sealed(self, artifact: bytes) -> bool:
        return artifact in self.store.artifacts

    def complained(self, objects: list[str]) -> None:
        if self.mirroring is not None:
            self.mirroring.complain(objects)

    # -- Acceptor

    def accept_link(self, link: Link, hello: Body) -> None:
        if hello["purpose"] == "data":
            if hello["role"] == PARENT:
                raise RefusedError("a hub has no parent")
            link.owner = self.downstream
            self.downstream.accept(link)
        elif hello["purpose"] == "publish":
            self.intake.accept(link, hello)
        elif hello["purpose"] == ENROL:
            self.admission.accept(link, hello)
        elif hello["purpose"] == "engine":
            raise RefusedError("a hub leads no engine; dial the peer that does")
        else:
            link.owner = Session(link, self.hearing, hello["token"])
            link.await_first_word("JOIN")

    # -- AdmissionOwner

    async def blocking(self, work: Callable[..., Any], *args: Any) -> Any:
        return await self.staging.run(work, *args)

    def later(self, work: Coroutine[Any, Any, None], name: str, *, vital: bool = True) -> None:
        self.tasks.later(work, name, vital=vital)

    def present(self, node: str) -> bool:
        return node in self.sessions

    def cut(self, nodes: frozenset[bytes], signed: list[bytes]) -> None:
        for node in nodes:
            if (session := self.sessions.get(node.hex())) is not None:
                session.farewell = True
        self.hearing.evicted(nodes)
        error = RefusedError("this node was evicted from the run")
        self.listener.drop(nodes, error)
        for link in [link for link in self.downstream.children if link.remote in nodes]:
            link.close(error)
        for at in range(0, len(signed), limits.MAX_STATEMENTS):
            self.send_all(Type.EVICTED, {"nodes": sorted(nodes), "signed": signed[at : at + limits.MAX_STATEMENTS]})

    def told(self, kind: str, **facts: Any) -> None:
        self.events.emit(kind, **facts)

    def token_changed(self) -> Path | None:
        if self.config.token_file is not None:
            atomic_write(self.config.token_file, f"{self.token}\n".encode(), 0o600)
        return self.config.token_file

    @property
    def token(self) -> Token:
        return self.admission.token

    # -- control

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            now = asyncio.get_running_loop().time()
            for session in list(self.sessions.values()):
                session.beat(now, SILENCE_S)
            self.intake.beat(now)
            self.admission.beat()
            self.commits.happened(Tick())
            try:
                self.hearing.settle()
            except Exception as error:  # noqa: BLE001 - what peers report must not end the hub
                unforeseen("planning", error)

    async def _measure_uplink(self) -> None:
        while True:
            await asyncio.sleep(WINDOW_S)
            children = {str(id(link)): child for link, child in self.downstream.children.items() if child.attached}
            sent = {name: sum(s.acked_bytes for s in child.link.stripes.values()) for name, child in children.items()}
            pulling = {name for name, child in children.items() if child.feeds.waiting}
            counted = self.uplink.look(asyncio.get_running_loop().time(), sent, pulling)
            if counted and self.config.uplink_bps is None and self.uplink.bps is not None:
                self.membership.uplink_bps = self.uplink.bps

    # -- CommitsOwner

    def name_of(self, ident: str) -> str:
        peer = self.membership.peers.get(ident)
        return ident if peer is None else peer.name

    def send_all(self, kind: Type, body: Body) -> None:
        for session in self.sessions.values():
            session.link.send(kind, body)
