"""The parts of a peer that need the run's key, in groups: relay, engines, shadow, and sync to the newest version."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from functools import partial

from p2pcast.ground.observers import Observers
from p2pcast.ground.ordered_map import cores
from p2pcast.ground.version import Version
from p2pcast.relay.node import Node
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.transport.dial import Stripes
from p2pcast.transport.socket_options import own_congestion, window_bytes
from p2pcast.transport.stripe_count import NetworkPath, stripes
from rollout_node.control.activity import Activity
from rollout_node.control.freshness import Freshness
from rollout_node.control.reporter import ReceivedArtifacts
from rollout_node.control.run_key_source import KnownRunKey
from rollout_node.engine.callbacks import Callbacks
from rollout_node.engine.commit_permission import CommitPermission, CommitRequests
from rollout_node.engine.engines import Engines
from rollout_node.engine.install_target import Targets
from rollout_node.engine.multi_host_leader import MultiHostLeader
from rollout_node.engine.multi_host_member import MultiHostMember
from rollout_node.engine.runner import Runner
from rollout_node.engine.switch_slots import SwitchSlots
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.installer import Installer
from rollout_node.installers.weight_provider import WeightProvider
from rollout_node.peer_config import PeerConfig
from rollout_node.peer_startup import Startup
from rollout_node.shadow.shadow_state import HeldShadow, ShadowWriter
from rollout_node.stage.engine_handover import EngineHandover
from rollout_node.stage.first_shadow import BaseShadow, FirstShadow, ShadowStart
from rollout_node.stage.identity_check import IdentityCheck
from rollout_node.stage.part_fetcher import PartFetcher
from rollout_node.stage.quantised_reader import QuantisedReader
from rollout_node.stage.saved_shadow import SavedShadow
from rollout_node.stage.shadow_check import ShadowCheck
from rollout_node.stage.shadow_repair import ShadowRepair
from rollout_node.stage.shadow_updater import RefusedVersions, ShadowUpdater
from rollout_node.stage.small_file_repair import SmallFileRepair
from rollout_node.stage.version_stager import VersionStager
from rollout_node.sync.artifact_removal import ArtifactRemoval
from rollout_node.sync.catchup_choice import CatchupChoice
from rollout_node.sync.connector import Connector
from rollout_node.sync.downloader import Downloader, source_dialler
from rollout_node.sync.ingest import Ingest, NodeEvents
from rollout_node.sync.mirror_catalog import NoMirror
from rollout_node.sync.mirror_source import MirrorSource
from rollout_node.sync.missing_versions import MissingVersions
from rollout_node.sync.parent_failover import ParentFailover, parent_dialler
from rollout_node.sync.requester import Requester
from rollout_node.sync.version_path import VersionPlanner

# -- relay


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayParts:
    store: ArtifactStore
    node_events: NodeEvents
    node: Node
    connector: Connector
    parent_failover: ParentFailover
    downloader: Downloader
    transfers: ReceivedArtifacts


def build_relay(startup: Startup, key: bytes, store: ArtifactStore) -> RelayParts:
    config, session, transfers = startup.config, startup.hub_session, ReceivedArtifacts()
    mirrored = NoMirror() if startup.mirror is None else startup.mirror.catalog
    catalog, node_events = startup.catalog, NodeEvents(store)

    def is_listed(artifact: bytes) -> bool:
        return artifact in mirrored.entries or not session.connected or catalog.get(artifact) is not None

    node = Node(node_events, startup.identity.node, key, is_sealed=catalog.is_sealed, is_listed=is_listed)
    startup.ends.callback(node.close)
    for stored in store.artifacts.values():
        node.add_stored(stored.assembly, store.open_log(stored))
    connector = Connector(startup.identity, session.send, startup.dialling_tls, config.sockets)

    def stripe_count(rtt_s: float) -> int:
        congestion = config.sockets.congestion or own_congestion()
        return stripes(NetworkPath(rtt_s, transfers.fastest_bps, congestion, window_bytes()))

    links: Stripes = config.stripes or stripe_count
    parent_failover = ParentFailover(
        parent_dialler(node, connector, links), lambda: bool(node.wants()), session, startup.timeline, startup.saved
    )
    return RelayParts(
        store=store,
        node_events=node_events,
        node=node,
        connector=connector,
        parent_failover=parent_failover,
        downloader=Downloader(node, source_dialler(node, connector), session, parent_failover),
        transfers=transfers,
    )


# -- engines


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    engines: Engines
    shadow: HeldShadow
    requests: CommitRequests
    policy: CommitPermission
    provider: WeightProvider
    socket: InstallSocket
    lead: MultiHostLeader | None
    member: MultiHostMember | None
    wrong_weights: Observers[[]]
    """Notified when an engine received wrong weights from the shadow."""
    corrupt: Observers[[]]
    """Notified when corrupt cells were found in the shadow."""

    def may_leave(self, version: Version | None) -> bool:
        """Whether the shadow may move on from ``version``; only an engine on several hosts can object."""
        return self.member is None or self.member.may_leave(version)


def build_engines(startup: Startup, relay: RelayParts) -> EngineParts:
    """Build the engines' parts. Raises UsageError."""
    config, orders, report_soon = startup.config, startup.orders, startup.hub_session.changed
    name, role = config.engine or ("", "")
    changed: Observers[[]] = Observers()
    wrong_weights: Observers[[]] = Observers()
    corrupt: Observers[[]] = Observers()
    shadow, requests = HeldShadow(startup.shadow_state, relay.node), CommitRequests()
    if config.quantise is not None:
        shadow = quantised = QuantisedReader(startup.shadow_state, relay.node, config.shadow, config.quantise)
        wrong_weights.add(quantised.distrust)
        corrupt.add(quantised.distrust)
        startup.ends.callback(quantised.close)
    policy = CommitPermission(orders, startup.catalog, startup.saved, config.driver, requests)
    member = None
    if role == "member":
        member = MultiHostMember(name, startup.shadow_state, startup.identity, startup.dialling_tls, changed.notify)
    provider = WeightProvider(
        relay.store, startup.base, shadow, (lambda version: None) if member is None else member.give_shadow
    )
    socket = InstallSocket(config.state / "install.sock", provider)
    lead = None
    if role == "lead":
        lead = MultiHostLeader(name, socket, report_soon)
        if (named := startup.state_file["members"]) is not None and named[0] == name:
            lead.set_members(bytes.fromhex(node) for node in named[1])
        provider.on_report.append(lead.on_report)
    if member is not None:
        provider.on_report.append(member.report)
    slots, callbacks = SwitchSlots(config.rolling), Callbacks(config.callbacks, max_defer_s=config.max_defer_s)
    runners = [
        Runner(installer, shadow, policy, changed.notify, wrong_weights.notify, slots, callbacks)
        for installer in _installers(config, provider, socket, lead)
    ]
    engines = Engines(runners, lead, member, orders, startup.timeline, report_soon)
    changed.add(engines.on_changed)
    orders.target_observers.add(engines.on_target)
    if config.quantise is not None:
        # A copy quantised from corrupt cells matches its own digests, so an audit would not notice.
        corrupt.add(engines.distrust)
    return EngineParts(
        engines=engines,
        shadow=shadow,
        requests=requests,
        policy=policy,
        provider=provider,
        socket=socket,
        lead=lead,
        member=member,
        wrong_weights=wrong_weights,
        corrupt=corrupt,
    )


