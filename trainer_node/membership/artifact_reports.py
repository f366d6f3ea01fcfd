"""The part of a report that names artifacts: held and lacking ones, corrupt pieces, and wrong objects on the mirror."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from p2pcast.wire import messages
from topology.pull_sources import Sources
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_record import PeerRecord


class ArtifactDirectory(Protocol):
    """Which peers hold which artifacts; see ``trainer_node.membership.plan_distributor``."""

    @property
    def sources(self) -> Sources: ...
    @property
    def knows(self) -> Callable[[bytes], bool]:
        """Whether the hub has an artifact."""

    def note_garbled(self, witness: PeerRecord, rows: Iterable[tuple[bytes, int]], now: float) -> None: ...


class ArtifactReports:
    """``is_sealed``: whether an artifact is in the hub's store. ``mirror_is_wrong`` takes the names of wrong objects on
    the mirror.
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
        if body.garbled is not None:
            self._directory.note_garbled(peer, body.garbled, now)
        if body.lacking is not None:
            sealed = [(artifact, parent) for artifact, parent in body.lacking if self._is_sealed(artifact)]
            rows = [(artifact, None if parent is None else parent.hex()) for artifact, parent in sealed]
            self._membership.note_lacking(peer.ident, rows, now)
        if body.spoilt is not None:
            self._mirror_is_wrong(body.spoilt)
