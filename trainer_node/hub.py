"""The hub: the trainer's side of a run. Watches checkpoints, publishes them, plans the chains, seeds the heads.

Promises: a version is announced as sealed only once it is durable here; a restarted hub is the same run (key, versions, epochs); a peer's death or slowness never
holds up publishing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pcast import limits, metrics
from p2pcast.addresses import ANYWHERE, show_address
from p2pcast.artifact.records import ANCHOR, Open, RunKey, run_id
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.layout import Layout
from p2pcast.codec.warm import warm_up
from p2pcast.daemon import Memory, node_id, state_lock
from p2pcast.errors import P2PCastError, RefusedError, RemoteError, UsageError
from p2pcast.events import Events
from p2pcast.http import HttpServer
from p2pcast.mirror.names import run_folder
from p2pcast.mirror.objects import Objects
from p2pcast.relay.catchup import Edge, cheapest_path
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.holding import Holding
from p2pcast.relay.lag import Inflow
from p2pcast.relay.node import Node
from p2pcast.relay.upstream import Upstream
from p2pcast.state.staging import Staging
from p2pcast.store.files import atomic_write
from p2pcast.store.ladder import RUNGS
from p2pcast.store.log import Log
from p2pcast.store.store import Store, Stored
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.transport.sockets import Sockets
from p2pcast.transport.stripe import DEFAULT
from p2pcast.trust.roles import ENROL
from p2pcast.version import Version
from p2pcast.wire.connection import PARENT
from p2pcast.wire.messages import Body, Type
from p2pcast.wire.token import Token
from topology.sizes import of_steps
from topology.uplink import WINDOW_S, Uplink
from trainer_node.admission import LIFETIME_S, Admission
from trainer_node.barrier import Aborted, Left, Opened, Sealed, Tick
from trainer_node.broadcast import Broadcast
from trainer_node.choosing import Choosing
from trainer_node.commits import Commits
from trainer_node.engines import engine_rows
from trainer_node.fleet import Fleet
from trainer_node.folders import Folders
from trainer_node.guide import Guide
from trainer_node.hub_view import HubView
from trainer_node.intake_session import Intake
from trainer_node.keeping import Keeping
from trainer_node.lookout import settle_in
from trainer_node.membership import DEFAULT_UPLINK_BPS, Membership
from trainer_node.mirroring import Mirroring
from trainer_node.pace import Pace, laggards
from trainer_node.peer import Peer
from trainer_node.publishing import Published, Publishing
from trainer_node.session import Session
from trainer_node.spans import Spans

logger = logging.getLogger("p2pcast.hub")

DEFAULT_PORT = 7077
DEFAULT_HTTP_PORT = 7078
BEAT_S = 1.0
"""Between PINGs to each peer."""
SILENCE_S = 5.0
"""A control connection that has been silent for so long is dead."""
PULLS = 64
"""Peers that may pull from the hub at one time, for what no other peer has: it gives way to versions."""
FROM_RANKS = " from ranks"


@dataclass(frozen=True, slots=True)
class HubConfig:
    checkpoints: Path | None
    """None: versions come from a trainer's ranks alone."""
    state: Path
    shadow: Path
    base: Path | None = None
    listen: tuple[str, int] = ("", DEFAULT_PORT)
    advertise: tuple[str, int] | None = None
    http: tuple[str, int] = ("127.0.0.1", DEFAULT_HTTP_PORT)
    uplink_bps: float | None = None
    """Stated; else it is measured, and until then taken for `DEFAULT_UPLINK_BPS`."""
    chains: int | None = None
    region: str = ""
    """Peers that join with another label are taken to share the way into theirs."""
    commit: str = "auto"
    barrier_timeout_s: float = 30.0
    barrier_quorum: float = 0.9
    codec: str = "auto"
    max_lag: int | None = None
    """No version begins while a peer is more versions behind than this."""
    squashes: bool = True
    """Squashed deltas are kept ready for late peers, and made for those that ask."""
    token_file: Path | None = None
    mirror: str | None = None
    """URL of an object store that is to hold a copy of the run."""
    mirror_bps: float | None = None
    """What the copy may take of the uplink; None: what live traffic leaves."""
    sockets: Sockets = DEFAULT
    plaintext: bool = False
    """Links without TLS, and one token for all."""
    certificate_s: float = LIFETIME_S
    """How long a certificate is in force."""


