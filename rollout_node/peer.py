"""The peer: p2pcast on the rollout machine. It receives, verifies, forwards, stages and installs versions.

Guarantees:

- Forwarding never waits for staging, and staging one engine's weights never waits for the other engines.
- The shadow and every engine are always at a version sealed with the run's key, or report that they are not.
- If something is wrong with a version, only that version is lost.

This module only connects the parts. ``build_peer`` is the second phase of startup; ``peer_startup`` is the first.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from p2pcast.daemon.http_access import HttpAccess
from p2pcast.daemon.http_connections import HttpLimits
from p2pcast.daemon.http_server import Document, HttpServer, document_route
from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.addresses import show_address
from p2pcast.ground.version import Version
from p2pcast.process.log_context import note_daemon
from p2pcast.state.shadow import Shadow
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.telemetry.span_export import export_events
from p2pcast.transport.link import Link
from rollout_node.control.artifact_catalog import ArtifactCatalog
from rollout_node.control.peer_link_acceptor import Receivers
from rollout_node.control.reporter import Reporter
from rollout_node.control.run_key_source import KnownRunKey
from rollout_node.engine.http_commands import HttpCommands
from rollout_node.hub_messages import HubMessages
from rollout_node.peer_parts import (
    EngineParts,
    RelayParts,
    SyncParts,
    build_engines,
    build_relay,
    build_sync,
)
from rollout_node.peer_startup import Startup
from rollout_node.peer_view import PeerView
from rollout_node.stage.shadow_leases import ShadowLeases
from rollout_node.sync.catalog_updater import CatalogUpdater

logger = logging.getLogger("p2pcast.peer")

DRAIN_S = 5.0
"""Time in seconds that a stopping peer gives the hub to find other parents for its children."""


async def build_peer(startup: Startup, key: KnownRunKey) -> Peer:
    """Build the parts that need the run's key. Raises LocalError, UsageError."""
    config = startup.config
    store = await startup.staging.run(
        partial(ArtifactStore, config.state, key.key, keep_partial=True, counts=config.counts)
    )
    for path, why in store.damaged:
        logger.warning("not used: %s (%s)", path, why)
    relay = build_relay(startup, key.key, store)
    engine = build_engines(startup, relay)
    sync = build_sync(startup, relay, engine, key)

    def links() -> list[Link]:
        return [*relay.node.downstream.children, *(upstream.link for upstream in relay.node.upstreams)]

    startup.acceptor.begin(Receivers(relay.node.downstream, relay.connector, engine.lead, links))
    for part in await startup.staging.run(store.resume, startup.staging.workers):
        holding = relay.node.add_partial(part.assembly, part.log, part.held)
        logger.info(
            "version %s: %.1f MB of it were received before",
            holding.open.version,
            part.held.count * holding.open.piece / 1e6,
        )
    if key.resumed:
        _recall(startup, relay, engine)
    startup.bearer.write()
    return Peer(startup, relay, engine, sync)


def _recall(startup: Startup, relay: RelayParts, engine: EngineParts) -> None:
    """Restore the hub's last orders from the saved state, for a start without the hub."""
    startup.orders.recall()
    if startup.saved.neighbourhood is not None:
        startup.hub_session.hub, parent, backups, neighbours = startup.saved.neighbourhood
        relay.parent_failover.recall(parent, backups, neighbours)
    if engine.member is not None:
        engine.member.set_lead(startup.saved.lead)


def _messages(startup: Startup, relay: RelayParts, engine: EngineParts, sync: SyncParts) -> HubMessages:
    lead, session = engine.lead, startup.hub_session
    catalog_updater = CatalogUpdater(
        startup.catalog,
        relay.node,
        relay.parent_failover,
        relay.downloader,
        session,
        on_whole=(lambda: None) if lead is None else lead.on_hub_listed,
        on_identities=sync.stage.identities.contradict,
        replan=sync.planner.replan,
    )
    return HubMessages(
        orders=startup.orders,
        parent_failover=relay.parent_failover,
        connector=relay.connector,
        downstream=relay.node.downstream,
        downloader=relay.downloader,
        squashes=sync.planner.squashes,
        catalog_updater=catalog_updater,
        lead=lead,
        member=engine.member,
        saved=startup.saved,
        replan=sync.planner.replan,
    )


