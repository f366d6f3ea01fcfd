"""How the hub shows its peers in /status, /wait and metrics. Read-only."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from prometheus_client.core import Metric

from p2pcast.daemon.http_server import Document
from p2pcast.ground.addresses import ANYWHERE, show_address
from p2pcast.ground.version import Version
from p2pcast.process.metric_kinds import lag
from topology.score import Score
from trainer_node import hub_metrics
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_record import PeerRecord

DEFAULT_FRACTION = 0.9
"""Share of peers or engines that /wait waits for, unless the request gives a different one."""
REPORTED = ("state", "progress", "bytes_received", "bytes_duplicate", "unready", "error")
"""Keys of a report that are shown unchanged."""


@dataclass(eq=False, repr=False)
class FleetView:
    """``versions``: those in the hub's store. ``certificate_until``: when a node's certificate expires, in Unix time.
    ``clock``: the clock of ``PeerRecord.joined_at``.
    """

    membership: Membership
    versions: Callable[[], Collection[Version]]
    certificate_until: Callable[[str], float | None] = lambda ident: None
    clock: Callable[[], float] = time.monotonic

    # -- /status

    @property
    def names(self) -> dict[str, str]:
        return {p.ident: p.name for p in self.membership.peers.values()}

    def rows(self) -> list[Document]:
        """One row per peer, sorted by name."""
        names, now = self.names, self.clock()
        rows = [self._row(peer, names, now) for peer in self.membership.peers.values()]
        return sorted(rows, key=lambda row: str(row["name"]))

    def serving(self) -> dict[str, Document]:
        """Each node with engines: its region, staged version, and each engine's version (None if it is not serving)."""
        return {
            peer.ident: {
                "region": peer.region,
                "staged": None if peer.staged is None else str(peer.staged),
                "engines": _texts({row.name: row.committed if row.ready else None for row in peer.engines}),
            }
            for peer in self.membership.peers.values()
            if peer.engines
        }

    def chains(self) -> list[list[str]]:
        names = self.names
        return [[names.get(ident, ident) for ident in chain] for chain in self.membership.plan.chains]

    def _row(self, peer: PeerRecord, names: dict[str, str], now: float) -> Document:
        members = self.membership
        score, rate = members.score(peer.ident, now), members.rate(peer.ident)
        parent = members.plan.parent.get(peer.ident, "")
        return {
            "name": peer.name,
            "node": peer.ident,
            "address": show_address(peer.host, peer.port),
            "addresses": [
                {"address": show_address(*address), "answers": answers}
                for address, answers in members.reach.answers(peer.ident)
            ],
            "reachable": not members.reach.shut(peer.ident),
            "link": peer.report.link,
            "http": _http_of(peer),
            "region": peer.region,
            "certificate_until": self.certificate_until(peer.ident),
            "parent": names.get(parent, "hub") if parent else "hub",
            "staged": None if peer.staged is None else str(peer.staged),
            "committed": None if peer.committed is None else str(peer.committed),
            "score": None if score is None else round(score.total, 1),
            "score_parts": None if score is None else {part: round(value, 3) for part, value in _parts(score)},
            "standing": members.standing(peer.ident).name.lower(),
            "bps": None if rate.bps is None else round(rate.bps),
            "bps_exact": rate.exact,
            "detached": peer.ident in members.detached,
            "blamed_by": members.blame.witnesses(peer.ident),
            "quarantined": members.blame.quarantined(peer.ident) or members.withholding.quarantined(peer.ident),
            "withheld_from": members.withholding.witnesses(peer.ident),
            "engines": [row.shown for row in peer.engines],
            **{key: getattr(peer.report, key) for key in REPORTED},
        }

    # -- /wait

    def staged(self, version: Version, fraction: float | None) -> tuple[bool, Document]:
        """Whether enough peers have staged ``version`` or a newer one, and what each peer has staged."""
        peers = {p.name: p.staged for p in self.membership.peers.values()}
        reached = sum(v is not None and v >= version for v in peers.values())
        return _enough(reached, len(peers), fraction), {"peers": _texts(peers)}

    def live(self, version: Version, fraction: float | None) -> tuple[bool, Document]:
        """Whether enough engines serve ``version`` or a newer one, and what each engine has committed."""
        rows = {f"{p.name}/{r.name}": r for p in self.membership.peers.values() for r in p.engines}
        reached = sum(r.is_live(version) for r in rows.values())
        return _enough(reached, len(rows), fraction), {"engines": _texts({n: r.committed for n, r in rows.items()})}

    # -- metrics

    def families(self) -> Iterable[Metric]:
        members, now = self.membership, self.clock()
        yield hub_metrics.CHAINS(len(members.plan.chains))
        yield hub_metrics.BLAMED_PEERS(len(members.blame.demoted(now) & members.peers.keys()))
        yield hub_metrics.WITHHOLDING_PEERS(len(members.withholding.demoted(now) & members.peers.keys()))
        yield hub_metrics.DETACHED_PEERS(len(members.detached))
        yield hub_metrics.UPLINK(members.uplink_bps)

    def peer_families(self) -> Iterable[Metric]:
        members, now = self.membership, self.clock()
        peers = list(members.peers.values())
        scores = [(p.name, s) for p in peers if (s := members.score(p.ident, now)) is not None]
        yield hub_metrics.PEER_SCORE(([n], s.total) for n, s in scores)
        yield hub_metrics.PEER_SCORE_PART(([n, part], value) for n, s in scores for part, value in _parts(s))
        yield hub_metrics.PEER_STANDING(([p.name], float(members.standing(p.ident))) for p in peers)
        yield hub_metrics.PEER_RATE(([p.name], members.rate(p.ident).bps or 0.0) for p in peers)
        versions = sorted(self.versions())
        rows = [(p.name, r) for p in peers for r in p.engines]
        yield hub_metrics.ENGINE_LAG(([n, r.name], lag(r.committed, versions)) for n, r in rows)
        yield hub_metrics.ENGINE_READY(([n, r.name], float(r.ready)) for n, r in rows)


def _enough(reached: int, of: int, fraction: float | None) -> bool:
    """Whether ``reached`` is enough; never for zero."""
    needed = (DEFAULT_FRACTION if fraction is None else fraction) * of
    return reached > 0 and reached >= needed - 1e-9


def _texts(versions: dict[str, Version | None]) -> dict[str, str | None]:
    return {name: None if version is None else str(version) for name, version in sorted(versions.items())}


def _parts(score: Score) -> list[tuple[str, float]]:
    return [("speed", score.speed), ("success", score.success), ("stability", score.stability), ("decay", score.decay)]


def _http_of(peer: PeerRecord) -> str | None:
    """The peer's HTTP address as it reports it; often on its own loopback interface."""
    if (reported := peer.report.http) is None:
        return None
    host, port = reported
    return show_address(peer.host if host in ANYWHERE else host, port)
