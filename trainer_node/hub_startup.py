"""Builds the parts of a hub, in four stages, and connects them. Each part gets only what it needs.

A part that announces something to parts that are built later has a list of observers, which is filled here before
anything runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from p2pcast.artifact.run_key import RunKey
from p2pcast.daemon.http_access import HttpAccess
from p2pcast.daemon.http_connections import HttpLimits
from p2pcast.daemon.http_server import HttpServer, document_route
from p2pcast.daemon.version_waits import VersionWaits
from p2pcast.ground.errors import UsageError
from p2pcast.ground.observers import Observers
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.mirror.object_names import run_folder
from p2pcast.mirror.object_store import Objects
from p2pcast.page.page_routes import PageRoutes
from p2pcast.page.picture_feed import PictureFeed
from p2pcast.page.reading_rights import ReadingRights
from p2pcast.process.background_tasks import Tasks
from p2pcast.process.daemon_process import StateFile, node_id
from p2pcast.process.events import Events
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import Node
from p2pcast.state.staging import Staging
from p2pcast.state.stale_shadows import claim, sweep
from p2pcast.store.artifact_store import ArtifactStore, Stored
from p2pcast.store.squash_ladder import RUNGS
from p2pcast.transport.link import Link
from p2pcast.transport.listener import Listener
from topology.pull_sources import PullSources
from topology.version_sizes import VersionSizes, of_steps
from trainer_node.admission.admission import Admission
from trainer_node.admission.hub_links import EvictionEnforcer, HubLinkAcceptor, WelcomeMessages
from trainer_node.background.anchors_and_squashes import AnchorsAndSquashes
from trainer_node.background.background_throttle import live_traffic
from trainer_node.background.lost_artifacts import LostArtifacts
from trainer_node.background.mirror_uploader import MirrorUploader
from trainer_node.commit.barrier import Left
from trainer_node.commit.commits import Commits, CommitTarget
from trainer_node.hub_config import HubConfig
from trainer_node.hub_view import HubView
from trainer_node.membership.broadcast_planner import BroadcastPlanner
from trainer_node.membership.broadcast_progress import BroadcastProgress
from trainer_node.membership.engine_reports import live_rows
from trainer_node.membership.fleet_timeline import FleetTimeline
from trainer_node.membership.fleet_view import FleetView
from trainer_node.membership.join_handler import JoinHandler, SessionObservers
from trainer_node.membership.lead_directory import LEADS, LeadDirectory
from trainer_node.membership.membership import DEFAULT_UPLINK_BPS, Membership
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.peer_session import PeerSession, SessionHandlers, Sessions
from trainer_node.membership.plan_distributor import PlanDistributor
from trainer_node.membership.plan_upkeep import PlanUpkeep
from trainer_node.membership.reachability_prober import ReachabilityProber
from trainer_node.membership.report_handler import ArtifactReports, ReportHandler
from trainer_node.membership.uplink_meter import UplinkMeter
from trainer_node.publish import version_numbers
from trainer_node.publish.artifact_announcer import ArtifactAnnouncer
from trainer_node.publish.backpressure import Backpressure, laggards
from trainer_node.publish.checkpoint_watcher import check_folder, steps_there
from trainer_node.publish.codec_choice import CodecChoice
from trainer_node.publish.delta_publisher import DeltaPublisher
from trainer_node.publish.hub_shadow import HubShadow
from trainer_node.publish.pipeline import Pipeline
from trainer_node.publish.publish_history import FILE as PUBLISHED
from trainer_node.publish.publish_history import PublishHistory
from trainer_node.publish.sealed_artifacts import SealedArtifacts
from trainer_node.publish.version_lifecycle import VersionLifecycle
from trainer_node.publish.version_numbers import VersionNumbers
from trainer_node.publish.version_sealer import VersionSealer
from trainer_node.publish.version_view import FolderVersions, VersionView
from trainer_node.ranks.rank_intake import LiveRows, RankIntake
from trainer_node.restart_recovery import ROSTER, Recovery, Roster
from trainer_node.rollout_summary import RolloutSummary

logger = logging.getLogger("p2pcast.hub")


@dataclass(frozen=True, slots=True)
class StateParts:
    """Stage 1: the contents of the state folder. ``admission`` needs the joined peers, hence ``sessions``."""

    config: HubConfig
    events: Events
    tasks: Tasks
    staging: Staging
    key: RunKey
    state_file: StateFile
    history: PublishHistory
    ident: bytes
    sessions: Sessions
    admission: Admission
    store: ArtifactStore
    numbers: VersionNumbers
    recovery: Recovery


@dataclass(frozen=True, slots=True)
class FleetParts:
    """Stage 2: the peers, and the plan that they follow."""

    membership: Membership
    timeline: FleetTimeline
    progress: BroadcastProgress
    broadcasts: BroadcastPlanner
    leads: LeadDirectory
    sources: PullSources


@dataclass(frozen=True, slots=True)
class Publishing:
    """Stage 3: versions, from their source to the store, the peers and the mirror."""

    node: Node
    downstream: Downstream
    announcer: ArtifactAnnouncer
    sealer: VersionSealer
    sealed_artifacts: SealedArtifacts
    codec_choice: CodecChoice
    hub_shadow: HubShadow
    pipeline: Pipeline
    commits: Commits
    backpressure: Backpressure
    anchors_and_squashes: AnchorsAndSquashes
    mirror_uploader: MirrorUploader | None
    lifecycle: VersionLifecycle
    rank_intake: RankIntake
    live: LiveRows


@dataclass(frozen=True, slots=True)
class ControlParts:
    """Stage 4: connections, and messages from peers and users."""

    plan_distributor: PlanDistributor
    report_handler: ReportHandler
    join_handler: JoinHandler
    plan_upkeep: PlanUpkeep
    link_acceptor: HubLinkAcceptor
    listener: Listener
    uplink_meter: UplinkMeter
    view: HubView
    feed: PictureFeed
    page: PageRoutes
    http: HttpServer


async def open_state(config: HubConfig, events: Events, tasks: Tasks) -> StateParts:
    """Open the state folder. Raises LocalError or UsageError."""
    checkpoints, folder, names = config.checkpoints, config.state, config.folder_form.names
    if checkpoints is not None:
        await asyncio.to_thread(check_folder, checkpoints, names)
    claim(folder, config.shadow)
    await asyncio.to_thread(sweep, kept_days=config.shadow_days)
    key = RunKey.load_or_create(folder / "run.key")
    state_file = StateFile(
        folder / "hub.json", {"node": "", "incarnation": 0, "target": None, "quantise": None, LEADS: {}}
    )
    _require_same_form(state_file, config.quantise)
    history = PublishHistory(
        folder / PUBLISHED, lambda: set() if checkpoints is None else steps_there(checkpoints, names)
    )
    history.move_from(state_file)
    state_file.update(incarnation=state_file["incarnation"] + 1, quantise=config.quantise)
    ident, sessions, staging = node_id(state_file), Sessions(), Staging()
    admission = Admission(
        config, key, ident, events, is_joined=sessions.__contains__, later=tasks.later, in_thread=staging.run
    )
    store = ArtifactStore(folder, key.public, counts=config.counts)
    for path, why in store.damaged:
        logger.warning("not used: %s (%s)", path, why)
    numbers = VersionNumbers(folder / version_numbers.FILE, version_numbers.this_boot())
    recovery = Recovery(
        store,
        numbers,
        Roster(folder / ROSTER, tasks.later),
        restarted=state_file["incarnation"] > 1,
        unlike=lambda peer, version: _report_unlike(events, numbers, peer, version),
    )
    return StateParts(
        config, events, tasks, staging, key, state_file, history, ident, sessions, admission, store, numbers, recovery
    )


def _require_same_form(state_file: StateFile, quantise: str | None) -> None:
    """Raises UsageError if the run's versions have a different form: one version never has two sets of weights."""
    if not state_file["incarnation"] or state_file["quantise"] == quantise:
        return
    was = state_file["quantise"]
    form, again = ("as trained", "leave out --quantise") if was is None else (f"as {was}", f"give --quantise {was}")
    raise UsageError(f"this run publishes its weights {form}: {again}, or begin another run with another --state")


