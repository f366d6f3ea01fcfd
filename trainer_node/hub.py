"""The hub: the trainer's side of a run. It publishes checkpoints as versions, plans the chains of peers, and sends each
version to the first peer of every chain.

Guarantees:

- A version is announced as sealed only once it is durable here.
- A restarted hub continues the same run (key, versions, epochs).
- A dead or slow peer never delays publishing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from functools import partial

from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.addresses import ANYWHERE, show_address
from p2pcast.process.background_tasks import Tasks, report_bug
from p2pcast.process.events import Events
from p2pcast.process.log_context import note_daemon
from p2pcast.quantised.folder_opening import opening
from p2pcast.state.stale_shadows import leave
from p2pcast.store.state_format import state_lock
from p2pcast.telemetry.span_export import export_events
from p2pcast.trust.join_token import JoinToken
from trainer_node.commit.barrier import Tick
from trainer_node.hub_config import HubConfig
from trainer_node.hub_startup import (
    ControlParts,
    FleetParts,
    Publishing,
    StateParts,
    build_control,
    build_fleet,
    build_publishing,
    open_state,
)
from trainer_node.publish.checkpoint_source import CheckpointSource

logger = logging.getLogger("p2pcast.hub")

BEAT_S = 1.0
"""Interval of the PINGs to each peer, in seconds."""
SILENCE_S = 5.0
"""A control connection that has been silent for this many seconds counts as dead."""


class Hub:
    """The parts of a hub, built and connected. ``run`` runs until cancelled; then call ``close``.

    Everything happens on one event loop; blocking work runs in executors.
    """

    def __init__(self, state: StateParts, fleet: FleetParts, publishing: Publishing, control: ControlParts) -> None:
        self.config, self.ident = state.config, state.ident
        self.events, self.tasks = state.events, state.tasks
        self.node, self.http = publishing.node, control.http
        self.state, self.fleet, self.publishing, self.control = state, fleet, publishing, control

    @property
    def token(self) -> JoinToken:
        """The hub's own join token."""
        return self.state.admission.token

    async def run(self) -> None:
        state, publishing, control = self.state, self.publishing, self.control
        self.events.run = run = self.token.run.hex()
        note_daemon(run=run, role="hub", name=socket.gethostname())
        await control.listener.start(*self.config.listen)
        await self.http.start(*self.config.http)
        self._write_addresses()
        # First what the run waits for: no version is restored or published before the kernels are loaded.
        await state.staging.warm_up()
        await publishing.pipeline.restore()
        async with self.tasks.group() as group:
            group.create_task(partial(state.recovery.run, self.config.recall_s), name="recall", ends=True)
            group.create_task(self.node.run, name="node")
            group.create_task(publishing.downstream.run, name="keepalives")
            group.create_task(self._beat, name="control")
            group.create_task(control.uplink_meter.run, name="uplink")
            group.create_task(control.feed.run, name="page")
            exported = partial(export_events, "hub", socket.gethostname(), self.events)
            group.create_task(exported, name="telemetry", ends=True)
            group.create_task(control.plan_distributor.prober.run, name="reachability")
            # Before any other version, but after peers may join: a restarted hub first learns the peers' versions.
            await publishing.lifecycle.publish_base(self.config.base, opening(self.config.quantise))
            group.create_task(publishing.rank_intake.run, name="ranks")
            group.create_task(publishing.anchors_and_squashes.run, name="anchors and squashes")
            if publishing.mirror_uploader is not None:
                group.create_task(publishing.mirror_uploader.run, name="mirror")
            if self.config.checkpoints is not None:
                form = self.config.folder_form
                folders = CheckpointSource(
                    publishing.lifecycle,
                    publishing.pipeline,
                    state.history,
                    state.staging,
                    form,
                    opening(self.config.quantise),
                    (self.config.state, self.config.shadow),
                    on_room=partial(self.tasks.note_outcome, "publishing"),
                )
                group.create_task(partial(folders.run, self.config.checkpoints), name="checkpoints")

    async def close(self) -> None:
        state, publishing, control = self.state, self.publishing, self.control
        with contextlib.suppress(OSError):
            (self.config.state / "daemon.json").unlink(missing_ok=True)
        # First: the sessions that are closed here count as joined, so the next process expects their peers back.
        control.join_handler.stop()
        state.recovery.close()
        await self.http.stop()
        publishing.rank_intake.close()
        publishing.anchors_and_squashes.close()
        await control.listener.stop()
        await self.tasks.end()
        for session in list(state.sessions.values()):
            session.link.close()
        self.node.close()
        state.numbers.close()
        state.staging.close()
        state.history.close()
        publishing.hub_shadow.close()
        leave(self.config.shadow)
        state.admission.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            now = asyncio.get_running_loop().time()
            for session in list(self.state.sessions.values()):
                session.beat(now, SILENCE_S)
            self.publishing.rank_intake.beat(now)
            self.state.admission.beat()
            self.publishing.commits.handle(Tick())
            try:
                self.control.plan_upkeep.settle()
            except Exception as error:  # noqa: BLE001 - what peers report must not stop the hub
                report_bug("planning", error)

    def _write_addresses(self) -> None:
        config = self.config
        # Only once connections are accepted, because a peer that finds the token file may join at once.
        self.state.admission.own_token.write_now()
        http = show_address(*self.http.address)
        atomic_write(config.state / "daemon.json", b'{"http": "http://%s"}\n' % http.encode(), 0o600)
        host, port = config.advertise or self.control.listener.address
        logger.info(
            "run %s, listening on %s, status at http://%s/status",
            self.token.run.hex()[:12],
            show_address(*self.control.listener.address),
            http,
        )
        logger.info(
            "join with: p2pcast join %s%s --install safetensors:DIR%s",
            show_address("HUB_HOST" if host in ANYWHERE else host, port),
            f" --token-file {config.token_file}" if config.token_file is not None else "",
            " --plaintext" if config.plaintext else "",
        )
        if config.plaintext:
            logger.warning(
                "--plaintext: links are NOT encrypted: any node on the path can read the weights and take over"
                " connections"
            )


@contextlib.asynccontextmanager
async def opened(config: HubConfig) -> AsyncIterator[Hub]:
    """Context manager that locks the state folder and builds a hub. Raises LocalError or UsageError."""
    events = Events()
    tasks = Tasks(events)
    with state_lock(config.state), tasks.watching():
        state = await open_state(config, events, tasks)
        fleet = build_fleet(state)
        publishing = build_publishing(state, fleet)
        hub = Hub(state, fleet, publishing, build_control(state, fleet, publishing))
        try:
            yield hub
        finally:
            await hub.close()


async def run_hub(config: HubConfig) -> None:
    """Run a hub until cancelled."""
    async with opened(config) as hub:
        await hub.run()
