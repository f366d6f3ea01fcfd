"""How a hub shows itself: /status, /readyz and metrics. Reads, changes nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from p2pcast import metrics
from p2pcast.addresses import ANYWHERE, show_address
from p2pcast.http import Document, Reached
from p2pcast.transport.shown import shown
from p2pcast.version import Version
from topology.score import Score
from trainer_node.commits import OUTCOMES
from trainer_node.peer import Peer

if TYPE_CHECKING:
    from trainer_node.hub import Hub

DEFAULT_FRACTION = 0.9
"""Of peers or engines, for /wait."""


class HubView:
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def ready(self) -> tuple[bool, str]:
        return (True, "") if self._hub.publishing.head is not None else (False, "no version has been published yet")

    def status(self) -> Document:
        hub = self._hub
        head, plan, now = hub.publishing.head, hub.membership.plan, time.monotonic()
        done = hub.outgoing.published
        names = {p.ident: p.name for p in hub.membership.peers.values()}
        peers = [self._peer_status(p, names, now) for p in hub.membership.peers.values()]
        return {
            "role": "hub",
            "run": hub.token.run.hex(),
            "security": "plaintext" if hub.config.plaintext else "tls",
            "evicted": sorted(node.hex() for node in hub.admission.evicted),
            "version": None if head is None else str(head),
            "commit": hub.commits.mode,
            "target": None if hub.commits.target is None else str(hub.commits.target),
            "barrier": hub.commits.status(),
            "epoch": list(plan.epoch),
            "uplink": {
                "bps": round(hub.membership.uplink_bps),
                "from": "stated" if hub.config.uplink_bps is not None else "measured" if hub.uplink.windows else "assumed",
                "measured_bps": None if hub.uplink.bps is None else round(hub.uplink.bps),
                "windows": hub.uplink.windows,
            },
            "planned_bytes": hub.membership.sizes.bytes,
            "chains": [[names.get(i, i) for i in chain] for chain in plan.chains],
            "layout_id": None if hub.publishing.shadow is None else hub.publishing.shadow.layout.layout_id.hex(),
            "digests": {str(s.version): f"{s.manifest.state:016x}" for s in hub.store.artifacts.values()},
            "artifacts": [
                {
                    "version": str(s.version),
                    "base": None if s.base is None else str(s.base),
                    "kind": s.kind,
                    "bytes": s.manifest.log,
                }
                for s in sorted(hub.store.artifacts.values(), key=lambda s: (s.version, s.kind))
            ],
            "last": None
            if done is None
            else {
                "version": str(done.version),
                "kind": done.kind,
                "bytes": done.bytes,
                "dense_bytes": done.dense_bytes,
                "changed": done.changed,
                "params": done.params,
                "encode_s": round(done.encode_s, 4),
                "codec": None if done.choice is None else done.choice.codec,
                "codec_why": None if done.choice is None else done.choice.why,
                "time_to_last_s": None if hub.broadcast.time_to_last_s is None else round(hub.broadcast.time_to_last_s, 4),
            },
            "skipped": hub.outgoing.skipped,
            "keeping": hub.keeping.busy,
            "ranks": hub.intake.present,
            "mirror": None if hub.mirroring is None else hub.mirroring.status(),
            "waiting_for": sorted(hub.pace.waiting_for),
            "not_waited_for": dict(sorted(hub.pace.not_waited_for.items())),
            "failures": hub.tasks.status(),
            "pid": os.getpid(),
            "links": [shown(link, "child") for link in hub.downstream.children],
            "peers": sorted(peers, key=lambda p: str(p["name"])),
        }

    def _peer_status(self, peer: Peer, names: dict[str, str], now: float) -> Document:
        hub = self._hub
        rated = hub.membership.score(peer.ident, now)
        rate = hub.membership.rate(peer.ident)
        parent = hub.membership.plan.parent.get(peer.ident, "")
        shown = {k: peer.report.get(k) for k in ("state", "progress", "bytes_received", "bytes_duplicate", "error")}
        return {
            "name": peer.name,
            "node": peer.ident,
            "address": show_address(peer.host, peer.port),
            "addresses": [
                {"address": show_address(*address), "answers": answers}
                for address, answers in hub.membership.reach.answers(peer.ident)
            ],
            "reachable": not hub.membership.reach.shut(peer.ident),
            "link": peer.report.get("link"),
            "http": _http_of(peer),
            "region": peer.region,
            "parent": names.get(parent, "hub") if parent else "hub",
            "staged": None if peer.staged is None else str(peer.staged),
            "committed": None if peer.committed is None else str(peer.committed),
            "score": None if rated is None else round(rated.total, 1),
            "score_parts": None if rated is None else {part: round(value, 3) for part, value in _parts(rated)},
            "standing": hub.membership.standing(peer.ident).name.lower(),
            "bps": None if rate.bps is None else round(rate.bps),
            "bps_exact": rate.exact,
            "detached": peer.ident in hub.membership.detached,
            "blamed_by": hub.membership.blame.witnesses(peer.ident),
            "quarantined": hub.membership.blame.quarantined(peer.ident) or hub.membership.withholding.quarantined(peer.ident),
            "withheld_from": hub.membership.withholding.witnesses(peer.ident),
            "engines": [row.shown for row in peer.engines],
            **shown,
        }

    def waits(self) -> dict[str, Reached]:
        """What /wait can wait for."""
        return {"live": self._live, "staged": self._staged, "published": self._published}

    def _published(self, version: Version, fraction: float | None) -> tuple[bool, Document]:
        newest = self._hub.store.newest()
        return newest is not None and newest >= version, {"newest": None if newest is None else str(newest)}

    def _staged(self, version: Version, fraction: float | None) -> tuple[bool, Document]:
        peers = {p.name: p.staged for p in self._hub.membership.peers.values()}
        share = sum(v is not None and v >= version for v in peers.values())
        return _enough(share, len(peers), fraction), {
            "peers": {n: None if v is None else str(v) for n, v in sorted(peers.items())}
        }

    def _live(self, version: Version, fraction: float | None) -> tuple[bool, Document]:
        rows = {f"{p.name}/{r.name}": r for p in self._hub.membership.peers.values() for r in p.engines}
        share = sum(r.is_live(version) for r in rows.values())
        shown = {n: None if r.committed is None else str(r.committed) for n, r in sorted(rows.items())}
        return _enough(share, len(rows), fraction), {"engines": shown}

    def families(self) -> Iterable[Metric]:
        hub = self._hub
        yield from metrics.node_families(hub.node)
        yield from metrics.daemon_families(hub.events, hub.config.state, hub.config.shadow)
        yield from metrics.task_families(hub.tasks)
        yield from hub.fleet.families()
        if hub.mirroring is not None:
            yield from hub.mirroring.families()
        yield metrics.gauge("p2pcast_hub_peers", "Peers joined", len(hub.sessions))
        yield metrics.counter(
            "p2pcast_hub_odd_reports", "Reports of which the hub ignored an invalid value", hub.hearing.odd_reports
        )
        yield metrics.gauge("p2pcast_hub_chains", "Chains in the plan", len(hub.membership.plan.chains))
        muted = hub.membership.blame.muted(time.monotonic()) & hub.membership.peers.keys()
        yield metrics.gauge("p2pcast_hub_blamed_peers", "Peers that feed nobody because they sent garbage", len(muted))
        silent = hub.membership.withholding.muted(time.monotonic()) & hub.membership.peers.keys()
        yield metrics.gauge(
            "p2pcast_hub_withholding_peers",
            "Peers that feed no other peer because they did not pass on what was sealed",
            len(silent),
        )
        yield metrics.gauge("p2pcast_hub_detached_peers", "Peers too slow to be waited for", len(hub.membership.detached))
        yield metrics.gauge("p2pcast_hub_uplink_bits_per_second", "The hub's uplink, as planned with", hub.membership.uplink_bps)
        yield metrics.gauge(
            "p2pcast_hub_skipped_folders", "Checkpoint folders that could not be published", len(hub.outgoing.skipped)
        )
        yield metrics.counter(
            "p2pcast_hub_kept_bytes", "Whole states and squashes made beside live traffic", hub.keeping.made_bytes
        )
        yield metrics.counters(
            "p2pcast_hub_barrier_outcomes", "Ends and failures of the barrier's rounds", ["outcome"],
            (([o], hub.commits.outcomes[o]) for o in OUTCOMES),
        )  # fmt: skip
        yield from self._version_families()
        yield from self._peer_families()

    def _version_families(self) -> Iterable[Metric]:
        """Of the newest version; without a sample while there is none."""
        done, last_s = self._hub.outgoing.published, self._hub.broadcast.time_to_last_s
        ratio = None if done is None else done.dense_bytes / max(1, done.bytes)
        for name, text, value in (
            ("version_step", "Step of the newest version", None if done is None else done.version.step),
            ("delta_bytes", "Size of the newest version's artifact", None if done is None else done.bytes),
            ("delta_ratio", "Dense size over the newest artifact's", ratio),
            ("encode_seconds", "Time to encode the newest version", None if done is None else done.encode_s),
            ("time_to_last_seconds", "From publishing to the last peer's staging", last_s),
        ):
            yield metrics.labelled(f"p2pcast_hub_{name}", text, [], [] if value is None else [([], value)])

    def _peer_families(self) -> Iterable[Metric]:
        hub, now = self._hub, time.monotonic()
        peers = hub.membership.peers.values()
        scores = [(p.name, s) for p in peers if (s := hub.membership.score(p.ident, now)) is not None]
        yield metrics.labelled(
            "p2pcast_hub_peer_score", "Score of a peer (ECHO-2)", ["peer"], (([n], s.total) for n, s in scores)
        )
        yield metrics.labelled(
            "p2pcast_hub_peer_score_part", "What a peer's score is made of", ["peer", "part"],
            (([n, part], value) for n, s in scores for part, value in _parts(s)),
        )  # fmt: skip
        yield metrics.labelled(
            "p2pcast_hub_peer_standing", "Standing of a peer: 0 any place, 1 heads no chain, 2 a tail, 3 feeds no other peer", ["peer"],
            (([p.name], float(hub.membership.standing(p.ident))) for p in peers),
        )  # fmt: skip
        rates = ((p.name, hub.membership.rate(p.ident)) for p in peers)
        yield metrics.labelled(
            "p2pcast_hub_peer_bits_per_second", "What a peer is known to take in and pass on, at least; 0 while nothing is known", ["peer"],
            (([n], r.bps or 0.0) for n, r in rates),
        )  # fmt: skip
        versions = sorted({s.version for s in hub.store.artifacts.values()})
        rows = [(p.name, r) for p in peers for r in p.engines]
        yield metrics.labelled(
            "p2pcast_hub_lag_versions", "Versions published since the one that an engine uses", ["peer", "engine"],
            (([n, r.name], metrics.lag(r.committed, versions)) for n, r in rows),
        )  # fmt: skip
        yield metrics.labelled(
            "p2pcast_hub_engine_ready", "Whether an engine is fit for traffic", ["peer", "engine"],
            (([n, r.name], float(r.ready)) for n, r in rows),
        )  # fmt: skip


def _enough(share: int, of: int, fraction: float | None) -> bool:
    """Never of nobody."""
    return of > 0 and share > 0 and share >= (DEFAULT_FRACTION if fraction is None else fraction) * of - 1e-9


def _parts(rated: Score) -> list[tuple[str, float]]:
    return [("speed", rated.speed), ("success", rated.success), ("stability", rated.stability), ("decay", rated.decay)]


def _http_of(peer: Peer) -> str | None:
    """Where a peer says that its HTTP side is; often on its own loopback."""
    if (said := peer.report.get("http")) is None:
        return None
    host, port = said
    return show_address(peer.host if host in ANYWHERE else host, port)