def _report_unlike(events: Events, numbers: VersionNumbers, peer: str, version: Version) -> None:
    logger.error(
        "%s proves a version %s that this hub does not hold: this hub's state may be an older copy; the next version"
        " opens branch %d",
        peer, version, numbers.floor,
    )  # fmt: skip
    events.emit("unlike", peer=peer, version=str(version), branch=numbers.floor)


def build_fleet(state: StateParts) -> FleetParts:
    config = state.config
    membership = Membership(
        state.state_file["incarnation"],
        config.uplink_bps or DEFAULT_UPLINK_BPS,
        config.chains,
        config.region,
        config.peer_cap_bps,
    )
    _recall_sizes(membership.sizes, state.store)
    timeline, progress = FleetTimeline(state.events), BroadcastProgress()
    leads = LeadDirectory(
        state.sessions,
        membership.reach,
        state.state_file,
        later=state.tasks.later,
        in_thread=state.staging.run,
    )
    leads.recall()
    broadcasts = BroadcastPlanner(membership, progress, timeline, state.sessions)
    return FleetParts(membership, timeline, progress, broadcasts, leads, PullSources())


def _recall_sizes(sizes: VersionSizes, store: ArtifactStore) -> None:
    """Set the sizes of the state and its deltas from what an earlier process stored."""
    stored = store.artifacts.values()
    if stored:
        sizes.state(max(stored, key=lambda s: s.version).assembly.layout.nbytes)
    sizes.published(*of_steps(store.deltas()))


