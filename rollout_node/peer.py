"""The peer: the rollout machine's side. Receives, verifies, forwards, stages, installs.

Promises: forwarding never waits for staging, nor staging for the other engines; the shadow and every engine are always at a version that the run's key has
sealed, or say that they are not; what goes wrong with one version costs that version alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2pcast import metrics
from p2pcast.artifact.records import Open, run_id
from p2pcast.bell import Bell
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.codec.layout import Layout
from p2pcast.codec.warm import warm_up
from p2pcast.daemon import Memory, node_id, show_address, state_lock
from p2pcast.errors import IntegrityError, LocalError, P2PCastError, RefusedError, RemoteError, RetryableError
from p2pcast.http import Document, HttpServer
from p2pcast.offline import state_digest
from p2pcast.progress import Meter
from p2pcast.relay.catchup import Edge, cheapest_path
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.node import Holding, Node
from p2pcast.relay.upstream import Upstream
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from p2pcast.store.files import atomic_write
from p2pcast.store.log import Log
from p2pcast.store.store import Store
from p2pcast.transport.link import Link
from p2pcast.transport.listener import Listener
from p2pcast.version import Version
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Body, Type
from p2pcast.wire.token import Token
from rollout_node.attachment import Attachment
from rollout_node.catalog import Catalog
from rollout_node.control import Control
from rollout_node.install_socket import InstallSocket
from rollout_node.peer_view import PeerView
from rollout_node.runner import Runner
from rollout_node.targets import Targets

logger = logging.getLogger("p2pcast.peer")

PATIENCE_S = 2.0
"""How long a parent may take to open an artifact that the hub has sealed, before it is fetched from the hub."""
KEPT_PATCHES = 16
"""Patches kept for an engine that lags behind; one further back is filled densely."""


REFUSED_S = 0.5
REFUSED_MAX_S = 60.0
"""Before an artifact that was refused is tried again; twice as long each time."""


@dataclass(frozen=True, slots=True)
class PeerConfig:
    hub: tuple[str, int]
    token: Token
    targets: tuple[str, ...]
    state: Path
    shadow: Path
    name: str
    base: Path | None = None
    region: str = ""
    listen: tuple[str, int] = ("0.0.0.0", 0)
    advertise: tuple[str, int] | None = None
    http: tuple[str, int] = ("127.0.0.1", 0)
    stripes: int = 4
    kv: str = "recompute"
    keep: int = 3
    tls: ssl.SSLContext | None = None


class Peer:
    """``run`` until cancelled."""

    def __init__(self, config: PeerConfig) -> None:
        self.config = config
        self.view = PeerView(self)
        self.shadow: Shadow | None = None
        self.staged: Version | None = None
        self.target: Version | None = None
        self.commits = "auto"
        self.error: str | None = None
        self.catalog = Catalog()
        self.runners: list[Runner] = []
        self._base: tuple[Checkpoint, int] | None = None
        self._still = asyncio.Condition()
        self._readers = 0
        self._news = Bell()
        self._begun = asyncio.Event()
        self._welcome: asyncio.Future[Body] | None = None
        self._early: list[tuple[Type, Body]] | None = []
        """What the hub said while we were still getting ready."""
        self._transfer: list[int] | None = None
        self.busy = "joining"
        self._sealing: set[asyncio.Task[None]] = set()
        self._refusals: Counter[bytes] = Counter()
        """Artifact → how often it was refused."""

    async def run(self) -> None:
        with state_lock(self.config.state):
            async with contextlib.AsyncExitStack() as self._ends:
                await self._join()
                await self._serve()

    # -- beginning and end

    async def _join(self) -> None:
        """Up to the hub's WELCOME. Raises RetryableError, RefusedError, LocalError."""
        config = self.config
        self.memory = Memory(config.state / "peer.json", {"node": "", "run": ""})
        self.ident = node_id(self.memory)
        self._ends.callback(self._let_shadow_go)
        self.staging = Staging()
        self._ends.callback(self.staging.close)
        identity = Identity(self.ident, config.name, config.token)
        self.listener = Listener(self, identity, config.tls)
        await self.listener.start(*config.listen)
        self._ends.push_async_callback(self.listener.stop)
        self.control = Control(self, config.hub, identity, self._join_body, self._report, config.tls)
        self._ends.push_async_callback(self.control.leave)
        if config.base is not None:
            self._base = await self._read_base(config.base)
        await self.staging.run(warm_up)
        self._welcome = asyncio.get_running_loop().create_future()
        try:
            await self.control.connect()
            async with asyncio.timeout(10):
                welcome = await self._welcome
        except TimeoutError:
            raise RetryableError("the hub accepted the connection but did not answer") from None
        if run_id(welcome["key"]) != config.token.run:
            raise RefusedError("the hub's key is not this run's: the token pins another")
        self.store = Store(config.state, welcome["key"])
        for path, why in self.store.damaged:
            logger.warning("not used: %s (%s)", path, why)
        self.node = Node(self, self.ident, welcome["key"])
        self._ends.callback(self.node.close)
        self.downstream = Downstream(self.node)
        self._ends.callback(self.downstream.close)
        for stored in self.store.artifacts.values():
            self.node.add_stored(stored.assembly, self.store.open_log(stored))
        hub = self.control.hub
        self.attachment = Attachment(
            self.node, identity, lambda: (hub, *config.hub), config.stripes, self.control.changed, config.tls
        )
        self.socket = InstallSocket(config.state / "install.sock", self)
        targets = Targets(self.small_files, self.socket, config.state, config.keep, config.kv, config.token.run.hex())
        self.runners = [Runner(self, targets.installer(t)) for t in config.targets]
        self.http = HttpServer(
            self.status,
            self.view.ready,
            metrics.registry(lambda: metrics.node_families(self.node), self.view.families),
            {},
            str(config.token),
        )

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
        early, self._early = self._early or [], None
        for kind, body in early:
            self.on_hub_message(kind, body)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.node.run(), name="node")
            group.create_task(self.downstream.run(), name="keepalives")
            group.create_task(self.control.run(), name="control")
            group.create_task(self._attach(), name="attachment")
            group.create_task(self._stage(), name="staging")
            group.create_task(self._fetch(), name="fetching")
            for runner in self.runners:
                group.create_task(runner.run(), name=runner.installer.name)

    async def _read_base(self, folder: Path) -> tuple[Checkpoint, int]:
        checkpoint = await self.staging.run(Checkpoint.open, folder)
        return checkpoint, await self.staging.run(state_digest, checkpoint, checkpoint.layout())

    def _let_shadow_go(self) -> None:
        if self.shadow is not None:
            self.shadow.close()

    # -- what the hub says

    def on_hub_message(self, kind: Type, body: Body) -> None:
        if kind is Type.WELCOME:
            self.commits = body["commit"]
            self.target = None if body["target"] is None else Version.of(body["target"])
            self.catalog.begin()
            for runner in self.runners:
                runner.wake()
            if self._welcome is not None and not self._welcome.done():
                self._welcome.set_result(body)
        elif self._early is not None:
            self._early.append((kind, body))
        elif kind is Type.PLAN:
            parent = None if body["parent"] is None else (body["parent"], body["host"], body["port"])
            self.attachment.order((body["epoch"][0], body["epoch"][1]), parent, [(n, h, p) for n, h, p in body["backups"]])
        elif kind is Type.CATALOG:
            whole = self.catalog.update(body, asyncio.get_running_loop().time())
            dropped = body["dropped"]
            if whole:
                # A hub that died forgets what it had not sealed. What opened since we dialled it may be newer than its list.
                since = self.control.joined_at
                dropped = [h.id for h in self.node.holdings.values() if self.catalog.get(h.id) is None and h.opened_at < since]
            for artifact in dropped:
                self._dropped(artifact)
            self._news.ring()
        elif kind is Type.COMMIT:
            self.target = Version.of(body["version"])
            for runner in self.runners:
                runner.wake()

    def on_hub_lost(self) -> None:
        logger.warning("the hub is out of reach; going on with what the swarm has")

    def _dropped(self, artifact: bytes) -> None:
        holding = self.node.holdings.get(artifact)
        if holding is not None and holding.completed_at is None:
            self.node.abort(holding)

    def _join_body(self) -> Body:
        host, port = self.config.advertise or ("", self.listener.address[1])
        return {
            "name": self.config.name,
            "region": self.config.region,
            "listen": [host, port],
            "held": None if self.staged is None else list(self.staged),
        }

    def _report(self) -> Body:
        transfer, self._transfer = self._transfer, None
        return self.view.report(transfer)

    def status(self) -> Document:
        """As served at /status."""
        return self.view.status()

    @property
    def committed(self) -> Version | None:
        """The version that all installers are at, at least."""
        every = [r.installer.committed for r in self.runners]
        return None if not every or None in every else min(v for v in every if v is not None)

    # -- NodeOwner

    def make_log(self, open_: Open, layout: Layout) -> Log:
        return self.store.begin(open_, layout)

    def on_opened(self, holding: Holding) -> None:
        self._news.ring()

    def on_complete(self, holding: Holding) -> None:
        took = (holding.completed_at or 0.0) - holding.opened_at
        if holding.assembly.manifest is not None and took > 0:
            self._transfer = [holding.assembly.manifest.log, int(took * 1e6)]
        self._later(self._seal(holding), f"seal {holding.open.version}")

    def _later(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._sealing.add(task)
        task.add_done_callback(self._sealing.discard)

    async def _seal(self, holding: Holding) -> None:
        try:
            stored = await self.staging.run(self.store.seal, holding.log, holding.assembly)
            holding.durable.set()
            needed = frozenset({stored.id, *(edge.artifact for edge in self._path())})
            for gone in await self.staging.run(self.store.retain, needed):
                self.node.forget(gone.id)
        except P2PCastError as error:
            if not self.node.error.done():
                self.node.error.set_exception(error)
        self._news.ring()

    def on_aborted(self, holding: Holding) -> None:
        self._later(self.staging.run(self.store.abandon, holding.log, holding.id), f"abandon {holding.open.version}")
        self._news.ring()

    def on_offered(self, upstream: Upstream) -> None:
        self._news.ring()

    def on_upstream_lost(self, upstream: Upstream, error: P2PCastError | None) -> None:
        self._news.ring()

    # -- Acceptor

    def accept_link(self, link: Link, hello: Body) -> None:
        if hello["purpose"] != "data":
            raise RemoteError("a peer has no control connections; dial the hub")
        if not hasattr(self, "downstream"):
            raise RetryableError("not joined yet")
        link.owner = self.downstream
        self.downstream.accept(link)

    def on_link_event(self, link: Link, stripe: Any, event: Any) -> None: ...

    def on_link_read(self, link: Link, payload_bytes: int) -> None: ...

    def on_link_writable(self, link: Link, stripe: Any) -> None: ...

    def on_link_closed(self, link: Link, error: P2PCastError | None) -> None: ...

    # -- catching up

    def _path(self) -> list[Edge]:
        edges = self.catalog.edges() | {
            h.id: Edge(h.id, h.open.base, h.open.version, h.assembly.manifest.log if h.assembly.manifest else 0)
            for h in self.node.holdings.values()
            if self._may_complete(h)
        }
        return cheapest_path(self.staged, edges.values())

    def _may_complete(self, holding: Holding) -> bool:
        """What a hub was making when it died is on nobody's list: once nobody sends it any more, it leads nowhere."""
        return holding.completed_at is not None or holding.source is not None or self.catalog.get(holding.id) is not None

    async def _attach(self) -> None:
        # A whole state that the hub pushes is not for one that has it on disk: that becomes known first.
        if self._base is not None:
            await self._begun.wait()
        await self.attachment.run()

    async def _fetch(self) -> None:
        """Ask for what the way to the newest version needs and nobody sends."""
        await self._begun.wait()
        while True:
            waiting = self._ask()
            await self._news.wait(PATIENCE_S / 4 if waiting else None)

    def _ask(self) -> bool:
        """True when something is missing that may have to be asked for later."""
        waiting = False
        live, now = self.attachment.feeding, asyncio.get_running_loop().time()
        for edge in self._path():
            holding = self.node.holdings.get(edge.artifact)
            if holding is not None and (holding.completed_at is not None or holding.source is not None):
                continue
            if live is not None and edge.artifact in live.offers:
                if self.attachment.unfetch(edge.artifact):
                    live.want(edge.artifact)
                else:
                    waiting = True
                continue
            waiting = True
            if (entry := self.catalog.get(edge.artifact)) is not None and entry.sealed:
                # A parent that is busy with an earlier one will come to it; one that is lost is replaced in a moment.
                waited = now - max(entry.sealed_at, self.attachment.moved_at)
                if waited > PATIENCE_S and not self.attachment.receiving:
                    self.attachment.fetch(edge.artifact)
        return waiting

    # -- staging

    async def _stage(self) -> None:
        """From version to version, for as long as the peer lives."""
        await self._begin()
        while True:
            path = self._path()
            holding = self.node.holdings.get(path[0].artifact) if path else None
            if holding is None:
                self._set_busy("current" if self.staged is not None and not path else "waiting")
                await self._news.wait()
                continue
            try:
                await self._advance(holding)
                self.error = None
            except RetryableError as error:
                logger.info("%s", error)
            except IntegrityError as error:
                await self._refused(holding, error)

    async def _begin(self) -> None:
        """The shadow of an earlier process if it is good, else the base folder, else nothing: then an anchor comes over the wire."""
        await self.catalog.complete.wait()
        self.shadow = await self._reopened()
        if self.shadow is None and self._base is not None:
            # A hub that has just started is still making that very version.
            while not self.catalog.whole():
                self._set_busy("waiting")
                await self._news.wait()
            self.shadow = await self._from_base(*self._base)
        # Only now is it known what has to come over the wire.
        self.staged = None if self.shadow is None else self.shadow.version
        self._begun.set()
        if self.shadow is not None:
            await self._at(self.shadow.version)

    async def _reopened(self) -> Shadow | None:
        for layout in self._layouts():
            try:
                shadow = await self.staging.run(Shadow.open, self.config.shadow, layout)
            except IntegrityError:
                continue
            except LocalError:
                return None
            known = self.catalog.states().get(shadow.version)
            if known is None or known != shadow.state_digest or await self._rotten(shadow):
                shadow.close()
                return None
            logger.info("the shadow of an earlier process is good: version %s", shadow.version)
            return shadow
        return None

    async def _rotten(self, shadow: Shadow) -> int:
        """How many cells do not match their mark."""
        return len(await self.staging.run(shadow.verify, self.staging.workers))

    def _layouts(self) -> Iterable[Layout]:
        seen = {s.assembly.layout.layout_id: s.assembly.layout for s in self.store.artifacts.values()}
        if self._base is not None:
            layout = self._base[0].layout()
            seen.setdefault(layout.layout_id, layout)
        return seen.values()

    async def _from_base(self, checkpoint: Checkpoint, state: int) -> Shadow:
        layout = checkpoint.layout()
        match = [v for v, known in self.catalog.whole() if known == (layout.layout_id, state)]
        if not match:
            raise IntegrityError(
                f"wrong base: {checkpoint.folder} (digest {state:016x}) is not a version that this run keeps whole; "
                "give the folder that the hub was started from, or leave --base out to fetch it"
            )
        version = max(match)
        self.node.add_layout(layout)
        await self.staging.run(self.store.keep_files, await self.staging.run(checkpoint.small_files))
        logger.info("base %s is version %s: nothing to download", checkpoint.folder, version)
        self._say_room(layout)
        return await self.staging.new_shadow(self.config.shadow, layout, version, checkpoint.words, state)

    def _say_room(self, layout: Layout) -> None:
        logger.info(
            "the state takes %.2f GB of memory in %s, and each version's changes beside it",
            layout.nbytes / 1e9,
            self.config.shadow,
        )

    async def _advance(self, holding: Holding) -> None:
        version = holding.open.version
        self._set_busy("receiving")
        if holding.open.base is None:
            await self._fill(holding)
        else:
            shadow = self.shadow
            assert shadow is not None
            patch = await self.staging.patch(holding, shadow)
            await holding.durable.wait()
            async with self._moving():
                await self.staging.apply(shadow, patch)
        await self._at(version)

    async def _fill(self, holding: Holding) -> None:
        layout, seen = holding.assembly.layout, 0
        self._say_room(layout)
        with Meter(f"version {holding.open.version}") as meter:
            while not holding.finished:
                holding.progress.clear()
                if holding.aborted:
                    raise RetryableError(f"version {holding.open.version} was aborted by its trainer")
                await holding.progress.wait()
                held = holding.artifact.held.count * holding.open.piece
                meter(held - seen, max(held, layout.nbytes))
                seen = held
        await holding.durable.wait()
        async with self._moving():
            if self.shadow is not None:
                self.shadow.close()
                self.shadow = self.staged = None
            self.shadow = await self.staging.fill(holding, self.config.shadow)

    async def _at(self, version: Version) -> None:
        """The shadow holds ``version`` now: have it installed, unless the next is there already."""
        self.staged = version
        self._set_busy("staged")
        logger.info("version %s staged", version)
        self._drop_patches()
        for runner in self.runners:
            runner.wake()
        while not (self._superseded(version) or all(r.settled(version) for r in self.runners)):
            async with self._still:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await self._still.wait()

    def _superseded(self, version: Version) -> bool:
        """Whether the next version is here already: then no engine, and be it one that hangs, is waited for."""
        following = self._path()
        ahead = self.node.holdings.get(following[0].artifact) if following else None
        return ahead is not None and ahead.finished and version != self.target

    async def _refused(self, holding: Holding, error: IntegrityError) -> None:
        """A version that does not fit what we hold, or a shadow that rotted: heal by starting over from what is whole."""
        self.error = str(error)
        logger.error("version %s refused: %s", holding.open.version, error)
        rotten = 0
        if self.shadow is not None and holding.open.base == self.staged:
            async with self._moving():
                rotten = await self._rotten(self.shadow)
                if rotten:
                    logger.error("%d cells of the shadow have rotted; it is made anew", rotten)
                self.shadow.close()
                self.shadow = self.staged = None
        if not rotten and holding.finished:
            # It was whole when it came in: then it has been damaged on our disk.
            self.node.forget(holding.id)
            await self.staging.run(self.store.discard, holding.id)
            self._news.ring()
        self._refusals[holding.id] += 1
        await asyncio.sleep(min(REFUSED_MAX_S, REFUSED_S * 2 ** (self._refusals[holding.id] - 1)))

    def _drop_patches(self) -> None:
        """Those that every engine has behind it, and those too far back."""
        shadow = self.shadow
        if shadow is not None:
            known = [v for r in self.runners if (v := r.installer.committed) is not None]
            behind, every = min(known, default=shadow.version), shadow.patches
            if len(every) > KEPT_PATCHES:
                behind = max(behind, every[-KEPT_PATCHES - 1])
            shadow.drop_patches(behind)

    def _set_busy(self, what: str) -> None:
        if what != self.busy:
            self.busy = what
            self.control.changed()

    # -- RunnerOwner, Provider

    @contextlib.asynccontextmanager
    async def held_still(self) -> AsyncIterator[tuple[Version, Path] | None]:
        async with self._still:
            self._readers += 1
        try:
            shadow = self.shadow
            yield None if shadow is None or self.staged is None else (self.staged, shadow.path)
        finally:
            async with self._still:
                self._readers -= 1
                self._still.notify_all()

    @contextlib.asynccontextmanager
    async def _moving(self) -> AsyncIterator[None]:
        async with self._still:
            await self._still.wait_for(lambda: self._readers == 0)
            yield

    def may_commit(self, version: Version) -> bool:
        return self.commits == "auto" or version == self.target

    def on_installed(self) -> None:
        self.control.changed()

    def small_files(self, version: Version) -> Mapping[str, bytes]:
        files = self.store.small_files(version)
        if not files and self._base is not None and self.store.manifest(version) is None:
            return self._base[0].small_files()
        return files

    def layout_document(self) -> bytes:
        if self.shadow is None:
            raise RetryableError("this peer holds no version yet")
        return self.shadow.layout.document

    def patches(self, base: Version | None, to: Version) -> list[Path] | Path:
        shadow = self.shadow
        if shadow is None or self.staged != to:
            raise RetryableError(f"version {to} is not staged here")
        chain: list[Path] = []
        at = to
        while base is not None and at != base:
            holding = next((h for h in self.node.holdings.values() if h.open.version == at and h.open.base is not None), None)
            if holding is None or holding.open.base is None or at not in shadow.patches:
                return shadow.path
            chain.append(shadow.patch_path(at))
            at = holding.open.base
        return chain[::-1] if base is not None else shadow.path

    def report(self, report: Mapping[str, Any]) -> None:
        logger.debug("engine: %s", dict(report))