def _installers(
    config: PeerConfig, provider: WeightProvider, socket: InstallSocket, lead: MultiHostLeader | None
) -> list[Installer]:
    """Return one installer per install target. Raises UsageError."""
    targets = Targets(config, provider.small_files, socket)
    return [targets.installer(t) if lead is None else targets.led(t, lead) for t in config.targets]


# -- the shadow


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    check: ShadowCheck
    identities: IdentityCheck
    updater: ShadowUpdater


def _build_stage(
    startup: Startup,
    relay: RelayParts,
    engine: EngineParts,
    planner: VersionPlanner,
    mirror: MirrorSource | None,
    removal: ArtifactRemoval,
    activity: Activity,
    *,
    resumed: bool,
) -> StageParts:
    folder, staging, store, base, timeline = (
        startup.config.shadow, startup.staging, relay.store, startup.base, startup.timeline,
    )  # fmt: skip

    def refused(version: Version, why: str) -> None:
        activity.error = why
        timeline.refused(version, why)

    def left(version: Version, why: str) -> None:
        refused(version, why)
        engine.engines.distrust()

    hub = None if startup.config.hub is None else startup.hub_session
    parts = PartFetcher(relay.node, relay.downloader, mirror, hub, removal, activity)
    repair = ShadowRepair(planner, base, parts, removal, timeline, staging.run)
    files = SmallFileRepair(store, planner, parts, removal, staging.run)
    writer = ShadowWriter(startup.shadow_state, engine.may_leave)
    check = ShadowCheck(writer, staging, repair, planner.replan, engine.corrupt.notify)
    identities = IdentityCheck(writer, store, removal, planner.replan, left)
    first = FirstShadow(
        SavedShadow(folder, store, staging, check, None if base is None else base.layout),
        None if base is None else BaseShadow(base, folder, relay.node, store, staging),
        planner,
        startup.catalog,
        activity,
        resumed=resumed,
    )
    updater = ShadowUpdater(
        start=ShadowStart(first, writer, identities, files, planner),
        check=check,
        identities=identities,
        stager=VersionStager(writer, folder, staging, files, identities, activity),
        handover=EngineHandover(
            writer,
            engine.engines,
            planner,
            timeline,
            activity,
            engine.policy.is_regression,
            partial(startup.saved.keep_newest, durable=startup.mirror is not None),
        ),
        refused=RefusedVersions(writer, check, planner, removal, refused),
        planner=planner,
        activity=activity,
    )
    return StageParts(check=check, identities=identities, updater=updater)