def build_publishing(state: StateParts, fleet: FleetParts) -> Publishing:
    config, store, staging, events, key = state.config, state.store, state.staging, state.events, state.key
    sessions, membership, later = state.sessions, fleet.membership, state.tasks.later
    store_changed, live = Wakeup(), LiveRows(lambda: live_rows(membership.peers.values()))
    announcer = ArtifactAnnouncer(store.holds, fleet.sources, sessions.send_all)
    sealer = VersionSealer(state.ident, key, store, staging, events, announcer, later)
    sealer.observers.append(lambda event: store_changed.notify())
    node = sealer.node
    downstream = node.downstream
    for stored in store.artifacts.values():
        node.add_stored(stored.assembly, store.open_log(stored))
    sealed_artifacts = SealedArtifacts(
        node, store, staging, announcer,
        staged=lambda: [peer.staged for peer in membership.peers.values()],
        children=downstream.children.values, store_changed=store_changed.notify, later=later,
    )  # fmt: skip

    def is_live() -> bool:
        return live_traffic(node.holdings.values(), downstream.children.values())

    codec_choice = CodecChoice(config.codec, lambda: membership.way(time.monotonic(), staging.workers))
    hub_shadow = HubShadow(node, store, staging, config.shadow, state.numbers.seen)
    deltas = DeltaPublisher(node, store, key, staging, membership.sizes, state.numbers)
    pipeline = Pipeline(
        node, store, key, staging, hub_shadow, deltas, codec_choice, state.numbers, sealed_artifacts.make_room
    )
    tls = state.admission.tls
    lost = LostArtifacts(
        store, state.admission.identity, None if tls is None else tls.client, membership,
        known=lambda version: pipeline.mark_of(version) or state.history.mark_of(version),
    )  # fmt: skip

    async def recover(anchors: bool) -> list[Stored]:
        await state.recovery.done.wait()
        return await lost.fetch(anchors=anchors)

    anchors_and_squashes = AnchorsAndSquashes(
        store, node.holdings, key, hub_shadow, events, live_traffic=is_live, add=sealed_artifacts.add,
        recover=recover, catch_up=pipeline.catch_up, make_room=sealed_artifacts.make_room,
        rungs=RUNGS if config.squashes else (), anchor_every=config.anchor_every,
    )  # fmt: skip
    mirror_uploader = None
    if config.mirror is not None:
        mirror_uploader = MirrorUploader(
            store, Objects(config.mirror, run_folder(state.admission.token.run)), events, is_live, store_changed,
            rate_bps=config.mirror_bps, counts=config.counts,
        )  # fmt: skip

    async def replace(damaged: Holding) -> None:
        await sealed_artifacts.discard(damaged)
        anchors_and_squashes.wake()

    node.damaged.add(lambda holding: later(replace(holding), f"remove damaged {holding.open.version}"))
    target = CommitTarget(state.state_file, sessions, staging.run)
    commits = Commits(config, target, sessions, events, versions=store.versions, later=later, fail=sealer.fail)
    sealer.observers.append(commits.handle)
    commits.start(store.newest())
    backpressure = Backpressure(
        config.max_lag,
        lambda most: laggards(membership.peers.values(), store.versions(), most, membership.detached),
        config.max_lag_wait_s,
        events,
    )
    lifecycle = VersionLifecycle(
        pipeline, state.history, staging, membership.sizes, events, fleet.broadcasts, sealer,
        holdings=node.holdings, recovered=state.recovery.done, until_caught_up=backpressure.until_caught_up,
        announce=announcer.announce, retain=sealed_artifacts.retain,
        on_published=(live.changed.set, anchors_and_squashes.wake),
    )  # fmt: skip
    rank_intake = RankIntake(lifecycle, pipeline, staging, live, wait_s=config.rank_timeout_s, quantise=config.quantise)
    return Publishing(
        node, downstream, announcer, sealer, sealed_artifacts, codec_choice, hub_shadow, pipeline, commits,
        backpressure, anchors_and_squashes, mirror_uploader, lifecycle, rank_intake, live,
    )  # fmt: skip


