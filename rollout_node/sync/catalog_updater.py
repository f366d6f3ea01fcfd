"""Applies the hub's CATALOG to what this peer holds: artifacts that the hub dropped, sealed or stored.

Promise: an artifact that is complete here, and that the hub has confirmed, is not dropped by the hub's word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from p2pcast.ground.version import Version
from p2pcast.relay.holding import ArtifactHolder, Holding
from p2pcast.wire import messages
from rollout_node.control.artifact_catalog import Catalog
from rollout_node.control.hub_session import HubSession
from rollout_node.sync.downloader import Downloader
from rollout_node.sync.parent_failover import ParentFailover


class UpdatedNode(ArtifactHolder, Protocol):
    def confirm(self, holding: Holding, signed: bytes) -> None:
        """Take the hub's durable record. Raises IntegrityError."""

    def abort(self, holding: Holding) -> None:
        """The artifact will never be sealed."""


class CatalogUpdater:
    """``on_whole`` is called after the first CATALOG on a connection;
    ``on_identities`` gets the hashes by which the run knows its versions.
    """

    def __init__(
        self,
        catalog: Catalog,
        node: UpdatedNode,
        parent_failover: ParentFailover,
        downloader: Downloader,
        hub: HubSession,
        on_whole: Callable[[], None],
        on_identities: Callable[[Mapping[Version, bytes]], None],
        replan: Callable[[], None],
    ) -> None:
        self._catalog = catalog
        self._node = node
        self._parent_failover = parent_failover
        self._downloader = downloader
        self._hub = hub
        self._on_whole = on_whole
        self._on_identities = on_identities
        self._replan = replan

    def apply(self, body: messages.Catalog, now: float) -> None:
        whole = self._catalog.update(body, now)
        dropped = body.dropped
        if whole:
            self._on_whole()
            dropped = self._unlisted()
        for artifact in dropped:
            self._drop(artifact)
        if not whole and (live := self._parent_failover.live) is not None:
            for listed in body.artifacts:
                if not listed.sealed:
                    live.expect(listed.artifact)
        for listed in body.artifacts:
            holding = self._node.holdings.get(listed.artifact)
            if listed.durable and holding is not None and holding.assembly.sealed:
                self._node.confirm(holding, listed.durable)
        self._on_identities(self._catalog.identities())
        self._replan()

    def _unlisted(self) -> list[bytes]:
        """A hub that died forgets what it had not sealed. An artifact that opened since the hub was joined may be newer
        than the hub's list.
        """
        unlisted = [h for h in self._node.holdings.values() if self._catalog.get(h.id) is None]
        return [h.id for h in unlisted if h.idle or h.opened_at < self._hub.joined_at]

    def _drop(self, artifact: bytes) -> None:
        self._downloader.drop(artifact)
        holding = self._node.holdings.get(artifact)
        if holding is not None and not holding.irrevocable:
            self._node.abort(holding)