# -- sync to the newest version


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncParts:
    activity: Activity
    freshness: Freshness
    planner: VersionPlanner
    missing_versions: MissingVersions
    mirror_source: MirrorSource | None
    stage: StageParts
    requester: Requester


def build_sync(startup: Startup, relay: RelayParts, engine: EngineParts, key: KnownRunKey) -> SyncParts:
    session, config = startup.hub_session, startup.config
    node, store, parent_failover, downloader = relay.node, relay.store, relay.parent_failover, relay.downloader
    mirrored = NoMirror() if startup.mirror is None else startup.mirror.catalog
    activity, freshness = Activity(session.changed), _known_from_disk(store)
    removal = ArtifactRemoval(node, store, startup.staging.run, startup.tasks.later)
    missing_versions = MissingVersions(startup.catalog, node, parent_failover, startup.timeline, session)
    planner = VersionPlanner(
        state=startup.shadow_state,
        orders=startup.orders,
        catalog=startup.catalog,
        mirror=mirrored,
        node=node,
        parent_failover=parent_failover,
        store=store,
        saved=startup.saved,
        squashes=CatchupChoice(config.squashes, cores()),
    )
    mirror_source = _mirror_source(startup, relay, planner, activity, freshness, key)
    stage = _build_stage(startup, relay, engine, planner, mirror_source, removal, activity, resumed=key.resumed)
    engine.wrong_weights.add(stage.check.suspect)
    requester = Requester(
        planner=planner,
        state=startup.shadow_state,
        catalog=startup.catalog,
        node=node,
        parent_failover=parent_failover,
        downloader=downloader,
        missing_versions=missing_versions,
        mirror=mirrored,
        ask_squash=session.ask_squash,
        give_up=removal.give_up,
    )

    def on_transfer(size: int, took_s: float) -> None:
        planner.squashes.transferred(size, took_s)
        relay.transfers.received(size, took_s)

    ingest = Ingest(
        node=node,
        store=store,
        freshness=freshness,
        missing_versions=missing_versions,
        timeline=startup.timeline,
        planner=planner,
        catalog=startup.catalog,
        removal=removal,
        on_transfer=on_transfer,
        hub=session,
        blocking=startup.staging.run,
        background=startup.tasks.later,
    )
    relay.node_events.observers.append(ingest)
    return SyncParts(
        activity=activity,
        freshness=freshness,
        planner=planner,
        missing_versions=missing_versions,
        mirror_source=mirror_source,
        stage=stage,
        requester=requester,
    )


def _mirror_source(
    startup: Startup,
    relay: RelayParts,
    planner: VersionPlanner,
    activity: Activity,
    freshness: Freshness,
    key: KnownRunKey,
) -> MirrorSource | None:
    mirror, session = startup.mirror, startup.hub_session
    if mirror is None:
        return None

    def on_listed() -> None:
        startup.catalog.complete.set()
        freshness.note_source("mirror", asyncio.get_running_loop().time())
        planner.replan()

    return MirrorSource(
        mirror.objects,
        mirror.catalog,
        mirror.errors,
        relay.node,
        startup.events,
        mirror.room,
        swarm_lost=lambda: not session.connected and not activity.draining,
        has_parent=lambda: relay.parent_failover.feeding is not None,
        planner=planner,
        on_listed=on_listed,
        at_once=key.mirror_now,
    )


def _known_from_disk(store: ArtifactStore) -> Freshness:
    newest = max(store.artifacts.values(), key=lambda s: s.version, default=None)
    kept = None
    if newest is not None:
        with contextlib.suppress(OSError):
            kept = newest.version, time.time() - newest.path.stat().st_mtime
    return Freshness(kept, asyncio.get_running_loop().time())
