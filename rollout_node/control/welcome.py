"""The hub's WELCOME: this peer's name at the hub, and whether the token pins this hub.

Guarantee: a hub whose key the token does not pin is refused.
"""

from __future__ import annotations

import asyncio
import logging

from p2pcast.artifact.signed_records import run_id
from p2pcast.ground.errors import RefusedError
from p2pcast.trust.evictions import Evictions
from p2pcast.wire import messages
from rollout_node.control.artifact_catalog import ArtifactCatalog
from rollout_node.control.bearer_file import BearerFile
from rollout_node.control.hub_orders import HubOrders
from rollout_node.timeline import Timeline

logger = logging.getLogger("p2pcast.peer")


class HubWelcome:
    """``run``: the run's id, as pinned by the token. ``name``: the name that the peer asked for."""

    def __init__(
        self,
        run: bytes,
        name: str,
        bearer: BearerFile,
        orders: HubOrders,
        catalog: ArtifactCatalog,
        evictions: Evictions,
        timeline: Timeline,
    ) -> None:
        self.hub_key = b""
        """The run's key, as sent by the hub."""
        self._run = run
        self._name = name
        self._bearer = bearer
        self._orders = orders
        self._catalog = catalog
        self._evictions = evictions
        self._timeline = timeline
        self._first: asyncio.Future[messages.Welcome] | None = None

    def expect(self) -> asyncio.Future[messages.Welcome]:
        """Return a future for the next WELCOME or the hub's refusal, for a peer that has not joined yet."""
        self._first = asyncio.get_running_loop().create_future()
        return self._first

    def stop_expecting(self) -> None:
        self._first = None

    def accept(self, body: messages.Welcome) -> None:
        """Handle a WELCOME. Raises RefusedError for a different run's hub, unless a caller of ``expect`` checks it."""
        self._bearer.replace(self._bearer.token if body.bearer is None else body.bearer)
        self.hub_key = body.key
        self._evictions.connected()
        self._warn_of_other_name(self._name if body.name is None else body.name)
        self._catalog.begin()
        self._orders.welcome(body.commit, body.target)
        if self._first is not None and not self._first.done():
            self._first.set_result(body)
        else:
            self.check_key(body.key)
            self._timeline.hub(reachable=True)
        self._orders.target_observers.notify()

    def check_key(self, key: bytes) -> None:
        """Raises RefusedError if the key is not this run's."""
        if run_id(key) != self._run:
            raise RefusedError("the hub's key is not this run's: the token pins another")

    def refuse(self, error: RefusedError) -> None:
        """Called when the hub has refused this peer."""
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)

    def _warn_of_other_name(self, name: str) -> None:
        if name != self._name:
            logger.warning(
                "another node of the run has the name %s: the hub calls this peer %s. Choose another --name, or evict"
                " the other node if that node is gone",
                self._name,
                name,
            )
