"""The peer's state as shown to others: its report to the hub, /status, /readyz, /wait and metrics."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric

from p2pcast.daemon.http_server import Document
from p2pcast.daemon.version_waits import VersionWaits
from p2pcast.fleet_verdict import (
    RANK,
    UNVERIFIED,
    FleetFinding,
    document,
    engine_findings,
    peer_findings,
    troubles,
    unready,
)
from p2pcast.ground import limits
from p2pcast.ground.addresses import show_address
from p2pcast.ground.version import Version
from p2pcast.process.background_tasks import Tasks
from p2pcast.process.events import Events
from p2pcast.process.metric_kinds import lag
from p2pcast.relay import daemon_metrics
from p2pcast.relay.downstream import Downstream
from p2pcast.relay.node import Node
from p2pcast.relay.upstream import Upstream
from p2pcast.transport.link_status import link_row
from p2pcast.wire import messages
from rollout_node import peer_metrics
from rollout_node.control.activity import Activity
from rollout_node.control.freshness import Freshness
from rollout_node.control.hub_session import HubSession
from rollout_node.control.peer_certificate import PeerCertificate
from rollout_node.control.reporter import ReportedChanges
from rollout_node.engine.engines import Engines
from rollout_node.engine.multi_host_leader import MultiHostLeader
from rollout_node.engine.multi_host_member import MultiHostMember
from rollout_node.peer_config import PeerConfig
from rollout_node.shadow.shadow_state import ShadowState
from rollout_node.sync.downloader import Downloader
from rollout_node.sync.mirror_source import MirrorSource
from rollout_node.sync.missing_versions import MissingVersions
from rollout_node.sync.parent_failover import ParentFailover
from rollout_node.sync.version_path import VersionPlanner
from rollout_node.timeline import Timeline

MAX_VERSIONS = 256
"""Limit on the versions in one answer, far above any result's allowed staleness."""


