"""The first phase of a peer's startup: everything that exists before the run's key is known.

The order is: state folder, identity, certificate, listener, connection to the hub. The key comes from the hub's
WELCOME, from the mirror, or from the peer's saved state. ``rollout_node.peer`` builds the rest.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from p2pcast.ground.errors import P2PCastError
from p2pcast.mirror.object_names import run_folder
from p2pcast.mirror.object_store import Objects
from p2pcast.process.background_tasks import Tasks
from p2pcast.process.daemon_process import StateFile, node_id
from p2pcast.process.events import Events
from p2pcast.state.staging import Staging
from p2pcast.state.stale_shadows import claim, leave, sweep
from p2pcast.transport.listener import Listener
from p2pcast.trust import bearer_tokens
from p2pcast.trust.eviction_log import EvictionLog
from p2pcast.trust.evictions import unsigned
from p2pcast.wire import messages
from p2pcast.wire.connection import Identity
from p2pcast.wire.dispatch import Handlers
from rollout_node.control.artifact_catalog import ArtifactCatalog
from rollout_node.control.bearer_file import BearerFile
from rollout_node.control.dispatcher import Dispatcher
from rollout_node.control.eviction_handler import EvictionHandler
from rollout_node.control.hub_orders import HubOrders
from rollout_node.control.hub_session import HubSession
from rollout_node.control.peer_certificate import PeerCertificate
from rollout_node.control.peer_link_acceptor import PeerLinkAcceptor
from rollout_node.control.reporter import join_body
from rollout_node.control.run_key_source import RunKeySource
from rollout_node.control.saved_hub_state import FACTS, SavedHubState
from rollout_node.control.welcome import HubWelcome
from rollout_node.peer_config import PeerConfig
from rollout_node.shadow.base_folder import BaseFolder
from rollout_node.shadow.shadow_state import ShadowState
from rollout_node.sync.mirror_catalog import MirrorCatalog
from rollout_node.sync.mirror_source import AT_ONCE, MirrorErrors, read_run_key
from rollout_node.timeline import Timeline

logger = logging.getLogger("p2pcast.peer")


@dataclass(frozen=True, slots=True)
class MirrorAccess:
    """The run's mirror. ``room`` limits the number of concurrent requests."""

    objects: Objects
    catalog: MirrorCatalog
    errors: MirrorErrors
    room: asyncio.Semaphore


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """The parts of the first phase. ``ends`` closes them and the parts of the second phase, in reverse order."""

    config: PeerConfig
    events: Events
    tasks: Tasks
    ends: AsyncExitStack
    timeline: Timeline
    staging: Staging
    state_file: StateFile
    saved: SavedHubState
    eviction_log: EvictionLog
    evictions: EvictionHandler
    welcome: HubWelcome
    identity: Identity
    bearer: BearerFile
    certificate: PeerCertificate | None
    acceptor: PeerLinkAcceptor
    listener: Listener
    orders: HubOrders
    catalog: ArtifactCatalog
    shadow_state: ShadowState
    dispatcher: Dispatcher
    hub_session: HubSession
    mirror: MirrorAccess | None
    base: BaseFolder | None
    run_key: RunKeySource

    @property
    def dialling_tls(self) -> ssl.SSLContext | None:
        return None if self.certificate is None else self.certificate.tls.client


