"""How a hub shows itself in /status, /readyz, /wait and metrics. Read-only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

from p2pcast.daemon.http_server import Document
from p2pcast.daemon.version_waits import Reached
from p2pcast.fleet_verdict import NO_VERSION, RANK, judge
from p2pcast.process.background_tasks import Tasks
from p2pcast.process.events import Events
from p2pcast.relay import daemon_metrics
from p2pcast.relay.child import Child
from p2pcast.relay.node import Node
from p2pcast.transport.link import Link
from p2pcast.transport.link_status import link_row
from topology.hub_uplink import Uplink
from trainer_node import hub_metrics
from trainer_node.admission.admission import Admission
from trainer_node.background.anchors_and_squashes import AnchorsAndSquashes
from trainer_node.background.mirror_uploader import MirrorUploader
from trainer_node.commit.commits import OUTCOMES, Commits
from trainer_node.hub_config import HubConfig
from trainer_node.membership.fleet_timeline import FleetTimeline
from trainer_node.membership.fleet_view import FleetView
from trainer_node.membership.membership import Membership
from trainer_node.membership.report_handler import ReportHandler
from trainer_node.publish.backpressure import Backpressure
from trainer_node.publish.version_view import VersionView
from trainer_node.ranks.rank_intake import RankIntake
from trainer_node.rollout_summary import RolloutSummary


@dataclass(eq=False, repr=False)
class HubView:
    """``children``: the peers that the hub feeds."""

    config: HubConfig
    tasks: Tasks
    events: Events
    node: Node
    children: Mapping[Link, Child]
    admission: Admission
    membership: Membership
    uplink: Uplink
    fleet: FleetView
    timeline: FleetTimeline
    reports: ReportHandler
    commits: Commits
    versions: VersionView
    ranks: RankIntake
    backpressure: Backpressure
    background: AnchorsAndSquashes
    mirror: MirrorUploader | None
    rollouts: RolloutSummary

    def ready(self) -> tuple[bool, str]:
        return (True, "") if self.versions.head is not None else (False, NO_VERSION)

    def healthy(self) -> tuple[bool, str]:
        found = self.tasks.healthy()
        return found if not found[0] else self.admission.healthy()

    def status(self) -> Document:
        return judge(self.facts())

    def facts(self) -> Document:
        """The contents of /status, without verdicts."""
        commits, target = self.commits, self.commits.target.version
        return {
            "role": "hub",
            "run": self.admission.token.run.hex(),
            "security": "plaintext" if self.config.plaintext else "tls",
            "evicted": sorted(node.hex() for node in self.admission.evicted),
            "version": self.versions.head,
            "commit": commits.mode,
            "target": None if target is None else str(target),
            "barrier": commits.status(),
            "epoch": list(self.membership.plan.epoch),
            "uplink": self._uplink_status(),
            "planned_bytes": self.membership.sizes.bytes,
            "chains": self.fleet.chains(),
            **self.versions.status(),
            "keeping": self.background.busy,
            "unready": self._troubles(),
            "ranks": self.ranks.present,
            "mirror": None if self.mirror is None else self.mirror.status(),
            "waiting_for": sorted(self.backpressure.waiting_for),
            "not_waited_for": dict(sorted(self.backpressure.not_waited_for.items())),
            "rollouts": self.rollouts.document(),
            "failures": self.tasks.status(),
            "short": self.tasks.short(),
            "pid": os.getpid(),
            "links": [link_row(link, "child") for link in self.children],
            "peers": self.fleet.rows(),
            "gone": self.timeline.gone.rows(time.time()),
        }

    def _troubles(self) -> list[Document]:
        gap = self.background.gap()
        remedy = "start a peer that held it, or publish the next version"
        found = [] if gap is None else [{"level": "alarm", "words": f"{gap}: {remedy}"}]
        if (clock := self.admission.clock_trouble()) is not None:
            found.append({"level": "watch", "words": clock})
        return found

    def weights(self) -> Document:
        """The run's versions with their schedules, what engines serve, and evicted nodes, for the ledger."""
        return {
            "run": self.admission.token.run.hex(),
            "head": self.versions.head,
            "manifests": self.versions.manifests(),
            "schedules": self.versions.schedules(),
            "engines": self.fleet.serving(),
            "evicted": sorted(node.hex() for node in self.admission.evicted),
        }

    def _uplink_status(self) -> Document:
        measured = "measured" if self.uplink.windows else "assumed"
        return {
            "bps": round(self.membership.uplink_bps),
            "from": measured if self.config.uplink_bps is None else "stated",
            "measured_bps": None if self.uplink.bps is None else round(self.uplink.bps),
            "windows": self.uplink.windows,
        }

    def waits(self) -> dict[str, Reached]:
        """The conditions of /wait."""
        return {"live": self.fleet.live, "staged": self.fleet.staged, "published": self.versions.published}

    def families(self) -> Iterable[Metric]:
        yield from daemon_metrics.node_families(self.node)
        yield from daemon_metrics.daemon_families(self.events, self.config.state, self.config.shadow)
        yield from daemon_metrics.task_families(self.tasks)
        yield from self.timeline.families()
        if self.mirror is not None:
            yield from self.mirror.families()
        yield hub_metrics.PEERS(len(self.membership.peers))
        yield hub_metrics.INVALID_REPORTS(self.reports.invalid_reports)
        yield from self.fleet.families()
        yield hub_metrics.SKIPPED_FOLDERS(len(self.versions.skipped))
        yield hub_metrics.KEPT_BYTES(self.background.made_bytes)
        yield hub_metrics.GAP(float(self.background.gap() is not None))
        yield hub_metrics.BARRIER_OUTCOMES(([o], self.commits.outcomes[o]) for o in OUTCOMES)
        yield from self.versions.families()
        yield from self.fleet.peer_families()
        judged = self.status()
        lost = [row for row in judged["gone"] if row["verdict"]["level"] != "gone"]
        found = [(str(row["name"]), row["verdict"]["level"]) for row in (*lost, *judged["peers"])]
        yield hub_metrics.RUN_LEVEL(RANK[judged["verdict"]["level"]])
        yield hub_metrics.PEER_LEVEL(([name], float(RANK[level])) for name, level in dict(found).items())
        yield hub_metrics.LOST_PEERS(len(lost))
