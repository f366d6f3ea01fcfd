"""Applies the hub's CATALOG to this peer's holdings: artifacts that the hub has dropped, sealed or stored.

Guarantee: an artifact that is complete here and confirmed by the hub is not dropped because a catalog says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from p2pcast.ground.version import Version
from p2pcast.relay.holding import ArtifactHolder, Holding
from p2pcast.wire import messages
from rollout_node.control.artifact_catalog import ArtifactCatalog
from rollout_node.control.hub_session import HubSession
from rollout_node.sync.downloader import Downloader
from rollout_node.sync.parent_failover import ParentFailover


class UpdatedNode(ArtifactHolder, Protocol):
    def confirm(self, holding: Holding, signed: bytes) -> None:
        """Accept the hub's durable record. Raises IntegrityError."""

    def abort(self, holding: Holding) -> None:
        """Abort a holding whose artifact will never be sealed."""


@dataclass(eq=False, repr=False)
class CatalogUpdater:
    """``on_whole`` is called after the first CATALOG on a connection. ``on_identities`` receives the hashes by which
    the run identifies its versions.
    """

    catalog: ArtifactCatalog
    node: UpdatedNode
    parent_failover: ParentFailover
    downloader: Downloader
    hub: HubSession
    on_whole: Callable[[], None]
    on_identities: Callable[[Mapping[Version, bytes]], None]
    replan: Callable[[], None]

    def apply(self, body: messages.Catalog, now: float) -> None:
        whole = self.catalog.update(body, now)
        dropped = body.dropped
        if whole:
            self.on_whole()
            dropped = self._unlisted()
        for artifact in dropped:
            self._drop(artifact)
        if not whole and (live := self.parent_failover.live) is not None:
            for listed in body.artifacts:
                if not listed.sealed:
                    live.expect(listed.artifact)
        for listed in body.artifacts:
            holding = self.node.holdings.get(listed.artifact)
            if listed.durable and holding is not None and holding.assembly.sealed:
                self.node.confirm(holding, listed.durable)
        self.on_identities(self.catalog.identities())
        self.replan()

    def _unlisted(self) -> list[bytes]:
        """Return the artifacts that the hub no longer knows: after a crash it forgets what it had not sealed. An
        artifact opened since this peer joined the hub is not returned, because it may be newer than the hub's list.
        """
        unlisted = [h for h in self.node.holdings.values() if self.catalog.get(h.id) is None]
        return [h.id for h in unlisted if h.idle or h.opened_at < self.hub.joined_at]

    def _drop(self, artifact: bytes) -> None:
        self.downloader.drop(artifact)
        holding = self.node.holdings.get(artifact)
        if holding is not None and not holding.irrevocable:
            self.node.abort(holding)