class Hub(QuietOwner):
    """``run`` until cancelled. Everything happens on one event loop; blocking work goes to executors."""

    def __init__(self, config: HubConfig) -> None:
        self.config = config
        self.view = HubView(self)
        self.events = Events()
        self.fleet = Fleet(self.events)
        self.sessions: dict[str, Session] = {}
        self.spans = Spans()
        self.published: Published | None = None
        self.skipped: dict[str, str] = {}
        """Folder name (``step_N from ranks`` for what came from ranks) → why it was not published."""
        self._sealing: set[asyncio.Task[None]] = set()
        self.broadcast = Broadcast()
        self.uplink = Uplink()
        """What plans were last sent by."""

    async def run(self) -> None:
        with state_lock(self.config.state):
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
        self.key = RunKey.load_or_create(state / "run.key")
        self.memory = Memory(state / "hub.json", {"node": "", "incarnation": 0, "target": None, "published": {}, "marks": {}})
        self.memory.update(incarnation=self.memory["incarnation"] + 1)
        self.ident = node_id(self.memory)
        self.admission = Admission(
            self,
            state,
            run_id(self.key.public),
            self.ident,
            plaintext=self.config.plaintext,
            lifetime_s=self.config.certificate_s,
        )
        self.store = Store(state, self.key.public)
        for path, why in self.store.damaged:
            logger.warning("not used: %s (%s)", path, why)
        self.node = Node(self, self.ident, self.key.public)
        self.downstream = Downstream(self.node, PULLS)
        for stored in self.store.artifacts.values():
            self.node.add_stored(stored.assembly, self.store.open_log(stored))
        self.staging = Staging()
        uplink_bps = self.config.uplink_bps or DEFAULT_UPLINK_BPS
        self.membership = Membership(self.memory["incarnation"], uplink_bps, self.config.chains, self.config.region)
        self._recall_sizes()
        self.choosing = Choosing(self.config.codec, lambda: self.membership.way(time.monotonic(), self.staging.workers))
        self.publishing = Publishing(
            self.node, self.store, self.key, self.staging, self.config.shadow, self.choosing, self.membership.sizes
        )
        self.keeping = Keeping(self, self.key, self.publishing, rungs=RUNGS if self.config.squashes else ())
        self.pace = Pace(
            self.config.max_lag,
            lambda most: laggards(self.membership.peers.values(), (s.version for s in self.store.artifacts.values()), most),
        )
        self.intake = Intake(self, self.publishing, self.node, self.store, self.staging)
        self.commits = Commits(
            self, self.memory, self.events, self.config.commit, self.config.barrier_timeout_s, self.config.barrier_quorum
        )
        self.commits.start(self.store.newest())
        self.mirroring: Mirroring | None = None
        if self.config.mirror is not None:
            objects = Objects(self.config.mirror, run_folder(self.token.run))
            self.mirroring = Mirroring(self, objects, self.config.mirror_bps)
        identity, tls = self.admission.identity, self.admission.tls
        self.listener = Listener(self, identity, None if tls is None else tls.server, sockets=self.config.sockets)
        self.guide = Guide(self.membership, self.sessions, self.fleet, self.events, identity, None if tls is None else tls.client)
        self.http = HttpServer(
            self.view.status,
            self.view.ready,
            metrics.registry(self.view.families),
            {"commit": self.commits.command, **self.admission.commands},
            self.admission.bearer,
            self.events,
            self.view.waits(),
            only_here=frozenset({"token/create"}),
        )

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
        await self._start_base()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.node.run(), name="node")
            group.create_task(self.downstream.run(), name="keepalives")
            group.create_task(self._beat(), name="control")
            group.create_task(self._measure_uplink(), name="uplink")
            group.create_task(self.guide.lookout.run(), name="lookout")
            group.create_task(self.intake.run(), name="ranks")
            group.create_task(self.keeping.run(), name="keeping")
            if self.mirroring is not None:
                group.create_task(self.mirroring.run(), name="mirror")
            if self.config.checkpoints is not None:
                group.create_task(Folders(self).run(self.config.checkpoints), name="checkpoints")

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
        await self.http.stop()
        self.intake.close()
        self.keeping.close()
        self.commits.close()
        await self.listener.stop()
        for session in list(self.sessions.values()):
            session.link.close()
        self.downstream.close()
        self.node.close()
        self.staging.close()
        if self.publishing.shadow is not None:
            self.publishing.shadow.close()

    # -- publishing

    async def _start_base(self) -> None:
        if self.config.base is None or self.publishing.shadow is not None:
            return
        checkpoint = await self.staging.run(Checkpoint.open, self.config.base)
        files = await self.staging.run(checkpoint.small_files)
        self.published = await self.publishing.publish_anchor(Version(0, 0), checkpoint, checkpoint.layout(), files)
        self.membership.sizes.state(self.published.dense_bytes)
        self._sealed(self.published.version, self.published.bytes)
        logger.info("version 0.0 is %s: %.1f MB", self.config.base, self.published.dense_bytes / 1e6)
        self._announce(self.node.holdings.values())

    def begins(self, version: Version) -> None:
        """Its cells are about to go out."""
        head = self.publishing.head
        if head is not None and version.branch > head.branch:
            logger.info("step %d begins branch %d: the newest version was %s", version.step, version.branch, head)
            self.events.emit("branch", version=str(version), after=str(head))
        now = time.monotonic()
        self.events.emit("opened", version=str(version))
        self.fleet.began(version, now)
        self.broadcast.begin(version, self.sessions, now)
        self.membership.began()

    async def went_out(self, done: Published) -> None:
        version = done.version
        self.published = done
        self.membership.sizes.state(done.dense_bytes)
        # Deltas are announced as they open and seal; an anchor lies whole in the store at once.
        if done.kind == ANCHOR:
            self._sealed(version, done.bytes)
        self._announce(h for h in self.node.holdings.values() if h.open.base is None and h.open.version == version)
        logger.info(
            "version %s: %s of %.1f kB, %.0f times smaller than dense; %.2f %% of %d values changed; encoded in %.2f s",
            version, done.kind, done.bytes / 1e3, done.dense_bytes / max(1, done.bytes), 100 * done.changed / max(1, done.params),
            done.params, done.encode_s,
        )  # fmt: skip
        if done.choice is not None:
            logger.info("version %s went out in codec %s: %s", version, done.choice.codec, done.choice.why)
        self.intake.changed()
        self.keeping.news()
        await self._retain()

    async def until_near(self) -> None:
        await self.pace.until_near()

    # -- FoldersOwner

    def skip(self, name: str, why: str) -> None:
        self.skipped[name] = why
        self.events.emit("skipped", folder=name, why=why)
        logger.warning("skipped %s: %s", name, why)

    def not_skipped(self, name: str) -> None:
        self.skipped.pop(name, None)

    def broken(self) -> bool:
        return self.node.error.done()

    # -- IntakeOwner

    async def is_out(self, done: Published) -> None:
        """As from a folder: the same weights may come in one, too, and are nothing new then."""
        try:
            await self.went_out(done)
            self.skipped = {name: why for name, why in self.skipped.items() if not name.endswith(FROM_RANKS)}
            marks = self.memory["marks"] | {str(done.version.step): self.publishing.mark_of(done.version)}
            await self.staging.run(self.memory.update, marks=marks)
        except P2PCastError as error:
            logger.warning("after version %s: %s", done.version, error)

    def came_to_nothing(self, step: int, why: str) -> None:
        self.broadcast.end()
        self.skip(f"step_{step}{FROM_RANKS}", why)

    def engines(self) -> list[list[Any]]:
        rows = ((f"{p.name}/{e.name}", e) for p in self.membership.peers.values() for e in p.engines)
        return [
            [name[: limits.MAX_ENGINE_NAME], None if e.committed is None else list(e.committed), e.ready] for name, e in rows
        ][: limits.MAX_ENGINES]

    # -- MirroringOwner

    def sending(self) -> bool:
        making = any(h.completed_at is None for h in self.node.holdings.values())
        return making or any(child.feeds.waiting for child in self.downstream.children.values())

    def _stored(self) -> None:
        """What the store holds has changed."""
        if self.mirroring is not None:
            self.mirroring.news.ring()

    async def _retain(self) -> None:
        gone = await self.staging.run(self.store.retain, self._needed())
        for stored in gone:
            self.node.forget(stored.id)
        if gone:
            self.send_all(Type.CATALOG, {"artifacts": [], "dropped": [s.id for s in gone]})
        self._stored()

    def _needed(self) -> frozenset[bytes]:
        """What live peers need to get to the newest version, and what is just being sent."""
        edges = [Edge(s.id, s.base, s.version, s.manifest.log) for s in self.store.artifacts.values()]
        ways = [cheapest_path(held, edges) for held in {p.staged for p in self.membership.peers.values()}]
        sent = (feed.artifact.id for child in self.downstream.children.values() for feed in child.feeds)
        return frozenset(edge.artifact for way in ways for edge in way) | frozenset(sent)

    # -- KeepingOwner

    def kept(self, stored: Stored, took_s: float) -> None:
        self._announce([self.node.add_stored(stored.assembly, self.store.open_log(stored))])
        self._later(self._retain(), f"retention after {stored.version}")
        self.events.emit(
            "kept",
            version=str(stored.version),
            base=None if stored.base is None else str(stored.base),
            bytes=stored.manifest.log,
            took_s=round(took_s, 3),
        )
        self._stored()

    # -- NodeOwner

    def make_log(self, open_: Open, layout: Layout) -> Log:
        raise RemoteError("a hub takes no artifacts from others")

    def on_opened(self, holding: Holding) -> None:
        self.commits.happened(Opened(holding.open.version))
        self._announce([holding])

    def on_complete(self, holding: Holding) -> None:
        self._later(self._seal(holding), f"seal {holding.open.version}")

    def _later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._sealing.add(task)
        task.add_done_callback(self._sealing.discard)

    async def _seal(self, holding: Holding) -> None:
        if holding.proof is not None and not await holding.proof:
            return
        try:
            await self.staging.run(self.store.seal, holding.log, holding.assembly)
        except P2PCastError as error:
            if not self.node.error.done():
                self.node.error.set_exception(error)
            return
        holding.durable.set()
        self._stored()
        size_bytes = 0 if holding.assembly.manifest is None else holding.assembly.manifest.log
        if self.membership.sizes.published(size_bytes):
            logger.info("plans are made for versions of about %.3g MiB now", self.membership.sizes.bytes / limits.MIB)
        self._announce([holding])
        self._sealed(holding.open.version, size_bytes)

    def _sealed(self, version: Version, size_bytes: int) -> None:
        self.events.emit("sealed", version=str(version), bytes=size_bytes)
        self.commits.happened(Sealed(version))

    def on_aborted(self, holding: Holding) -> None:
        self.events.emit("aborted", version=str(holding.open.version))
        self.commits.happened(Aborted(holding.open.version))
        self._later(self.staging.run(self.store.abandon, holding.log, holding.id), f"abandon {holding.open.version}")
        self.send_all(Type.CATALOG, {"artifacts": [], "dropped": [holding.id]})

    def on_offered(self, upstream: Upstream) -> None: ...

    def on_upstream_lost(self, upstream: Upstream, error: P2PCastError | None) -> None: ...

    # -- Acceptor, LinkOwner

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
            link.owner = Session(link, self)

    # -- SessionOwner

    def joined(self, session: Session, body: Body) -> None:
        ident = session.link.remote.hex()
        host, port = body["listen"]
        now = time.monotonic()
        peer = Peer(ident, body["name"], body["region"], host or session.link.remote_host, port, now)
        peer.staged = None if body["held"] is None else Version.of(body["held"])
        settle_in(peer, body, session.link.remote_host)
        engine = body["engine"]
        self.spans.join(ident, peer.name, None if engine is None else (engine[0], engine[1]), peer.place)
        old = self.sessions.pop(ident, None)
        if old is not None:
            old.link.close(RemoteError("the same node joined again"))
            self.guide.sources.left(ident)
            self.commits.happened(Left(ident))
        session.peer = peer
        self.sessions[ident] = session
        self.membership.join(peer, now)
        self.guide.lookout.look(ident)
        target = self.memory["target"]
        session.link.send(
            Type.WELCOME,
            {
                "key": self.key.public,
                "epoch": list(self.membership.plan.epoch),
                "commit": self.commits.mode,
                "target": target,
                "host": session.link.remote_host,
            }
            | ({} if self.config.plaintext else {"bearer": self.admission.bearer_of(session.link.remote)}),
        )
        session.link.send(Type.EVICTED, {"nodes": sorted(self.admission.evicted)})
        session.link.send(Type.CATALOG, {"artifacts": [self._entry(h) for h in self.node.holdings.values()], "dropped": []})
        for greeting in self.commits.greeting():
            session.link.send(*greeting)
        self.fleet.joined(peer)
        self.guide.send_plans()
        self._send_leads()
        logger.info("%s joined from %s (%d peers)", peer.name, show_address(peer.host, peer.port), len(self.sessions))

    def enrolled(self, session: Session, body: Body) -> None:
        self.later(self.admission.renew(session.link, body["request"]), f"renew {session.link.name}")

    def reported(self, session: Session, body: Body) -> None:
        peer = session.peer
        assert peer is not None
        staged = None if body["staged"] is None else Version.of(body["staged"])
        moved_on = staged != peer.staged
        peer.staged = staged
        peer.committed = None if body["committed"] is None else Version.of(body["committed"])
        peer.report = body
        peer.engines = engine_rows(body)
        self.pace.moved()
        self.intake.changed()
        now = time.monotonic()
        self.fleet.reported(peer, now)
        self.commits.reported(peer)
        transfer = body.get("transfer")
        if isinstance(transfer, list) and len(transfer) == 2:
            size, micros = transfer
            if type(size) is int and type(micros) is int and size >= 0 and micros > 0:
                self.membership.transferred(peer.ident, now, size, micros / 1e6)
        self.membership.heard(peer.ident, now)
        self.guide.sources.holds(peer.ident, body.get("held", ()), body.get("dropped", ()))
        if "garbled" in body:
            self.guide.garbled(peer, body["garbled"], now)
        if "spoilt" in body and self.mirroring is not None:
            self.mirroring.complain(body["spoilt"])
        parent = body["parent"]
        if parent is not None:
            seen = body.get("epoch", [0, 0])
            epoch = (
                (seen[0], seen[1]) if isinstance(seen, list) and len(seen) == 2 and all(type(x) is int for x in seen) else (0, 0)
            )
            above = "" if parent == self.ident else parent.hex()
            if above:
                self.guide.hangs(peer, above)
            if self.membership.moved(peer.ident, above, epoch):
                self.guide.send_plans()
        inflow = _inflow(body.get("inflow"))
        if inflow is not None and peer.ident in self.broadcast.awaited and self.membership.progressed(peer.ident, now, inflow):
            logger.info("%s falls behind: the plan is changed around it", peer.name)
            self.guide.send_plans()
        if moved_on:
            self._check_settled()

    def asked(self, session: Session, body: Body) -> None:
        base = Version.of(body["base"])
        promise = self.keeping.ask(base)
        answer: Body = {"base": list(base), "version": None, "bytes": 0, "wait_us": 0}
        if promise is not None:
            answer |= {"version": list(promise.version), "bytes": promise.bytes, "wait_us": int(promise.wait_s * 1e6)}
        session.link.send(Type.SQUASHING, answer)

    def left(self, session: Session, error: P2PCastError | None) -> None:
        peer = session.peer
        if peer is None or self.sessions.get(peer.ident) is not session:
            return
        del self.sessions[peer.ident]
        self.guide.sources.left(peer.ident)
        self.membership.leave(peer.ident, time.monotonic(), failed=not session.farewell)
        self.fleet.left(peer, "" if session.farewell else str(error or "its connection ended"))
        self.commits.happened(Left(peer.ident))
        self.spans.leave(peer.ident)
        logger.info(
            "%s %s (%d peers)",
            peer.name,
            "left" if session.farewell else f"was lost{f': {error}' if error else ''}",
            len(self.sessions),
        )
        self.pace.moved()
        self.intake.changed()
        self.guide.send_plans()
        self._send_leads()
        self._check_settled()

    # -- AdmissionOwner

    async def blocking(self, work: Callable[..., Any], *args: Any) -> Any:
        return await self.staging.run(work, *args)

    def later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._later(work, name)

    def named(self, peer: str) -> tuple[str, str] | None:
        found = [(i, s.peer.name) for i, s in self.sessions.items() if s.peer is not None and peer in (i, s.peer.name)]
        if len(found) > 1:
            raise RefusedError(
                f"{len(found)} peers go by {peer[:128]!r}: name one by its id, {' or '.join(i for i, _ in found[:8])}"
            )
        return found[0] if found else None

    def cut(self, nodes: frozenset[bytes]) -> None:
        for node in nodes:
            if (session := self.sessions.get(node.hex())) is not None:
                session.farewell = True
        error = RefusedError("this node was evicted from the run")
        self.listener.drop(nodes, error)
        for link in [link for link in self.downstream.children if link.remote in nodes]:
            link.close(error)
        self.send_all(Type.EVICTED, {"nodes": sorted(nodes)})

    def told(self, kind: str, **facts: Any) -> None:
        self.events.emit(kind, **facts)

    def token_changed(self) -> None:
        if self.config.token_file is not None:
            atomic_write(self.config.token_file, f"{self.token}\n".encode(), 0o600)

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
            self._check_settled()

    async def _measure_uplink(self) -> None:
        while True:
            await asyncio.sleep(WINDOW_S)
            children = {str(id(link)): child for link, child in self.downstream.children.items() if child.attached}
            sent = {name: sum(s.acked_bytes for s in child.link.stripes.values()) for name, child in children.items()}
            pulling = {name for name, child in children.items() if child.feeds.waiting}
            counted = self.uplink.look(asyncio.get_running_loop().time(), sent, pulling)
            if counted and self.config.uplink_bps is None and self.uplink.bps is not None:
                self.membership.uplink_bps = self.uplink.bps

    def _check_settled(self) -> None:
        """Between broadcasts the plan may change."""
        now = time.monotonic()
        slow = self.membership.detached
        staged = {i: None if s.peer is None else s.peer.staged for i, s in self.sessions.items() if i not in slow}
        if self.broadcast.settled(staged, now):
            changed = self.membership.replan(now)
        else:
            changed = not self.broadcast.under_way and self.membership.repair(now)
        if changed:
            self.guide.send_plans()

    def _send_leads(self) -> None:
        for ident, engine, lead in self.spans.news():
            place = None if lead is None else [*lead]
            if lead is not None and (ways := self.membership.reach.ways(ident, lead[0].hex())):
                place = [lead[0], *ways[0]]
            self.sessions[ident].link.send(Type.ENGINE, {"name": engine, "lead": place})

    def _announce(self, holdings: Iterable[Holding]) -> None:
        entries = [self._entry(h) for h in holdings]
        if entries:
            self.send_all(Type.CATALOG, {"artifacts": entries, "dropped": []})

    def _entry(self, holding: Holding) -> list[Any]:
        open_, manifest = holding.open, holding.assembly.manifest
        base = None if open_.base is None else list(open_.base)
        size, state = (manifest.log, manifest.state) if manifest is not None else (0, 0)
        return [holding.id, open_.kind, base, list(open_.version), size, open_.layout, state, holding.id in self.store.artifacts]

    # -- CommitsOwner

    def name_of(self, ident: str) -> str:
        peer = self.membership.peers.get(ident)
        return ident if peer is None else peer.name

    def send_all(self, kind: Type, body: Body) -> None:
        for session in self.sessions.values():
            session.link.send(kind, body)


def _inflow(said: object) -> Inflow | None:
    """From a report."""
    if not isinstance(said, list) or len(said) != 3 or any(type(x) is not int or x < 0 for x in said) or said[1] == 0:
        return None
    return Inflow(said[0], said[1] / 1e6, said[2])
