"""Handles REPORT: a peer's versions, engines, artifacts, parent and rate.

Guarantee: if a report changes the plan, the plan is sent before the next message is handled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from p2pcast.ground.observers import Observers
from p2pcast.wire import messages
from topology.pull_sources import PullSources
from trainer_node.membership.engine_reports import engine_rows
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.peer_session import PeerSession
from trainer_node.membership.plan_upkeep import PlanUpkeep

logger = logging.getLogger("p2pcast.hub")


class VersionProofs(Protocol):
    """Takes a peer's proofs of versions; see ``trainer_node.restart_recovery``."""

    def learn(self, peer: str, name: str, durable: Sequence[bytes], opened: Sequence[bytes]) -> None: ...


class ArtifactDirectory(Protocol):
    """Which peers hold which artifacts; see ``trainer_node.membership.plan_distributor``."""

    @property
    def sources(self) -> PullSources: ...
    @property
    def knows(self) -> Callable[[bytes], bool]:
        """Whether the hub has an artifact."""


class ArtifactReports:
    """Handles the artifacts in a report: those the peer holds, those it is missing, and wrong objects on the mirror.

    ``is_sealed``: whether an artifact is in the hub's store. ``mirror_is_wrong`` is called with the names of wrong
    objects on the mirror.
    """

    def __init__(
        self,
        membership: Membership,
        directory: ArtifactDirectory,
        *,
        is_sealed: Callable[[bytes], bool],
        mirror_is_wrong: Callable[[Sequence[str]], None],
    ) -> None:
        self._membership = membership
        self._directory = directory
        self._is_sealed = is_sealed
        self._mirror_is_wrong = mirror_is_wrong

    def note(self, peer: PeerRecord, body: messages.Report, now: float) -> None:
        held = [artifact for artifact in (body.held or ()) if self._directory.knows(artifact)]
        peer.holds_more = peer.holds_more or len(held) < len(body.held or ())
        self._directory.sources.holds(peer.ident, held, body.dropped or ())
        if body.lacking is not None:
            sealed = [(artifact, parent) for artifact, parent in body.lacking if self._is_sealed(artifact)]
            rows = [(artifact, None if parent is None else parent.hex()) for artifact, parent in sealed]
            self._membership.note_lacking(peer.ident, rows, now)
        if body.spoilt is not None:
            self._mirror_is_wrong(body.spoilt)


class ReportHandler:
    """``reported``: called with each peer that has reported, and the time. ``learn_evictions`` is called with signed
    statements that this hub may have lost.
    """

    def __init__(
        self,
        membership: Membership,
        upkeep: PlanUpkeep,
        artifacts: ArtifactReports,
        proofs: VersionProofs,
        reported: Observers[[PeerRecord, float]],
        learn_evictions: Callable[[Sequence[bytes]], None],
    ) -> None:
        self.invalid_reports = 0
        """Number of reports with invalid values, which were ignored."""
        self._membership = membership
        self._upkeep = upkeep
        self._artifacts = artifacts
        self._proofs = proofs
        self._reported = reported
        self._learn_evictions = learn_evictions

    def on_invalid_values(self, session: PeerSession, keys: tuple[str, ...], *, first: bool) -> None:
        self.invalid_reports += 1
        if first and session.peer is not None:
            logger.warning(
                "%s: its reports have invalid values, which are ignored: %s", session.peer.name, ", ".join(keys)
            )

    def on_report(self, session: PeerSession, body: messages.Report) -> None:
        peer = session.peer
        assert peer is not None
        now = time.monotonic()
        before = peer.staged
        self._proofs.learn(peer.ident, peer.name, body.durable or (), body.opened or ())
        self._update(peer, body, now)
        if body.evicted is not None:
            self._learn_evictions(body.evicted)
        self._artifacts.note(peer, body, now)
        if body.garbled is not None:
            self._upkeep.note_garbled(peer, body.garbled, now)
        self._upkeep.note_parent(peer, body)
        self._upkeep.note_inflow(peer, body, now)
        if peer.staged != before:
            self._upkeep.settle()

    def _update(self, peer: PeerRecord, body: messages.Report, now: float) -> None:
        """Update the peer's versions, engines and last transfer."""
        peer.staged = body.staged
        peer.committed = body.committed
        peer.report = body
        peer.engines = engine_rows(body.engines or ())
        self._reported.notify(peer, now)
        if (transfer := body.transfer) is not None:
            size, micros = transfer
            self._membership.note_transfer(peer.ident, now, size, micros / 1e6)
        self._membership.note_report(peer.ident, now)