@dataclass(slots=True, kw_only=True)
class PeerView:
    """Reads the peer's parts and changes none of them."""

    config: PeerConfig
    ident: bytes
    cores: int
    activity: Activity
    events: Events
    tasks: Tasks
    timeline: Timeline
    freshness: Freshness
    hub_session: HubSession
    certificate: PeerCertificate | None
    state: ShadowState
    node: Node
    downstream: Downstream
    parent_failover: ParentFailover
    planner: VersionPlanner
    downloader: Downloader
    missing_versions: MissingVersions
    mirror_source: MirrorSource | None
    engines: Engines
    lead: MultiHostLeader | None
    member: MultiHostMember | None
    socket_path: Path
    leases: Callable[[], list[Document]]
    identities: Callable[[], Mapping[Version, bytes]]
    schedule_names: Callable[[], Mapping[Version, bytes]]
    http_address: Callable[[], tuple[str, int]]

    def report(self, transfer: tuple[int, int] | None, changes: ReportedChanges) -> messages.Report:
        """Build the report to the hub. ``transfer``: bytes and microseconds of a transfer that has just finished."""
        return messages.Report(
            parent=self.parent_failover.parent,
            staged=self.state.staged,
            committed=self.engines.committed,
            evicted=changes.evicted,
            durable=changes.durable,
            opened=changes.opened,
            held=changes.held,
            dropped=changes.dropped,
            garbled=changes.garbled,
            lacking=changes.lacking,
            spoilt=changes.spoilt,
            epoch=self.parent_failover.settled,
            transfer=transfer,
            inflow=_inflow(self.parent_failover.feeding),
            cores=self.cores,
            http=self.http_address(),
            link=self._link(),
            state=self.activity.shown,
            progress=self._progress(),
            bytes_received=self.node.bytes_received,
            bytes_duplicate=self.node.bytes_duplicate,
            engines=[_reported(row) for row in self.engines.rows()[: limits.MAX_PEER_ENGINES]],
            unready=[reason | {"words": reason["words"][: limits.MAX_REPORTED_ERROR]} for reason in self._unready()],
            error=_cut(self._error()),
        )

    def _error(self) -> str | None:
        """Why this peer does not have the newest version; None if there is no error."""
        gap = self.planner.gap()
        return self.activity.error if gap is None else str(gap)

    def _link(self) -> messages.ParentLinkReport | None:
        """The link to the parent, as the side that dialled it and the address; None if no parent feeds this peer."""
        if (live := self.parent_failover.feeding) is None:
            return None
        return {"dialled_by": "child" if live.link.dialled else "parent", "address": live.link.address}

    def _unready(self) -> list[messages.UnreadyReason]:
        """The peer's own reasons for being unready, for all views; its engines' reasons are in the engines' rows."""
        stale = self._freshness().stale(asyncio.get_running_loop().time(), self.config.max_age_s)
        found: list[messages.UnreadyReason] = []
        if stale is not None:
            found.append({"level": "alarm", "words": stale})
        if (gap := self.planner.gap()) is not None:
            found.append({"level": "alarm", "words": str(gap)})
        if (member := self.member) is not None and not member.ready:
            why = UNVERIFIED if member.connected else "its lead is out of reach"
            level = "watch" if member.connected else "alarm"
            found.append({"level": level, "words": f"engine {member.name}: {why}"})
        return found

    def _findings(self) -> list[FleetFinding]:
        row = {
            "state": self.activity.shown,
            "staged": None if (staged := self.state.staged) is None else str(staged),
            "unready": self._unready(),
            "error": self.activity.error,
            "engines": self.engines.rows(),
        }
        return peer_findings(row, self._known)

    @property
    def _known(self) -> list[Version]:
        staged = self.state.staged
        return sorted({*self.planner.states(), *([] if staged is None else [staged])})

    def ready(self) -> tuple[bool, str]:
        """Whether the peer is ready, and its problems; a ready peer may report some too."""
        findings = self._findings()
        why = unready(findings)
        return not why, why or troubles(findings)

    def healthy(self) -> tuple[bool, str]:
        return self.tasks.healthy()

    def _freshness(self) -> Freshness:
        """The age of the peer's knowledge, after the hub's last message has been counted in."""
        if (received_at := self.hub_session.last_received_at) is not None:
            self.freshness.note_source("hub", received_at)
        return self.freshness

    def _hub(self) -> Document | None:
        if self.config.hub is None:
            return None
        received_at = self.hub_session.last_received_at
        return {
            "address": show_address(*self.config.hub),
            "connected": self.hub_session.connected,
            "heard_s": None if received_at is None else round(asyncio.get_running_loop().time() - received_at, 3),
        }

    def _knowledge(self) -> Document:
        known = self._freshness()
        age_s = known.age_s(asyncio.get_running_loop().time())
        return {
            "age_s": None if age_s is None else round(age_s, 3),
            "source": known.source,
            "max_age_s": self.config.max_age_s,
        }

    def status(self) -> Document:
        shadow, staged, parent = self.state.shadow, self.state.staged, self.parent_failover.parent
        return {
            "role": "peer",
            "run": self.config.token.run.hex(),
            "name": self.config.name,
            "node": self.ident.hex(),
            "hub": self._hub(),
            "knowledge": self._knowledge(),
            "mirror": None if self.mirror_source is None else self.mirror_source.status(),
            "parent": None if parent is None else parent.hex(),
            "link": self._link(),
            "epoch": list(self.parent_failover.settled),
            "state": self.activity.shown,
            "progress": self._progress(),
            "bytes_received": self.node.bytes_received,
            "bytes_duplicate": self.node.bytes_duplicate,
            "engines": [
                dict(row) | {"verdict": document(engine_findings(row, self._known))} for row in self.engines.rows()
            ],
            "unready": self._unready(),
            "error": self._error(),
            "verdict": document(self._findings()),
            "staged": None if staged is None else str(staged),
            "committed": None if (c := self.engines.committed) is None else str(c),
            "layout_id": None if shadow is None else shadow.layout.layout_id.hex(),
            "digests": {} if shadow is None or staged is None else {str(staged): f"{shadow.state_digest:016x}"},
            "children": [c.link.name for c in self.downstream.children.values() if c.live],
            "pulling": {
                "artifacts": [artifact.hex() for artifact in self.downloader.artifacts],
                "sources": [
                    {"node": s.link.remote.hex(), "bytes_received": s.bytes_received} for s in self.downloader.sources
                ],
            },
            "pulled_by": [c.link.name for c in self.downstream.children.values() if not c.live],
            "links": self._links(),
            "engine": next((part.status() for part in (self.lead, self.member) if part is not None), None),
            "socket": str(self.socket_path.absolute()),
            "shadow": str(self.config.shadow),
            "leases": self.leases(),
            "failures": self.tasks.status(),
            "short": self.tasks.short(),
            "pid": os.getpid(),
            "security": "plaintext" if self.certificate is None else "tls",
            "certificate_until": None if self.certificate is None else self.certificate.until,
        }

    def versions(self) -> Document:
        """Return each engine's version, and the hashes of signed manifests by which workers identify weights.
        ``sparse`` lists the engines that follow their versions' schedules; ``schedules`` maps versions to schedule
        names.
        """
        staged = self.state.staged
        identities = sorted(self.identities().items())[-MAX_VERSIONS:]
        installers = [runner.installer for runner in self.engines.runners]
        return {
            "run": self.config.token.run.hex(),
            "node": self.ident.hex(),
            "kv": "drain" if self.config.wait.safe_point == "drain" else self.config.kv,
            "staged": None if staged is None else str(staged),
            "engines": {row["name"]: row["committed"] for row in self.engines.rows() if row["ready"]},
            "stretches": {runner.installer.name: runner.serving_epoch for runner in self.engines.runners},
            "manifests": {str(version): identity.hex() for version, identity in identities},
            "sparse": [each.name for each in installers if each.abilities.follows_schedules()],
            "schedules": {str(version): name.hex() for version, name in sorted(self.schedule_names().items())},
        }

    def _links(self) -> list[Document]:
        above = [("parent", self.parent_failover.feeding), ("beside", self.parent_failover.beside)]
        above += [("source", source) for source in self.downloader.sources]
        links = [(role, upstream.link) for role, upstream in above if upstream is not None]
        links += [("child", link) for link in self.downstream.children]
        return [link_row(link, role) for role, link in links]

    def waits(self) -> VersionWaits:
        conditions = {"live": self._live, "staged": self._staged, "published": self._published}
        return VersionWaits(conditions, lambda: self.newest)

    @property
    def newest(self) -> Version | None:
        """The newest version listed by the hub or staged here."""
        return max(self._known, default=None)

    def _published(self, version: Version, fraction: float | None) -> tuple[bool, Document]:
        """Whether the hub has listed the version, or a newer one, or it is staged here."""
        newest = self.newest
        return newest is not None and newest >= version, {"newest": None if newest is None else str(newest)}

    def _staged(self, version: Version, fraction: float | None) -> tuple[bool, Document]:
        staged = self.state.staged
        return staged is not None and staged >= version, {"staged": None if staged is None else str(staged)}

    def _live(self, version: Version, fraction: float | None) -> tuple[bool, Document]:
        engines = {row["name"]: row for row in self.engines.rows()}
        if (member := self.member) is not None:
            serves = None if member.serves is None else str(member.serves)
            engines[member.name] = {"name": member.name, "ready": member.ready, "committed": serves}
        share = sum(
            row["ready"] and row["committed"] is not None and Version.parse(row["committed"]) >= version
            for row in engines.values()
        )
        shown = {name: row["committed"] for name, row in engines.items()}
        return share > 0 and share >= (1.0 if fraction is None else fraction) * len(engines) - 1e-9, {"engines": shown}

    def families(self) -> Iterable[Metric]:
        now, staged = asyncio.get_running_loop().time(), self.state.staged
        yield from daemon_metrics.node_families(self.node)
        yield from daemon_metrics.daemon_families(self.events, self.config.state, self.config.shadow)
        yield from daemon_metrics.task_families(self.tasks)
        yield from self.timeline.families()
        if self.mirror_source is not None:
            yield from self.mirror_source.families()
        yield peer_metrics.HUB_CONNECTED(float(self.hub_session.connected))
        if (age_s := self._freshness().age_s(now)) is not None:
            yield peer_metrics.KNOWLEDGE_AGE(age_s)
        yield peer_metrics.STRANDED(float(self.planner.gap() is not None))
        yield peer_metrics.WITHHELD_VERSIONS(self.missing_versions.withheld)
        yield peer_metrics.SOURCES(len(self.downloader.sources))
        yield peer_metrics.PULLED_BYTES(self.downloader.bytes_received)
        if self.certificate is not None and self.certificate.until is not None:
            yield peer_metrics.CERTIFICATE_END(self.certificate.until)
        yield peer_metrics.STAGED_STEP(None if staged is None else staged.step)
        yield peer_metrics.COMMITTED_STEP(None if (c := self.engines.committed) is None else c.step)
        engines = self.engines.rows()
        yield peer_metrics.ENGINE_READY(([e["name"]], float(e["ready"])) for e in engines)
        yield peer_metrics.LAST_COMMIT_PAUSE(([e["name"]], e["pause_s"]) for e in engines if e["pause_s"] is not None)
        known = self._known
        yield peer_metrics.ENGINE_LAG(
            ([e["name"]], lag(None if (at := e["committed"]) is None else Version.parse(at), known)) for e in engines
        )
        yield peer_metrics.LEVEL(RANK[document(self._findings())["level"]])

    def _progress(self) -> messages.Progress | None:
        live = [h for h in self.node.holdings.values() if h.incomplete and not h.excerpt]
        if not live:
            return None
        newest = max(live, key=lambda h: h.open.version)
        return {"version": str(newest.open.version), "pieces": newest.artifact.held.count, "of": newest.assembly.pieces}


def _reported(row: messages.EngineStatus) -> messages.EngineStatus:
    """Shorten an engine's row for a report; the hub drops a row whose name is too long."""
    name, half = row["name"], limits.MAX_ENGINE_NAME // 2
    if len(name) > limits.MAX_ENGINE_NAME:
        name = f"{name[: half - 1]}…{name[-half:]}"
    return row | {"name": name, "error": _cut(row["error"])}


def _cut(error: str | None) -> str | None:
    """Cut the message to the length allowed in a report."""
    return None if error is None else error[: limits.MAX_REPORTED_ERROR]


def _inflow(live: Upstream | None) -> tuple[int, int, int] | None:
    """The running transfer as bytes received, microseconds, and bytes by which it trails the parent."""
    inflow = None if live is None else live.inflow
    return None if inflow is None else (inflow.got_bytes, int(inflow.span_s * 1e6), inflow.behind_bytes)
