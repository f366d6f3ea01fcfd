"""The peer: the rollout machine's side. Receives, verifies, forwards, stages, installs.

Promises: forwarding never waits for staging, nor staging for the other engines; the shadow and every engine are always at a version that the run's key has
sealed, or say that they are not; what goes wrong with one version costs that version alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

from p2pcast import metrics
from p2pcast.addresses import show_address
from p2pcast.codec.warm import warm_up
from p2pcast.daemon import Memory, node_id
from p2pcast.errors import RefusedError, RemoteError, RetryableError, UsageError
from p2pcast.events import Events
from p2pcast.http import Document, HttpServer
from p2pcast.mirror.names import run_folder
from p2pcast.mirror.objects import Objects
from p2pcast.relay.catchup import Edge
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.node import Node
from p2pcast.relay.upstream import Upstream
from p2pcast.state.leftovers import claim, sweep
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.store.files import atomic_write
from p2pcast.store.state_format import state_lock
from p2pcast.store.store import Store
from p2pcast.tasks import Tasks
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.transport.sockets import own_congestion, window_bytes
from p2pcast.transport.striping import Way, stripes
from p2pcast.trust import bearer
from p2pcast.trust.eviction_log import EvictionLog
from p2pcast.trust.evictions import unsigned
from p2pcast.version import Version
from p2pcast.wire.connection import PARENT, Identity
from p2pcast.wire.messages import Body, Type
from rollout_node.attachment import Attachment
from rollout_node.callbacks import Callbacks
from rollout_node.catalog import Catalog
from rollout_node.chronicle import Chronicle
from rollout_node.companions import Lead
from rollout_node.control import Control
from rollout_node.dialling import Dialling
from rollout_node.following import Following
from rollout_node.freshness import Freshness
from rollout_node.heeding import Heeding
from rollout_node.install_socket import InstallSocket
from rollout_node.installers.led import LedInstaller
from rollout_node.lacking import Lacking
from rollout_node.marks import Marks
from rollout_node.member import Member
from rollout_node.mirrored import Mirrored
from rollout_node.orders import Orders
from rollout_node.papers import Papers
from rollout_node.peer_config import PeerConfig
from rollout_node.peer_view import PeerView
from rollout_node.providing import Providing
from rollout_node.pulling import Pulling
from rollout_node.receiving import Receiving
from rollout_node.remembering import FACTS, Remembering
from rollout_node.runner import Runner
from rollout_node.targets import Targets
from rollout_node.telling import Telling
from rollout_node.turns import Turns
from rollout_node.wayfinding import Wayfinding

logger = logging.getLogger("p2pcast.peer")

DRAIN_S = 5.0
"""For children to be sent elsewhere, before this peer ends."""


class Peer(QuietOwner):
    """``run`` until cancelled."""

    def __init__(self, config: PeerConfig) -> None:
        self.config = config
        self.view = PeerView(self)
        self.events = Events()
        self.tasks = Tasks(self.events)
        self.chronicle = Chronicle(self.events)
        self.heeding = Heeding(self)
        self.telling = Telling(self)
        self.receiving = Receiving(self)
        self.wayfinding = Wayfinding(self)
        self.lacking = Lacking(self)
        self.following = Following(self)
        self.providing = Providing(self)
        self.target: Version | None = None
        self.commits = "auto"
        self.catalog = Catalog()
        self.runners: list[Runner] = []
        self.lead: Lead | None = None
        self.member: Member | None = None
        self.orders = Orders(self)
        self.mirrored: Mirrored | None = None
        if config.mirror is not None:
            self.mirrored = Mirrored(self, Objects(config.mirror, run_folder(config.token.run)), config.token.run)
        self.draining = False
        self._joined = asyncio.Event()

    async def run(self) -> None:
        with state_lock(self.config.state), self.tasks.watching():
            async with contextlib.AsyncExitStack() as self._ends:
                await self._join()
                await self._serve()

    # -- beginning and end

    async def _join(self) -> None:
        """Up to the run's key, by the hub's WELCOME or from the mirror. Raises RetryableError, RefusedError, LocalError."""
        config = self.config
        claim(config.state, config.shadow)
        await asyncio.to_thread(sweep)
        self.memory = Memory(config.state / "peer.json", {"node": "", "run": "", "evicted": [], "members": None, **FACTS})
        self.remembering = Remembering(self.memory, config.token.run, self.later, lambda work: self.staging.run(work))
        self.eviction_log = EvictionLog(config.state)
        self._ends.callback(self.eviction_log.close)
        self.evictions = self.eviction_log.evictions
        for node in self.memory["evicted"]:  # by an earlier release
            self.evictions.take(unsigned(bytes.fromhex(node)))
        self.evicted = self.evictions.nodes
        self.ident = node_id(self.memory)
        self.bearer = bearer.of_node(bearer.of_run(config.token.secret), self.ident)
        if not config.plaintext:
            # Until the hub names another, or for good where there is none.
            self.bearer = secrets.token_hex(bearer.SECRET_BYTES)
        self._ends.callback(self.following.close)
        self.staging = Staging()
        self._ends.callback(self.staging.close)
        self._ends.callback(self.remembering.close)
        self._ends.push_async_callback(self.tasks.end)
        config.token.check_links(plaintext=config.plaintext)
        if config.plaintext:
            logger.warning(
                "--plaintext: links are NOT encrypted: whoever is on the way can read the weights and take over connections"
            )
        identity = Identity(self.ident, config.name, config.token, self.evicted)
        self.papers = None
        if not config.plaintext:
            self.papers = Papers(config.state, config.hub, config.token, self.ident, config.name, self.staging.run)
            await self.papers.load()
        client, server = (None, None) if self.papers is None else (self.papers.tls.client, self.papers.tls.server)
        self.listener = Listener(self, identity, server, sockets=config.sockets)
        if config.hub is not None:
            await self.listener.start(*config.listen)
            self._ends.push_async_callback(self.listener.stop)
        self.control = Control(
            self.heeding, config.hub, identity, self.telling.join, self.telling.report, self.papers, config.engine
        )
        self._ends.push_async_callback(self.control.leave)
        self.dialling = Dialling(identity, self.control.say, client, config.sockets)
        if config.base is not None:
            await self.following.read_base(config.base)
        await self.staging.run(warm_up)
        key = await self.heeding.key()
        self.store = await self.staging.run(partial(Store, config.state, key, keep_partial=True, counts=config.counts))
        for path, why in self.store.damaged:
            logger.warning("not used: %s (%s)", path, why)
        self.freshness = self._kept_knowledge()
        self.node = Node(self.receiving, self.ident, key)
        self.node.is_sealed = self.catalog.is_sealed
        self.node.is_listed = self._is_listed
        self._ends.callback(self.node.close)
        self.downstream = Downstream(self.node)
        self._ends.callback(self.downstream.close)
        for stored in self.store.artifacts.values():
            self.node.add_stored(stored.assembly, self.store.open_log(stored))
        for part in await self.staging.run(self.store.resume, self.staging.workers):
            holding = self.node.add_partial(part.assembly, part.log, part.held)
            logger.info(
                "version %s: %.1f MB of it were received before", holding.open.version, part.held.count * holding.open.piece / 1e6
            )
        self.attachment = Attachment(self.node, self.dialling, self.hub, config.stripes or self._stripes, self._attached)
        self.attachment.on_places = self._keep_places
        if self.heeding.alone:
            self._recall()
        self.pulling = Pulling(self.node, self.dialling, self)
        self.socket = InstallSocket(config.state / "install.sock", self.providing)
        targets = Targets(
            self.providing.small_files, self.socket, config.state, config.keep, config.kv, config.driver, config.token.run.hex()
        )
        turns, callbacks = Turns(config.rolling), Callbacks(config.callbacks, max_defer_s=config.max_defer_s)
        name, role = config.engine or ("", "")
        if role == "member":
            self.member = Member(name, self, identity, client)
        elif role == "lead":
            self.lead = Lead(name, self.socket, self.control.changed)
            if (named := self.memory["members"]) is not None and named[0] == name:
                self.lead.members_are(bytes.fromhex(node) for node in named[1])
        if self.member is not None and self.heeding.alone:
            self.member.lead_is(self.remembering.lead)
        made = [targets.installer(t) if self.lead is None else targets.led(t, self.lead) for t in config.targets]
        self.runners = [Runner(self, installer, turns, callbacks) for installer in made]
        atomic_write(config.state / bearer.FILE, f"{self.bearer}\n".encode(), 0o600)
        self.http = HttpServer(
            self.status,
            self.view.ready,
            metrics.registry(self.view.families),
            {"commit": self._commit, "verify": self._verify},
            self.bearer,
            self.events,
            self.view.waits(),
            bearer_file=config.state.resolve() / bearer.FILE,
            healthy=self.tasks.healthy,
        )

    def hub(self) -> tuple[bytes, str, int]:
        assert self.config.hub is not None, "only a hub sends plans"
        return (self.control.hub, *self.config.hub)

    def _kept_knowledge(self) -> Freshness:
        newest = max(self.store.artifacts.values(), key=lambda s: s.version, default=None)
        kept = None
        if newest is not None:
            with contextlib.suppress(OSError):
                kept = newest.version, time.time() - newest.path.stat().st_mtime
        return Freshness(kept, asyncio.get_running_loop().time())

    def _is_listed(self, artifact: bytes) -> bool:
        mirrored = self.mirrored is not None and artifact in self.mirrored.entries
        return mirrored or not self.control.connected or self.catalog.get(artifact) is not None

    def _recall(self) -> None:
        """The hub's last words, for a start without it."""
        known = self.remembering
        self.commits, self.target, self.wayfinding.hold = known.commit, known.target, known.hold
        if known.neighbourhood is not None:
            self.control.hub, parent, backups, neighbours = known.neighbourhood
            self.attachment.recall(parent, backups, neighbours)

    def _keep_places(self) -> None:
        orders = self.attachment.orders
        self.remembering.keep_neighbourhood(self.control.hub, orders.parent, orders.backups, self.attachment.neighbours)

    async def _serve(self) -> None:
        self._ends.push_async_callback(self.tasks.end)
        self._ends.push_async_callback(self.http.stop)
        await self.http.start(*self.config.http)
        self._ends.push_async_callback(self.socket.close)
        await self.socket.start()
        http = show_address(*self.http.address)
        self._ends.callback((self.config.state / "daemon.json").unlink, missing_ok=True)
        atomic_write(self.config.state / "daemon.json", b'{"http": "http://%s"}\n' % http.encode(), 0o600)
        # First of all the hub is told, so that nobody else is sent here.
        self._ends.push_async_callback(self.control.leave)
        logger.info("%s joined run %s, status at http://%s/status", self.config.name, self.config.token.run.hex()[:12], http)
        logger.info("engines reach this peer at P2PCAST_SOCK=%s", self.socket.path.absolute())
        self._joined.set()
        self.heeding.begin()
        async with self.tasks.group() as group:
            group.create_task(self.node.run(), name="node")
            group.create_task(self.downstream.run(), name="keepalives")
            group.create_task(self.control.run(), name="control")
            group.create_task(self.dialling.run(), name="dialling")
            group.create_task(self._attach(), name="attachment")
            group.create_task(self.pulling.run(), name="pulling")
            group.create_task(self.following.stage(), name="staging")
            group.create_task(self.wayfinding.fetch(), name="fetching")
            if self.mirrored is not None:
                group.create_task(self.mirrored.run(), name="mirror")
            for runner in self.runners:
                group.create_task(runner.run(), name=runner.installer.name)
            for part in (self.lead, self.member):
                if part is not None:
                    group.create_task(part.run(), name=f"engine {part.name}")

    async def _attach(self) -> None:
        # A whole state that the hub pushes is not for one that has it on disk: that becomes known first.
        if self.following.base is not None:
            await self.wayfinding.begun.wait()
        await self.attachment.run()

    async def drain(self) -> None:
        """Hand the children over before the end: the hub is told, and while it sends them elsewhere they go on being fed. DRAIN_S at most."""
        if not self._joined.is_set() or not self.control.connected:
            return  # there is nobody who could tell them; they know their backups
        self.draining = True
        logger.info("asked to end; handing over %d children", self.downstream.fed)
        await self.control.leave()
        try:
            async with asyncio.timeout(DRAIN_S):
                while self.downstream.fed:
                    await self.downstream.fewer.wait(DRAIN_S)
        except TimeoutError:
            logger.warning(
                "%d children were not sent elsewhere in %.0f s; they go to their backups", self.downstream.fed, DRAIN_S
            )

    def later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """A task of this peer's that nobody waits for."""
        self.tasks.later(work, name)

    def look(self) -> None:
        """Something about an engine may have changed: tell of it."""
        now = asyncio.get_running_loop().time()
        self.chronicle.look([self.view.engine_now(runner) for runner in self.runners], now)
        self.control.changed()

    def _attached(self) -> None:
        self.chronicle.attached(self.attachment.parent)
        self.control.changed()

    # -- PullOwner

    def parent(self) -> tuple[tuple[bytes, str, int] | None, Upstream | None]:
        feeding = self.attachment.feeding
        return (None, None) if feeding is None else (self.attachment.place, feeding)

    def seek(self, artifact: bytes, without: list[bytes]) -> None:
        self.control.send(Type.SEEK, {"artifact": artifact, "without": without})

    @property
    def shadow(self) -> Shadow | None:
        return self.following.shadow

    @property
    def staged(self) -> Version | None:
        return self.following.staged

    @property
    def busy(self) -> str:
        """What it does, in a word: docs/operations.md."""
        return self.following.busy

    @property
    def error(self) -> str | None:
        return self.following.error

    async def _commit(self, body: Document) -> Document:
        if self.config.driver != "external":
            raise UsageError("this peer switches its engines by itself; start it with --driver external to do it by hand")
        return await self.orders.commit(body)

    async def _verify(self, body: Document) -> Document:
        return {"node": self.ident.hex(), "name": self.config.name} | await self.orders.verify(body)

    def status(self) -> Document:
        """As served at /status."""
        return self.view.status()

    @property
    def committed(self) -> Version | None:
        """The version that all installers are at, at least."""
        every = [r.committed for r in self.runners]
        if self.member is not None:
            every.append(self.member.serves)
        return None if not every or None in every else min(v for v in every if v is not None)

    def _stripes(self, rtt_s: float) -> int:
        sockets = self.config.sockets
        return stripes(Way(rtt_s, self.receiving.fastest_bps, sockets.congestion or own_congestion(), window_bytes()))

    # -- MirroredOwner

    def swarm_lost(self) -> bool:
        return not self.control.connected and not self.draining

    def fed(self) -> bool:
        return self.attachment.feeding is not None

    def way(self) -> list[Edge]:
        return self.wayfinding.path() if self.wayfinding.begun.is_set() else []

    def mirror_listed(self) -> None:
        self.catalog.complete.set()
        self.freshness.said("mirror", asyncio.get_running_loop().time())
        self.wayfinding.news.ring()

    def look_for_a_way(self) -> None:
        self.wayfinding.news.ring()

    # -- Acceptor

    def accept_link(self, link: Link, hello: Body) -> None:
        if hello["purpose"] == "engine":
            if self.lead is None:
                raise RefusedError("this peer leads no engine")
            self.lead.accept(link, hello)
            return
        if hello["purpose"] != "data":
            raise RemoteError("a peer has no control connections; dial the hub")
        if not hasattr(self, "downstream"):
            raise RetryableError("not joined yet")
        if hello["role"] == PARENT:
            self.dialling.accept(link, hello)
            return
        link.owner = self.downstream
        self.downstream.accept(link)

    # -- RunnerOwner, MemberOwner

    def held_still(self) -> AbstractAsyncContextManager[tuple[Version, Path] | None]:
        return self.following.held_still()

    def marks(self) -> Marks:
        return self.following.marks()

    def is_dense(self, base: Version | None, to: Version) -> bool:
        return isinstance(self.following.patches(base, to), Path)

    def may_commit(self, version: Version) -> bool:
        """The one place that decides whether an engine may switch to a version that is staged."""
        if self.leads_back(version):
            return False
        if self.config.driver == "external":
            return self.orders.wants(version)
        return self.commits == "auto" or version == self.target

    def leads_back(self, version: Version) -> bool:
        """Whether a newer one was staged here before, and is not known to be gone from the run: no engine goes back because of what is lost here alone."""
        newest = self.remembering.newest
        if newest is None or version >= newest:
            return False
        return not self.catalog.listed or any(known >= newest for known in self.catalog.states())

    def on_installed(self) -> None:
        if self.lead is not None:
            led = next(r for r in self.runners if isinstance(r.installer, LedInstaller))
            self.lead.set_serving(led.committed, led.ready)
        self.look()
        self.orders.changed.ring()

    def doubt(self) -> None:
        self.following.doubt()

    def on_staged(self, version: Version) -> None:
        """The shadow is at ``version`` now."""
        if self.lead is not None:
            self.lead.moved(version)
        if self.member is not None:
            self.member.moved()

    async def look_again(self) -> None:
        await self.following.look_again()
