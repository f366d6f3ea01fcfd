"""Measures how long each version takes in the fleet, from peers' reports, for events and metrics.

All times are by the hub's own clock, from the start of a version's publishing to the report that it is staged or live.
No two machines' clocks are compared. Peers and engines that joined after the start are not measured for that version,
since they had to catch up.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import Metric

from p2pcast.ground import limits
from p2pcast.ground.version import Version
from p2pcast.page.gone_peers import GonePeers
from p2pcast.process.events import Events
from topology.plan_tree import Epoch
from trainer_node import hub_metrics
from trainer_node.membership.engine_reports import EngineRow
from trainer_node.membership.peer_record import PeerRecord

KEPT = 256
"""Number of versions whose start is remembered."""


@dataclass(slots=True)
class _Seen:
    """A peer as of its last report."""

    staged: Version | None
    trouble: tuple[Any, str | None] = ([], None)
    engines: dict[str, EngineRow] = field(default_factory=dict)
    live: dict[str, Version] = field(default_factory=dict)
    """Engine → the newest version that it was measured with."""
    named: set[str] = field(default_factory=set)
    """Engines with rows in the histogram; limited in number, in case a peer invents names."""


class FleetTimeline:
    """``now`` is the hub's monotonic clock in seconds, as in ``PeerRecord.joined_at``."""

    def __init__(self, events: Events) -> None:
        self.gone = GonePeers()
        self._events = events
        self._epoch: Epoch = (0, 0)
        self._began: dict[Version, float] = {}
        self._peers: dict[str, _Seen] = {}
        self._staged = hub_metrics.PUBLISH_TO_STAGED()
        self._live = hub_metrics.PUBLISH_TO_LIVE()

    def families(self) -> Iterable[Metric]:
        return self._staged.family(), self._live.family()

    def began(self, version: Version, now: float) -> None:
        """Note that publishing of ``version`` starts. Only the first call for a version counts."""
        self._began.setdefault(version, now)
        if len(self._began) > KEPT:
            del self._began[next(iter(self._began))]

    def joined(self, peer: PeerRecord) -> None:
        self._peers[peer.ident] = _Seen(peer.staged)
        self.gone.joined(peer.name, peer.ident)
        self._events.emit("joined", peer=peer.name, node=peer.ident, region=peer.region, staged=_text(peer.staged))

    def left(self, peer: PeerRecord, why: str) -> None:
        """Note that a peer has left. ``why`` is empty after a LEAVE."""
        self._peers.pop(peer.ident, None)
        last = {"region": peer.region, "staged": _text(peer.staged), "committed": _text(peer.committed)}
        self.gone.left(peer.name, peer.ident, why, time.time(), last)
        self._staged.forget(peer.name)
        self._live.forget(peer.name)
        self._events.emit("left", peer=peer.name, node=peer.ident, lost=bool(why), why=why or None)

    def plan_changed(self, epoch: Epoch, moved: list[list[str]]) -> None:
        """Emit an event for each new epoch. ``moved``: [peer, parent], by name."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._events.emit("plan", epoch=list(epoch), moved=moved)

    def reported(self, peer: PeerRecord, now: float) -> None:
        """Handle a report from which ``peer`` has been updated."""
        seen = self._peers[peer.ident]
        if peer.staged != seen.staged:
            seen.staged = peer.staged
            if peer.staged is not None:
                after_s = self._after(peer, peer.staged, now)
                if after_s is not None:
                    self._staged.observe(after_s, peer.name)
                self._events.emit("staged", peer=peer.name, version=str(peer.staged), after_s=after_s)
        trouble = list(peer.report.unready or ()), peer.report.error
        if trouble != seen.trouble:
            seen.trouble = trouble
            self._events.emit("trouble", peer=peer.name, engine=None, why=trouble[1], unready=trouble[0])
        was, seen.engines = seen.engines, {row.name: row for row in peer.engines}
        seen.live = {name: version for name, version in seen.live.items() if name in seen.engines}
        for row in peer.engines:
            self._engine(peer, seen, was.get(row.name), row, now)

    def _engine(self, peer: PeerRecord, seen: _Seen, was: EngineRow | None, row: EngineRow, now: float) -> None:
        served, before = (
            (row.committed if row.ready else None),
            (was.committed if was is not None and was.ready else None),
        )
        if served is not None and served != before:
            after_s = self._after(peer, served, now)
            if row.name in seen.live and served <= seen.live[row.name]:
                after_s = None  # the engine had lost this version: the time says nothing about the broadcast
            if after_s is not None:
                if row.name in seen.named or len(seen.named) < limits.MAX_PEER_ENGINES:
                    seen.named.add(row.name)
                    self._live.observe(after_s, peer.name, row.name)
                seen.live[row.name] = served
            self._events.emit(
                "committed", peer=peer.name, engine=row.name, version=str(served), pause_s=row.pause_s,
                recomputed_tokens=row.recomputed_tokens, after_s=after_s,
            )  # fmt: skip
        if row.error != (None if was is None else was.error):
            self._events.emit("trouble", peer=peer.name, engine=row.name, why=row.error, unready=[])
        if was is not None and was.ready and not row.ready:
            self._events.emit("unready", peer=peer.name, engine=row.name, version=_text(row.committed), why=row.error)

    def _after(self, peer: PeerRecord, version: Version, now: float) -> float | None:
        began = self._began.get(version)
        return None if began is None or peer.joined_at > began else round(now - began, 6)


def _text(version: Version | None) -> str | None:
    return None if version is None else str(version)