async def start_up(config: PeerConfig, events: Events, tasks: Tasks, ends: AsyncExitStack) -> Startup:
    """Build the parts of the first phase. Raises RetryableError, RefusedError, LocalError, IntegrityError."""
    claim(config.state, config.shadow)
    ends.callback(leave, config.shadow)
    await asyncio.to_thread(sweep, kept_days=config.shadow_days)
    timeline = Timeline(events)
    state_file = StateFile(config.state / "peer.json", {"node": "", "run": "", "evicted": [], "members": None, **FACTS})
    eviction_log = _eviction_log(config, state_file, ends)
    ident = node_id(state_file)
    shadow_state = ShadowState()
    ends.callback(shadow_state.close)
    staging = Staging()
    ends.callback(staging.close)
    saved = SavedHubState(state_file, config.token.run, tasks.later, staging.run)
    ends.callback(saved.close)
    ends.push_async_callback(tasks.end)
    bearer = BearerFile(_first_bearer(config, ident), config.state, staging.run, tasks.later)
    config.token.check_links(plaintext=config.plaintext)
    certificate = await _certificate(config, ident, staging)
    identity = Identity(ident, config.name, config.token, eviction_log.evictions.nodes)
    acceptor = PeerLinkAcceptor()
    listener = Listener(
        acceptor, identity, None if certificate is None else certificate.tls.server, sockets=config.sockets
    )
    if config.hub is not None:
        await listener.start(*config.listen)
        ends.push_async_callback(listener.stop)
    orders, catalog = HubOrders(saved), ArtifactCatalog()
    welcome = HubWelcome(config.token.run, config.name, bearer, orders, catalog, eviction_log.evictions, timeline)
    evictions = EvictionHandler(
        eviction_log, welcome.check_key, listener.drop, acceptor.links, staging.run, tasks.later
    )
    dispatcher = Dispatcher(
        _first_handlers(welcome, evictions, certificate, tasks), welcome.refuse, partial(timeline.hub, reachable=False)
    )

    def join(own_host: str) -> messages.Join:
        return join_body(
            config.name,
            config.region,
            config.listen,
            config.advertise,
            listener.address[1],
            own_host,
            shadow_state.staged,
            config.engine,
        )

    hub_session = HubSession(dispatcher, config.hub, identity, join, certificate)
    ends.push_async_callback(hub_session.leave)
    mirror = _mirror(config, events)
    await staging.warm_up()
    base = None if config.base is None else await BaseFolder.read(config.base, staging.run)
    return Startup(
        config=config,
        events=events,
        tasks=tasks,
        ends=ends,
        timeline=timeline,
        staging=staging,
        state_file=state_file,
        saved=saved,
        eviction_log=eviction_log,
        evictions=evictions,
        welcome=welcome,
        identity=identity,
        bearer=bearer,
        certificate=certificate,
        acceptor=acceptor,
        listener=listener,
        orders=orders,
        catalog=catalog,
        shadow_state=shadow_state,
        dispatcher=dispatcher,
        hub_session=hub_session,
        mirror=mirror,
        base=base,
        run_key=RunKeySource(
            saved,
            None if config.hub is None else hub_session,
            welcome,
            None if mirror is None else partial(read_run_key, mirror.objects, config.token.run, mirror.errors),
            config.join_timeout_s,
        ),
    )


def _eviction_log(config: PeerConfig, state_file: StateFile, ends: AsyncExitStack) -> EvictionLog:
    log = EvictionLog(config.state)
    ends.callback(log.close)
    for node in state_file["evicted"]:  # written by an earlier release
        log.evictions.take(unsigned(bytes.fromhex(node)))
    return log


def _first_bearer(config: PeerConfig, ident: bytes) -> str:
    """Return the token used until the hub assigns one, as it does with TLS: random, or derived with --plaintext."""
    if config.plaintext:
        return bearer_tokens.of_node(bearer_tokens.of_run(config.token.secret), ident)
    return secrets.token_hex(bearer_tokens.SECRET_BYTES)


async def _certificate(config: PeerConfig, ident: bytes, staging: Staging) -> PeerCertificate | None:
    if config.plaintext:
        logger.warning(
            "--plaintext: links are NOT encrypted: any node on the path can read the weights and take over connections"
        )
        return None
    certificate = PeerCertificate(config.state, config.hub, config.token, ident, config.name, staging.run)
    await certificate.load()
    return certificate


def _first_handlers(
    welcome: HubWelcome, evictions: EvictionHandler, certificate: PeerCertificate | None, tasks: Tasks
) -> Handlers:
    handlers: Handlers = {
        messages.Welcome: welcome.accept,
        messages.Evicted: lambda body: evictions.accept(body, welcome.hub_key),
    }
    if certificate is None:
        return handlers
    renew: Handlers = {messages.Issued: lambda body: tasks.later(_renew(certificate, body.certificate), "certificate")}
    return {**handlers, **renew}


async def _renew(certificate: PeerCertificate, issued: bytes) -> None:
    try:
        await certificate.take(issued)
    except P2PCastError as error:
        logger.warning("certificate: %s", error)


def _mirror(config: PeerConfig, events: Events) -> MirrorAccess | None:
    if config.mirror is None:
        return None
    objects, room = Objects(config.mirror, run_folder(config.token.run)), asyncio.Semaphore(AT_ONCE)
    return MirrorAccess(objects, MirrorCatalog(objects, config.token.run, room), MirrorErrors(events), room)
