"""Decides whether an engine may switch to a staged version."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from p2pcast.ground.version import Version
from rollout_node.control.artifact_catalog import ArtifactCatalog
from rollout_node.control.hub_orders import HubOrders
from rollout_node.control.saved_hub_state import SavedHubState
from rollout_node.installers.installer import Driver


class CommitRequests:
    """The versions that callers of ``POST /commit`` are waiting for."""

    def __init__(self) -> None:
        self._waiting: Counter[Version] = Counter()

    def requested(self, version: Version) -> bool:
        return self._waiting[version] > 0

    @contextmanager
    def waiting_for(self, version: Version) -> Iterator[None]:
        self._waiting[version] += 1
        try:
            yield
        finally:
            self._waiting[version] -= 1
            if not self._waiting[version]:
                del self._waiting[version]


class CommitPermission:
    def __init__(
        self,
        orders: HubOrders,
        catalog: ArtifactCatalog,
        saved: SavedHubState,
        driver: Driver,
        requests: CommitRequests,
    ) -> None:
        self._orders = orders
        self._catalog = catalog
        self._saved = saved
        self._driver = driver
        self._requests = requests

    def may_commit(self, version: Version) -> bool:
        if self.is_regression(version):
            return False
        if self._driver == "external":
            return self._requests.requested(version)
        return self._orders.commits == "auto" or version == self._orders.target

    def is_regression(self, version: Version) -> bool:
        """Whether ``version`` is older than one staged here before that the run may still have. No engine goes back to
        an older version merely because this peer lost a newer one.
        """
        newest = self._saved.newest
        if newest is None or version >= newest:
            return False
        return not self._catalog.listed or any(known >= newest for known in self._catalog.states())