class Peer:
    """A peer whose parts are built; ``run`` serves until cancelled."""

    def __init__(self, startup: Startup, relay: RelayParts, engine: EngineParts, sync: SyncParts) -> None:
        self.config, self.ident = startup.config, startup.identity.node
        self.events, self.tasks = startup.events, startup.tasks
        self.node, self.runners = relay.node, engine.engines.runners
        self.startup, self.relay, self.engine, self.sync = startup, relay, engine, sync
        leases = self.leases = ShadowLeases(startup.shadow_state, startup.tasks)
        self.view = PeerView(
            config=startup.config,
            ident=self.ident,
            cores=startup.staging.workers,
            activity=sync.activity,
            events=startup.events,
            tasks=startup.tasks,
            timeline=startup.timeline,
            freshness=sync.freshness,
            hub_session=startup.hub_session,
            certificate=startup.certificate,
            state=startup.shadow_state,
            node=relay.node,
            downstream=relay.node.downstream,
            parent_failover=relay.parent_failover,
            planner=sync.planner,
            downloader=relay.downloader,
            missing_versions=sync.missing_versions,
            mirror_source=sync.mirror_source,
            engines=engine.engines,
            lead=engine.lead,
            member=engine.member,
            socket_path=engine.socket.path,
            leases=lambda: leases.rows,
            identities=partial(_identities, startup.catalog, relay.store),
            schedule_names=engine.provider.schedule_names,
            http_address=lambda: self.http.address,
        )
        self.reporter = _reporter(startup, relay, sync, self.view)
        commands = HttpCommands(
            self.runners, engine.shadow, engine.requests, self.config.driver, engine.engines.changed
        )

        async def verify(body: Document) -> Document:
            return {"node": self.ident.hex(), "name": self.config.name} | await commands.verify(body)

        self.http = HttpServer(
            self.view,
            HttpAccess(startup.bearer.token, self.config.state.resolve(), local_only=frozenset({"lease", "release"})),
            startup.events,
            {"commit": commands.commit, "verify": verify, "lease": leases.lease, "release": leases.release},
            waits=self.view.waits(),
            routes=[document_route("versions", self.view.versions)],
            limits=HttpLimits(self.config.http_per_address),
        )
        startup.bearer.serve(self._set_bearer)
        self._handlers = _messages(startup, relay, engine, sync).handlers()
        self._joined = False

    def _set_bearer(self, token: str) -> None:
        self.http.access.bearer = token

    async def run(self) -> None:
        """Join the run and serve until cancelled. Raises P2PCastError, possibly inside an exception group."""
        self.startup.events.run = run = self.config.token.run.hex()
        note_daemon(run=run, role="peer", name=self.config.name)
        await self._serve()
        self._joined = True
        self.startup.dispatcher.begin(self._handlers)
        async with self.tasks.group() as group:
            group.create_task(self.node.run, name="node")
            group.create_task(self.node.downstream.run, name="keepalives")
            group.create_task(partial(self.startup.hub_session.run, self.reporter.report), name="control")
            group.create_task(self.relay.connector.run, name="dialling")
            group.create_task(self._attach, name="attachment")
            exported = partial(export_events, "peer", self.config.name, self.startup.events)
            group.create_task(exported, name="telemetry", ends=True)
            group.create_task(self.relay.downloader.run, name="pulling")
            group.create_task(self.sync.stage.updater.run, name="staging")
            group.create_task(self.sync.requester.run, name="fetching")
            if self.sync.mirror_source is not None:
                group.create_task(self.sync.mirror_source.run, name="mirror")
            for runner in self.runners:
                group.create_task(runner.run, name=runner.installer.name)
            for part in (self.engine.lead, self.engine.member):
                if part is not None:
                    group.create_task(part.run, name=f"engine {part.name}")

    async def _serve(self) -> None:
        """Start the HTTP server and the install socket, and write the HTTP address to daemon.json."""
        ends, folder, name = self.startup.ends, self.config.state, self.config.name
        ends.push_async_callback(self.tasks.end)
        ends.push_async_callback(self.http.stop)
        ends.callback(self.leases.end)
        await self.http.start(*self.config.http)
        ends.push_async_callback(self.engine.socket.close)
        await self.engine.socket.start()
        http = show_address(*self.http.address)
        ends.callback((folder / "daemon.json").unlink, missing_ok=True)
        atomic_write(folder / "daemon.json", b'{"http": "http://%s"}\n' % http.encode(), 0o600)
        # Runs first at shutdown, so that the hub assigns no more nodes to this peer.
        ends.push_async_callback(self.startup.hub_session.leave)
        logger.info("%s joined run %s, status at http://%s/status", name, self.config.token.run.hex()[:12], http)
        logger.info("engines reach this peer at P2PCAST_SOCK=%s", self.engine.socket.path.absolute())

    async def _attach(self) -> None:
        # The hub pushes the whole state to a peer without a version, so first find out which version is on disk.
        if self.config.base is not None:
            await self.sync.planner.begun.wait()
        await self.relay.parent_failover.run()

    async def drain(self) -> None:
        """Hand over the children before shutdown, for at most DRAIN_S: the hub assigns them other parents, while this
        peer continues to feed them.
        """
        if not self._joined or not self.startup.hub_session.connected:
            return  # without the hub, children turn to their backups
        self.sync.activity.draining = True
        logger.info("asked to end; handing over %d children", self.node.downstream.fed)
        await self.startup.hub_session.leave()
        try:
            async with asyncio.timeout(DRAIN_S):
                while self.node.downstream.fed:
                    await self.node.downstream.fewer.wait(DRAIN_S)
        except TimeoutError:
            logger.warning(
                "%d children were not sent elsewhere in %.0f s; they go to their backups",
                self.node.downstream.fed,
                DRAIN_S,
            )

    # -- for programs that run a peer in their own process

    @property
    def shadow(self) -> Shadow | None:
        return self.startup.shadow_state.shadow

    @property
    def staged(self) -> Version | None:
        return self.startup.shadow_state.staged

    @property
    def committed(self) -> Version | None:
        """The oldest version that any engine serves; None if an engine serves no version."""
        return self.engine.engines.committed

    def status(self) -> Document:
        """The document served at /status."""
        return self.view.status()


def _reporter(startup: Startup, relay: RelayParts, sync: SyncParts, view: PeerView) -> Reporter:
    mirror = startup.mirror
    return Reporter(
        relay.node,
        relay.transfers,
        startup.hub_session,
        view.report,
        evicted=lambda: startup.evictions.unreported(startup.welcome.hub_key),
        lacking=sync.missing_versions.rows,
        spoilt=list if mirror is None else mirror.catalog.take_complaints,
    )


def _identities(catalog: ArtifactCatalog, store: ArtifactStore) -> dict[Version, bytes]:
    """Hashes of the signed manifests of all versions listed by the hub or stored by this peer."""
    held = {s.version: own for s in list(store.artifacts.values()) if (own := s.manifest.identity) is not None}
    return held | catalog.identities()
