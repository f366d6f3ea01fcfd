"""How a peer shows itself: its report to the hub, /status, /readyz and metrics. Reads, changes nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from p2pcast import limits, metrics
from p2pcast.addresses import show_address
from p2pcast.http import Document, Reached
from p2pcast.relay.upstream import Upstream
from p2pcast.transport.shown import shown
from p2pcast.version import Version
from rollout_node.chronicle import EngineNow
from rollout_node.freshness import Freshness

if TYPE_CHECKING:
    from rollout_node.peer import Peer
    from rollout_node.runner import Runner


class PeerView:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def report(self, transfer: list[int] | None) -> Document:
        """The body of a REPORT. ``transfer``: bytes and microseconds of one that has just ended."""
        peer = self._peer
        said = self._progress_of_all()
        engines = [row | {"error": _cut(row["error"])} for row in said["engines"][: limits.MAX_PEER_ENGINES]]
        return said | {
            "engines": engines,
            "error": _cut(peer.error),
            "parent": peer.attachment.parent,
            "link": self._link(),
            "staged": None if peer.staged is None else list(peer.staged),
            "committed": None if (c := peer.committed) is None else list(c),
            "transfer": transfer,
            "inflow": _inflow(peer.attachment.feeding),
            "cores": peer.staging.workers,
            "http": list(peer.http.address),
        }

    def _link(self) -> Document | None:
        """How the link to the parent came about."""
        if (live := self._peer.attachment.feeding) is None:
            return None
        return {"dialled_by": "child" if live.link.dialled else "parent", "address": live.link.address}

    def ready(self) -> tuple[bool, str]:
        peer = self._peer
        if peer.draining:
            return False, "it is ending"
        if peer.staged is None:
            return False, "no version is staged"
        if (stale := self._freshness().stale(asyncio.get_running_loop().time(), peer.config.max_age_s)) is not None:
            return False, stale
        waiting = [f"{row['name']}: {row['error'] or 'no verified weights yet'}" for row in self.engines() if not row["ready"]]
        if (member := peer.member) is not None and not member.ready:
            waiting.append(
                f"engine {member.name}: {'no verified weights yet' if member.connected else 'its lead is out of reach'}"
            )
        return not waiting, "; ".join(waiting)

    def _freshness(self) -> Freshness:
        """With the hub's last sign of life in it."""
        peer = self._peer
        if (heard_at := peer.control.heard_at) is not None:
            peer.freshness.said("hub", heard_at)
        return peer.freshness

    def _hub(self) -> Document | None:
        peer = self._peer
        if peer.config.hub is None:
            return None
        heard_at = peer.control.heard_at
        return {
            "address": show_address(*peer.config.hub),
            "connected": peer.control.connected,
            "heard_s": None if heard_at is None else round(asyncio.get_running_loop().time() - heard_at, 3),
        }

    def _knowledge(self) -> Document:
        known = self._freshness()
        age_s = known.age_s(asyncio.get_running_loop().time())
        return {
            "age_s": None if age_s is None else round(age_s, 3),
            "source": known.source,
            "max_age_s": self._peer.config.max_age_s,
        }

    def engines(self) -> list[Document]:
        """As in /status and in reports."""
        return [self._engine(runner) for runner in self._peer.runners]

    def _engine(self, runner: Runner) -> Document:
        """With a barrier, an engine that missed what the others have switched to is unready, good as its weights may be."""
        peer, row = self._peer, runner.status()
        late, committed, target = None, row["committed"], peer.target
        barrier = peer.commits == "barrier" and row["ready"] and committed is not None
        if barrier and target is not None and Version.parse(committed) < target:
            late = f"version {committed} while the others are at {target}"
        return row | {"started": runner.started, "ready": row["ready"] and late is None, "error": row["error"] or late}

    def engine_now(self, runner: Runner) -> EngineNow:
        return EngineNow(self._engine(runner), runner.commits, runner.report, runner.error)

    def status(self) -> Document:
        peer = self._peer
        config, shadow, staged, parent = peer.config, peer.shadow, peer.staged, peer.attachment.parent
        return self._progress_of_all() | {
            "role": "peer",
            "run": config.token.run.hex(),
            "name": config.name,
            "node": peer.ident.hex(),
            "hub": self._hub(),
            "knowledge": self._knowledge(),
            "mirror": None if peer.mirrored is None else peer.mirrored.status(),
            "parent": None if parent is None else parent.hex(),
            "link": self._link(),
            "staged": None if staged is None else str(staged),
            "committed": None if (c := peer.committed) is None else str(c),
            "layout_id": None if shadow is None else shadow.layout.layout_id.hex(),
            "digests": {} if shadow is None or staged is None else {str(staged): f"{shadow.state_digest:016x}"},
            "children": [c.link.name for c in peer.downstream.children.values() if c.live],
            "pulling": {
                "artifacts": [artifact.hex() for artifact in peer.pulling.artifacts],
                "sources": [{"node": s.link.remote.hex(), "bytes_received": s.bytes_received} for s in peer.pulling.sources],
            },
            "pulled_by": [c.link.name for c in peer.downstream.children.values() if not c.live],
            "links": self._links(),
            "engine": next((part.status() for part in (peer.lead, peer.member) if part is not None), None),
            "socket": str(peer.socket.path.absolute()),
            "shadow": str(config.shadow),
            "failures": peer.tasks.status(),
            "pid": os.getpid(),
            "security": "plaintext" if peer.papers is None else "tls",
            "certificate_until": None if peer.papers is None else peer.papers.until,
        }

    def _links(self) -> list[Document]:
        attachment = self._peer.attachment
        above = [("parent", attachment.feeding), ("beside", attachment.beside)]
        above += [("source", source) for source in self._peer.pulling.sources]
        links = [(role, upstream.link) for role, upstream in above if upstream is not None]
        links += [("child", link) for link in self._peer.downstream.children]
        return [shown(link, role) for role, link in links]

    def waits(self) -> dict[str, Reached]:
        """What /wait can wait for."""
        return {"live": self._live, "staged": self._staged, "published": self._published}

    def _published(self, version: Version, fraction: float | None) -> tuple[bool, Document]:
        """As far as the hub has told, or the version came in by itself."""
        peer = self._peer
        newest = max((*peer.wayfinding.states(), *([] if peer.staged is None else [peer.staged])), default=None)
        return newest is not None and newest >= version, {"newest": None if newest is None else str(newest)}

    def _staged(self, version: Version, fraction: float | None) -> tuple[bool, Document]:
        staged = self._peer.staged
        return staged is not None and staged >= version, {"staged": None if staged is None else str(staged)}

    def _live(self, version: Version, fraction: float | None) -> tuple[bool, Document]:
        engines = {row["name"]: row for row in self.engines()}
        if (member := self._peer.member) is not None:
            serves = None if member.serves is None else str(member.serves)
            engines[member.name] = {"ready": member.ready, "committed": serves}
        share = sum(
            row["ready"] and row["committed"] is not None and Version.parse(row["committed"]) >= version
            for row in engines.values()
        )
        shown = {name: row["committed"] for name, row in engines.items()}
        return share > 0 and share >= (1.0 if fraction is None else fraction) * len(engines) - 1e-9, {"engines": shown}

    def families(self) -> Iterable[Metric]:
        peer = self._peer
        yield from metrics.node_families(peer.node)
        yield from metrics.daemon_families(peer.events, peer.config.state, peer.config.shadow)
        yield from metrics.task_families(peer.tasks)
        yield from peer.chronicle.families()
        if peer.mirrored is not None:
            yield from peer.mirrored.families()
        yield metrics.gauge("p2pcast_peer_hub_connected", "Whether the hub is in reach", float(peer.control.connected))
        if (age_s := self._freshness().age_s(asyncio.get_running_loop().time())) is not None:
            yield metrics.gauge("p2pcast_peer_knowledge_age_seconds", "Age of the last news of the newest version", age_s)
        yield metrics.counter(
            "p2pcast_peer_withheld_versions",
            "Versions that the hub had sealed and the parent did not send",
            peer.lacking.withheld,
        )
        yield metrics.gauge("p2pcast_peer_sources", "Nodes that this peer pulls from", len(peer.pulling.sources))
        yield metrics.counter("p2pcast_peer_pulled_bytes", "Piece bytes that were pulled", peer.pulling.bytes_received)
        if peer.papers is not None and peer.papers.until is not None:
            yield metrics.gauge(
                "p2pcast_peer_certificate_end_timestamp_seconds",
                "When the certificate ends, unless it is renewed",
                peer.papers.until,
            )
        for name, text, version in (
            ("staged", "Step of the version staged", peer.staged),
            ("committed", "Step of the version that all engines use", peer.committed),
        ):
            yield metrics.labelled(f"p2pcast_peer_{name}_step", text, [], [] if version is None else [([], version.step)])
        engines = self.engines()
        yield metrics.labelled(
            "p2pcast_peer_engine_ready", "Whether an engine holds verified weights", ["engine"],
            (([e["name"]], float(e["ready"])) for e in engines),
        )  # fmt: skip
        yield metrics.labelled(
            "p2pcast_peer_last_commit_pause_seconds", "Pause of an engine's last commit", ["engine"],
            (([e["name"]], e["pause_s"]) for e in engines if e["pause_s"] is not None),
        )  # fmt: skip
        known = sorted({*peer.wayfinding.states(), *([] if peer.staged is None else [peer.staged])})
        yield metrics.labelled(
            "p2pcast_peer_lag_versions", "Versions published since the one that an engine uses", ["engine"],
            (([e["name"]], metrics.lag(e["committed"] and Version.parse(e["committed"]), known)) for e in engines),
        )  # fmt: skip

    def _progress_of_all(self) -> Document:
        peer = self._peer
        return {
            "epoch": list(peer.attachment.settled),
            "state": "draining" if peer.draining else peer.busy,
            "progress": self._progress(),
            "bytes_received": peer.node.bytes_received,
            "bytes_duplicate": peer.node.bytes_duplicate,
            "engines": self.engines(),
            "error": peer.error,
        }

    def _progress(self) -> Document | None:
        live = [h for h in self._peer.node.holdings.values() if h.completed_at is None and not h.excerpt]
        if not live:
            return None
        newest = max(live, key=lambda h: h.open.version)
        return {"version": str(newest.open.version), "pieces": newest.artifact.held.count, "of": newest.assembly.pieces}


def _cut(error: str | None) -> str | None:
    """As far as a report carries it."""
    return None if error is None else error[: limits.MAX_REPORTED_ERROR]


def _inflow(live: Upstream | None) -> list[int] | None:
    """[bytes, microseconds, bytes behind the parent], while something comes."""
    inflow = None if live is None else live.inflow
    return None if inflow is None else [inflow.got_bytes, int(inflow.span_s * 1e6), inflow.behind_bytes]
