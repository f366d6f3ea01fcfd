"""The peer: the rollout machine's side. Receives, verifies, forwards, stages, installs.

Promises: forwarding never waits for staging, nor staging for the other engines; the shadow and every engine are always at a version that the run's key has
sealed, or say that they are not; what goes wrong with one version costs that version alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from p2pcast import limits, metrics
from p2pcast.addresses import family_of, may_be_told, show_address
from p2pcast.artifact.records import Open, run_id
from p2pcast.codec.layout import Layout
from p2pcast.codec.warm import warm_up
from p2pcast.daemon import Memory, node_id, state_lock
from p2pcast.errors import P2PCastError, RefusedError, RemoteError, RetryableError, UsageError
from p2pcast.events import Events
from p2pcast.http import Document, HttpServer
from p2pcast.mirror.names import run_folder
from p2pcast.mirror.objects import Objects
from p2pcast.relay.catchup import Edge
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.node import Holding, Node
from p2pcast.relay.upstream import Upstream
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.store.files import atomic_write
from p2pcast.store.log import Log
from p2pcast.store.store import Store
from p2pcast.transport.binding import own_hosts, told
from p2pcast.transport.link import Link
from p2pcast.transport.listener import Listener
from p2pcast.transport.sockets import Sockets, own_congestion, window_bytes
from p2pcast.transport.stripe import DEFAULT
from p2pcast.transport.striping import Way, stripes
from p2pcast.trust import bearer
from p2pcast.version import Version
from p2pcast.wire.connection import PARENT, Identity
from p2pcast.wire.messages import Body, Type
from p2pcast.wire.token import Token
from rollout_node.attachment import Attachment
from rollout_node.callbacks import Callbacks
from rollout_node.catalog import Catalog
from rollout_node.catching_up import Squashes
from rollout_node.chronicle import Chronicle
from rollout_node.companions import Lead
from rollout_node.control import Control
from rollout_node.dialling import Dialling
from rollout_node.following import Following
from rollout_node.install_socket import InstallSocket
from rollout_node.installers.led import LedInstaller
from rollout_node.marks import Marks
from rollout_node.member import Member
from rollout_node.mirrored import Mirrored
from rollout_node.orders import Orders
from rollout_node.papers import Papers
from rollout_node.peer_view import PeerView
from rollout_node.pulling import Pulling
from rollout_node.runner import Runner
from rollout_node.targets import Driver, Kv, Role, Targets
from rollout_node.turns import Turns
from rollout_node.wayfinding import Wayfinding

logger = logging.getLogger("p2pcast.peer")

DRAIN_S = 5.0
"""For children to be sent elsewhere, before this peer ends."""

SPEAKING_BYTES = 1 << 20
"""A transfer below that is over before its rate is known."""


@dataclass(frozen=True, slots=True)
class PeerConfig:
    hub: tuple[str, int] | None
    """None: there is only the mirror."""
    token: Token
    targets: tuple[str, ...]
    state: Path
    shadow: Path
    name: str
    base: Path | None = None
    region: str = ""
    listen: tuple[str, int] = ("", 0)
    advertise: tuple[tuple[str, int], ...] = ()
    """None: as the hub sees this peer, and addresses of its own."""
    http: tuple[str, int] = ("127.0.0.1", 0)
    stripes: int | None = None
    """TCP connections of a link; None: by p2pcast.transport.striping."""
    sockets: Sockets = DEFAULT
    kv: Kv = "recompute"
    keep: int = 3
    driver: Driver = "peer"
    """Who switches the engines: this peer, or somebody who calls POST /commit."""
    rolling: int | None = None
    """At most so many engines are being switched at one time; None: all."""
    callbacks: Any = None
    """An object or module with ``before_commit`` or ``after_commit``: rollout_node.callbacks."""
    max_defer_s: float = 10.0
    engine: tuple[str, Role] | None = None
    """For an engine whose workers run on several hosts: its name, and what this peer is there."""
    squashes: Squashes = "auto"
    """What is made of squashed deltas when this peer is late: rollout_node.catching_up."""
    plaintext: bool = False
    """Links without TLS. The token says which it is."""
    mirror: str | None = None
    """URL of the object store to turn to where no hub is in reach."""


class Peer:
    """``run`` until cancelled."""

    def __init__(self, config: PeerConfig) -> None:
        self.config = config
        self.view = PeerView(self)
        self.events = Events()
        self.chronicle = Chronicle(self.events)
        self.wayfinding = Wayfinding(self)
        self.following = Following(self)
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
        self._welcome: asyncio.Future[Body] | None = None
        self._early: list[tuple[Type, Body]] | None = []
        """What the hub said while we were still getting ready."""
        self._transfer: list[int] | None = None
        self._fastest_bps = 0.0
        """Of a transfer that was long enough to say something."""
        self._told: set[bytes] = set()
        """Artifacts that the hub knows to be held here, since it was joined at ``_told_at``."""
        self._told_at: float | None = None
        self._sealing: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        with state_lock(self.config.state):
            async with contextlib.AsyncExitStack() as self._ends:
                await self._join()
                await self._serve()

    # -- beginning and end

    async def _join(self) -> None:
        """Up to the run's key, by the hub's WELCOME or from the mirror. Raises RetryableError, RefusedError, LocalError."""
        config = self.config
        self.memory = Memory(config.state / "peer.json", {"node": "", "run": "", "newest": None, "evicted": []})
        self.evicted = {bytes.fromhex(node) for node in self.memory["evicted"]}
        self.ident = node_id(self.memory)
        self._bearer = bearer.of_node(bearer.of_run(config.token.secret), self.ident)
        if not config.plaintext:
            # Until the hub names another, or for good where there is none.
            self._bearer = secrets.token_hex(bearer.SECRET_BYTES)
        self._ends.callback(self.following.close)
        self.staging = Staging()
        self._ends.callback(self.staging.close)
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
        self.control = Control(self, config.hub, identity, self._join_body, self._report, self.papers, config.engine)
        self._ends.push_async_callback(self.control.leave)
        self.dialling = Dialling(identity, self.control.say, client, config.sockets)
        if config.base is not None:
            await self.following.read_base(config.base)
        await self.staging.run(warm_up)
        key = await self._key()
        self.store = await self.staging.run(partial(Store, config.state, key, keep_partial=True))
        for path, why in self.store.damaged:
            logger.warning("not used: %s (%s)", path, why)
        self.node = Node(self, self.ident, key)
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
        self.pulling = Pulling(self.node, self.dialling, self)
        self.socket = InstallSocket(config.state / "install.sock", self)
        targets = Targets(
            self.small_files, self.socket, config.state, config.keep, config.kv, config.driver, config.token.run.hex()
        )
        turns, callbacks = Turns(config.rolling), Callbacks(config.callbacks, max_defer_s=config.max_defer_s)
        name, role = config.engine or ("", "")
        if role == "member":
            self.member = Member(name, self, identity, client)
        elif role == "lead":
            self.lead = Lead(name, self.socket, self.control.changed)
        made = [targets.installer(t) if self.lead is None else targets.led(t, self.lead) for t in config.targets]
        self.runners = [Runner(self, installer, turns, callbacks) for installer in made]
        atomic_write(config.state / bearer.FILE, f"{self._bearer}\n".encode(), 0o600)
        self.http = HttpServer(
            self.status,
            self.view.ready,
            metrics.registry(self.view.families),
            {"commit": self._commit, "verify": self._verify},
            self._bearer,
            self.events,
            self.view.waits(),
        )

    def hub(self) -> tuple[bytes, str, int]:
        assert self.config.hub is not None, "only a hub sends plans"
        return (self.control.hub, *self.config.hub)

    async def _key(self) -> bytes:
        """The run's public key, and that the token names it. Raises RetryableError, RefusedError."""
        if self.config.hub is None and self.mirrored is not None:
            return await self.mirrored.key()
        self._welcome = asyncio.get_running_loop().create_future()
        try:
            await self.control.connect()
            async with asyncio.timeout(10):
                welcome = await self._welcome
        except (TimeoutError, RetryableError) as error:
            if self.mirrored is not None:
                self._welcome = None
                logger.warning(
                    "%s; going on with the mirror", error if isinstance(error, RetryableError) else "the hub does not answer"
                )
                return await self.mirrored.key()
            if isinstance(error, TimeoutError):
                raise RetryableError("the hub accepted the connection but did not answer") from None
            raise
        key: bytes = welcome["key"]
        if run_id(key) != self.config.token.run:
            raise RefusedError("the hub's key is not this run's: the token pins another")
        return key

    async def _serve(self) -> None:
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
        early, self._early = self._early or [], None
        for kind, body in early:
            self.on_hub_message(kind, body)
        async with asyncio.TaskGroup() as group:
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

    # -- what the hub says

    def on_hub_message(self, kind: Type, body: Body) -> None:
        if kind is Type.WELCOME:
            self._bear(body.get("bearer", self._bearer))
            self.commits = body["commit"]
            self.target = None if body["target"] is None else Version.of(body["target"])
            self.catalog.begin()
            if self.commits != "barrier":
                self.wayfinding.hold = None
            if self._welcome is not None and not self._welcome.done():
                self._welcome.set_result(body)
            elif run_id(body["key"]) != self.config.token.run:
                raise RefusedError("the hub's key is not this run's: the token pins another")
            else:
                self.chronicle.hub(reachable=True)
            self._target_moved()
        elif kind is Type.ISSUED and self.papers is not None:
            self._later(self._renewed(self.papers, body["certificate"]), "certificate")
        elif kind is Type.EVICTED:
            self._cut({*body["nodes"]})
        elif self._early is not None:
            self._early.append((kind, body))
        elif kind is Type.PLAN:
            parent = None if body["parent"] is None else (body["parent"], body["host"], body["port"])
            self.attachment.order((body["epoch"][0], body["epoch"][1]), parent, [(n, h, p) for n, h, p in body["backups"]])
        elif kind is Type.WAYS:
            self.dialling.told(body)
        elif kind is Type.UNREACHED:
            self.dialling.unreached(body)
        elif kind is Type.CALLED:
            self.dialling.called(body, self.downstream)
        elif kind is Type.NEIGHBOURS:
            self.attachment.introduce([(n, h, p) for n, h, p in body["peers"]])
        elif kind is Type.SOURCES:
            self.pulling.told(body["artifact"], [(n, h, p) for n, h, p in body["peers"]])
        elif kind is Type.CATALOG:
            whole = self.catalog.update(body, asyncio.get_running_loop().time())
            dropped = body["dropped"]
            if whole:
                # A hub that died forgets what it had not sealed. What opened since we dialled it may be newer than its list.
                since = self.control.joined_at
                unlisted = [h for h in self.node.holdings.values() if self.catalog.get(h.id) is None]
                dropped = [h.id for h in unlisted if h.idle or h.opened_at < since]
            for artifact in dropped:
                self._dropped(artifact)
            if not whole and (live := self.attachment.live) is not None:
                for artifact, *_, sealed in body["artifacts"]:
                    if not sealed:
                        live.expect(artifact)
            self.wayfinding.news.ring()
        elif kind is Type.ENGINE and self.member is not None:
            self.member.lead_is(None if (lead := body["lead"]) is None else (lead[0], lead[1], lead[2]))
        elif kind is Type.SQUASHING:
            self.wayfinding.squashes.answered(body, asyncio.get_running_loop().time())
            self.wayfinding.news.ring()
        elif kind is Type.HOLD:
            self.wayfinding.hold = Version.of(body["version"])
            self.wayfinding.news.ring()
        elif kind is Type.COMMIT:
            self.target = Version.of(body["version"])
            self.wayfinding.news.ring()
            self._target_moved()

    def _bear(self, token: str) -> None:
        """What opens this peer's HTTP side off loopback."""
        if token != self._bearer:
            self._bearer = token
            if hasattr(self, "http"):
                self.http.bearer = token
                self._later(
                    self.staging.run(atomic_write, self.config.state / bearer.FILE, f"{token}\n".encode(), 0o600), "bearer"
                )

    async def _renewed(self, papers: Papers, certificate: bytes) -> None:
        try:
            await papers.take(certificate)
        except P2PCastError as error:
            logger.warning("certificate: %s", error)

    def _cut(self, nodes: set[bytes]) -> None:
        """The hub says whom nobody is to deal with any more. Kept, for as long as the hub may be away."""
        if nodes == self.evicted:
            return
        self.evicted.clear()
        self.evicted.update(nodes)
        error = RefusedError("this node was evicted from the run")
        self.listener.drop(self.evicted, error)
        if hasattr(self, "downstream"):
            links = [*self.downstream.children, *(u.link for u in self.node.upstreams)]
            for link in links:
                if link.remote in nodes:
                    link.close(error)
        self._later(self.staging.run(self.memory.update, evicted=sorted(n.hex() for n in nodes)), "evicted")

    def _target_moved(self) -> None:
        for runner in self.runners:
            runner.wake()
        # With a barrier, who is not at the target is unready from now on.
        self._look()

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        self.chronicle.look([self.view.engine_now(runner) for runner in self.runners], now)
        self.control.changed()

    def _attached(self) -> None:
        self.chronicle.attached(self.attachment.parent)
        self.control.changed()

    def on_hub_lost(self) -> None:
        self.chronicle.hub(reachable=False)
        logger.warning("the hub is out of reach; going on with what the swarm has")

    def on_hub_refused(self, error: RefusedError) -> None:
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(error)

    def give_up(self, holding: Holding) -> None:
        """What was received of it is of no use any more."""
        self.node.give_up(holding)
        self._later(self.staging.run(self.store.abandon, holding.log, holding.id), f"give up {holding.open.version}")

    def _dropped(self, artifact: bytes) -> None:
        self.pulling.drop(artifact)
        holding = self.node.holdings.get(artifact)
        if holding is not None and holding.completed_at is None:
            self.node.abort(holding)

    def _join_body(self) -> Body:
        config, port = self.config, self.listener.address[1]
        own = [host for host in dict.fromkeys([self.control.own_host, *own_hosts()]) if may_be_told(host)]
        ways = config.advertise or [(host, port) for host in told(config.listen, own)]
        return {
            "name": config.name,
            "region": config.region,
            "listen": list(config.advertise[0] if config.advertise else ("", port)),
            "ways": [list(way) for way in ways[: limits.MAX_WAYS]],
            "families": sorted({family for host in own if (family := family_of(host)) is not None}),
            "held": None if self.staged is None else list(self.staged),
        }

    def _report(self) -> Body:
        transfer, self._transfer = self._transfer, None
        return self.view.report(transfer) | self._news()

    def _news(self) -> Body:
        """What has come to be held here, or is no longer, since the hub was last told: all of it, where it knows nothing yet."""
        if self._told_at != self.control.joined_at:
            self._told_at, self._told = self.control.joined_at, set()
        held = {h.id for h in self.node.holdings.values() if h.completed_at is not None}
        body: Body = {
            "held": sorted(held - self._told)[: limits.MAX_HELD],
            "dropped": sorted(self._told - held)[: limits.MAX_HELD],
            "garbled": [list(row) for row in self.node.garbled.most_common(limits.MAX_GARBLED)],
            "spoilt": [] if self.mirrored is None else self.mirrored.complaints(),
        }
        self._told = (self._told | set(body["held"])) - set(body["dropped"])
        return {key: value for key, value in body.items() if value}

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
        return stripes(Way(rtt_s, self._fastest_bps, sockets.congestion or own_congestion(), window_bytes()))

    # -- NodeOwner

    def make_log(self, open_: Open, layout: Layout) -> Log:
        if open_.artifact in self.node.excerpts:
            return self.store.begin_excerpt(open_)
        return self.store.begin(open_, layout, resumable=True)

    def on_opened(self, holding: Holding) -> None:
        if holding.excerpt:
            return
        self.chronicle.receiving(holding.open.version, holding.open.base, holding.opened_at)
        self.wayfinding.news.ring()

    def on_complete(self, holding: Holding) -> None:
        took = (holding.completed_at or 0.0) - holding.opened_at
        self.chronicle.received(holding.open.version, took)
        if holding.assembly.manifest is not None and took > 0:
            came = max(0, holding.assembly.manifest.log - holding.had_bytes)
            self.wayfinding.squashes.transferred(came, took)
            self._transfer = [came, int(took * 1e6)]
            self._fastest_bps = max(self._fastest_bps, 8 * came / took if came > SPEAKING_BYTES else 0.0)
        self._later(self._seal(holding), f"seal {holding.open.version}")

    def _later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._sealing.add(task)
        task.add_done_callback(self._sealing.discard)

    async def _seal(self, holding: Holding) -> None:
        try:
            stored = await self.staging.run(self.store.seal, holding.log, holding.assembly)
            holding.durable.set()
            needed = self.wayfinding.needed() | {stored.id}
            for gone in await self.staging.run(self.store.retain, needed):
                self.node.forget(gone.id)
        except P2PCastError as error:
            if not self.node.error.done():
                self.node.error.set_exception(error)
        self.wayfinding.news.ring()

    def on_aborted(self, holding: Holding) -> None:
        if holding.excerpt:
            self._later(self.staging.run(self.store.end_excerpt, holding.log, holding.id), f"end {holding.open.version}")
            return
        self.chronicle.aborted(holding.open.version)
        self._later(self.staging.run(self.store.abandon, holding.log, holding.id), f"abandon {holding.open.version}")
        self.wayfinding.news.ring()

    def on_offered(self, upstream: Upstream) -> None:
        self.wayfinding.news.ring()

    def on_upstream_lost(self, upstream: Upstream, error: P2PCastError | None) -> None:
        self.wayfinding.news.ring()

    # -- MirroredOwner

    def swarm_lost(self) -> bool:
        return not self.control.connected and not self.draining

    def fed(self) -> bool:
        return self.attachment.feeding is not None

    def way(self) -> list[Edge]:
        return self.wayfinding.path() if self.wayfinding.begun.is_set() else []

    def mirror_listed(self) -> None:
        self.catalog.complete.set()
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

    def on_link_event(self, link: Link, stripe: Any, event: Any) -> None: ...

    def on_link_read(self, link: Link, payload_bytes: int) -> None: ...

    def on_link_writable(self, link: Link, stripe: Any) -> None: ...

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None: ...

    # -- RunnerOwner, Provider

    def held_still(self) -> AbstractAsyncContextManager[tuple[Version, Path] | None]:
        return self.following.held_still()

    def marks(self) -> Marks:
        return self.following.marks()

    def is_dense(self, base: Version | None, to: Version) -> bool:
        return isinstance(self.following.patches(base, to), Path)

    def may_commit(self, version: Version) -> bool:
        if self.config.driver == "external":
            return self.orders.wants(version)
        return self.commits == "auto" or version == self.target

    def on_installed(self) -> None:
        if self.lead is not None:
            led = next(r for r in self.runners if isinstance(r.installer, LedInstaller))
            self.lead.set_serving(led.committed, led.ready)
        self._look()
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

    def small_files(self, version: Version) -> Mapping[str, bytes]:
        files = self.store.small_files(version)
        if not files and (base := self.following.base) is not None and self.store.manifest(version) is None:
            return base[0].small_files()
        return files

    def layout_document(self) -> bytes:
        if self.shadow is None:
            raise RetryableError("this peer holds no version yet")
        return self.shadow.layout.document

    def patches(self, base: Version | None, to: Version) -> list[Path] | Path:
        found = self.following.patches(base, to)
        if self.member is not None and isinstance(found, Path):
            self.member.give_shadow(to)
        return found

    def report(self, report: Mapping[str, Any]) -> None:
        logger.debug("engine: %s", dict(report))
        if self.lead is not None:
            self.lead.heard(report)
        if self.member is not None:
            self.member.report(report)