def _build_reports(
    state: StateParts,
    fleet: FleetParts,
    publishing: Publishing,
    plan_distributor: PlanDistributor,
    welcome: WelcomeMessages,
) -> tuple[ReportHandler, JoinHandler, PlanUpkeep]:
    admission, mirror, membership = state.admission, publishing.mirror_uploader, fleet.membership

    def fleet_changed() -> None:
        publishing.backpressure.recheck()
        publishing.live.changed.set()

    reported: Observers[[PeerRecord, float]] = Observers()
    reported.add(lambda peer, now: fleet_changed())
    reported.add(fleet.timeline.reported)
    reported.add(lambda peer, now: publishing.commits.reported(peer))
    sessions = SessionObservers()
    sessions.joined.add(lambda peer: state.recovery.joined(peer.ident))
    sessions.joined.add(fleet.timeline.joined)
    sessions.left.add(lambda peer, why: state.recovery.left(peer.ident))
    sessions.left.add(fleet.timeline.left)
    sessions.left.add(lambda peer, why: fleet_changed())
    sessions.ended.add(fleet.sources.left)
    sessions.ended.add(lambda peer: publishing.commits.handle(Left(peer)))
    upkeep = PlanUpkeep(state.ident, membership, plan_distributor, fleet.broadcasts, state.events)
    artifacts = ArtifactReports(
        membership, plan_distributor, is_sealed=state.store.holds,
        mirror_is_wrong=mirror.report_wrong if mirror is not None else lambda names: None,
    )  # fmt: skip
    reports = ReportHandler(membership, upkeep, artifacts, state.recovery, reported, admission.learn_evictions)
    joins = JoinHandler(
        state.sessions, membership, upkeep, fleet.leads, sessions, admit=admission.admit, welcome=welcome.messages
    )
    return reports, joins, upkeep


def build_control(state: StateParts, fleet: FleetParts, publishing: Publishing) -> ControlParts:
    config, store, admission, sessions = state.config, state.store, state.admission, state.sessions
    membership, node, downstream = fleet.membership, publishing.node, publishing.downstream
    mirror, tls = publishing.mirror_uploader, admission.tls
    prober = ReachabilityProber(membership.reach, admission.identity, None if tls is None else tls.client)
    plan_distributor = PlanDistributor(
        membership, sessions, fleet.timeline, prober, fleet.sources, node.holdings.__contains__
    )
    welcome = WelcomeMessages(
        state.key.public, publishing.commits, admission,
        epoch=lambda: membership.plan.epoch, catalog=lambda: publishing.announcer.catalog(node.holdings.values()),
        plaintext=config.plaintext,
    )  # fmt: skip

    reports, joins, upkeep = _build_reports(state, fleet, publishing, plan_distributor, welcome)
    handlers = SessionHandlers(joins, reports, plan_distributor, publishing.anchors_and_squashes, admission)

    def session(link: Link, token: bytes) -> PeerSession:
        return PeerSession(link, handlers, token)

    acceptor = HubLinkAcceptor(downstream, publishing.rank_intake, admission, session)
    listener = Listener(acceptor, admission.identity, None if tls is None else tls.server, sockets=config.sockets)
    enforcer = EvictionEnforcer(sessions, fleet.leads, listener, downstream.children)
    admission.trust.observers.append(enforcer.enforce)

    def measured(bps: float) -> None:
        if config.uplink_bps is None:
            membership.uplink_bps = bps

    meter, rollouts = UplinkMeter(downstream.children, measured), RolloutSummary()
    view = HubView(
        config, state.tasks, state.events, node, downstream.children, admission, membership, meter.uplink,
        FleetView(membership, store.versions, admission.certificate_until), fleet.timeline, reports,
        publishing.commits, VersionView(publishing.pipeline, publishing.lifecycle, store, fleet.progress),
        publishing.rank_intake, publishing.backpressure, publishing.anchors_and_squashes, mirror,
        rollouts,
    )  # fmt: skip
    folders = FolderVersions(config.checkpoints, config.folder_form, state.history, store, state.staging)
    feed = PictureFeed(view.facts, state.events)
    page = PageRoutes(feed, ReadingRights())
    local_only = frozenset({"token/create", "page/link"})
    http = HttpServer(
        view,
        HttpAccess(admission.bearer, config.state.resolve(), admits=page.admits, local_only=local_only),
        state.events,
        {
            "commit": publishing.commits.command,
            "rollouts": rollouts.command,
            "workers/drain": rollouts.orders.command,
            "page/link": page.link,
            **admission.commands.routes,
        },
        waits=VersionWaits(view.waits(), store.newest, folders.version_of),
        routes=[*page.routes, document_route("versions", view.weights), document_route("files", view.versions.files)],
        limits=HttpLimits(config.http_per_address),
    )
    return ControlParts(plan_distributor, reports, joins, upkeep, acceptor, listener, meter, view, feed, page, http)
