"""What a peer does on each of the hub's messages, once the peer's parts exist."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from p2pcast.relay.downstream import Downstream
from p2pcast.wire import messages
from p2pcast.wire.dispatch import Handlers
from rollout_node.control.hub_orders import HubOrders
from rollout_node.control.saved_hub_state import SavedHubState, row
from rollout_node.engine.multi_host_leader import MultiHostLeader
from rollout_node.engine.multi_host_member import MultiHostMember
from rollout_node.sync.catalog_updater import CatalogUpdater
from rollout_node.sync.catchup_choice import CatchupChoice
from rollout_node.sync.connector import Connector
from rollout_node.sync.downloader import Downloader
from rollout_node.sync.parent_failover import ParentFailover


@dataclass(eq=False, repr=False, kw_only=True)
class HubMessages:
    """``handlers`` is for ``Dispatcher.begin``. ``replan`` wakes the tasks that follow the path of versions."""

    orders: HubOrders
    parent_failover: ParentFailover
    connector: Connector
    downstream: Downstream
    downloader: Downloader
    squashes: CatchupChoice
    catalog_updater: CatalogUpdater
    lead: MultiHostLeader | None
    member: MultiHostMember | None
    saved: SavedHubState
    replan: Callable[[], None]

    def handlers(self) -> Handlers:
        return {
            messages.Plan: self._plan,
            messages.Addresses: self.connector.learn_addresses,
            messages.Unreachable: self.connector.stop_waiting,
            messages.Called: lambda body: self.connector.dial_child(body, self.downstream),
            messages.Neighbours: lambda body: self.parent_failover.introduce(list(body.peers)),
            messages.Sources: lambda body: self.downloader.add_sources(body.artifact, list(body.peers)),
            messages.Catalog: self._catalog,
            messages.Engine: self._engine,
            messages.Squashing: self._squash,
            messages.Hold: self._hold,
            messages.Commit: self._commit,
        }

    def _plan(self, body: messages.Plan) -> None:
        parent = None if body.parent is None else (body.parent, body.host, body.port)
        self.parent_failover.order(body.epoch, parent, list(body.backups))

    def _catalog(self, body: messages.Catalog) -> None:
        self.catalog_updater.apply(body, asyncio.get_running_loop().time())

    def _engine(self, body: messages.Engine) -> None:
        if self.lead is not None:
            nodes = body.members or ()
            self.lead.set_members(nodes)
            # To start without the hub, the lead needs the members that the hub named last.
            self.saved.keep(members=[self.lead.name, [node.hex() for node in nodes]])
        elif self.member is not None:
            self.member.set_lead(body.lead)
            if body.lead is not None:
                self.saved.keep(lead=row(body.lead))

    def _squash(self, body: messages.Squashing) -> None:
        self.squashes.answered(body, asyncio.get_running_loop().time())
        self.replan()

    def _hold(self, body: messages.Hold) -> None:
        self.orders.hold_at(body.version)
        self.replan()

    def _commit(self, body: messages.Commit) -> None:
        self.orders.commit_to(body.version)
        self.replan()
