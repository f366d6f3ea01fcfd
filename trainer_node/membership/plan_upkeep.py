"""Changes the plan where reports show that it is due, and sends it: a peer has moved, falls behind, or withholds."""

from __future__ import annotations

import logging
import time

from p2pcast.relay.child_lag import Inflow
from p2pcast.wire import messages
from trainer_node.membership.broadcast_planner import BroadcastPlanner
from trainer_node.membership.membership import Membership
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.plan_distributor import PlanDistributor

logger = logging.getLogger("p2pcast.hub")


class PlanUpkeep:
    """``ident``: the hub's node."""

    def __init__(
        self, ident: bytes, membership: Membership, plans: PlanDistributor, broadcasts: BroadcastPlanner
    ) -> None:
        self._ident = ident
        self._membership = membership
        self._plans = plans
        self._broadcasts = broadcasts

    def settle(self) -> None:
        """Every second, and after each change: judge withholding peers, and change the plan where it is due."""
        now = time.monotonic()
        self._plans.judge_withholding(now)
        if self._broadcasts.update(now):
            self._plans.send_plans()

    def send_plans(self) -> None:
        self._plans.send_plans()

    def probe(self, ident: str) -> None:
        """Learn which addresses of a peer answer."""
        self._plans.prober.probe(ident)

    def note_parent(self, peer: PeerRecord, body: messages.Report) -> None:
        parent = body.parent
        if parent is None:
            return
        above = "" if parent == self._ident else parent.hex()
        if above:
            self._plans.note_link(peer, above)
        if self._membership.note_parent(peer.ident, above, body.epoch or (0, 0)):
            self._plans.send_plans()

    def note_inflow(self, peer: PeerRecord, body: messages.Report, now: float) -> None:
        """The peer's rate during a broadcast."""
        if (row := body.inflow) is None:
            return
        if self._broadcasts.slowed(peer.ident, now, Inflow(row[0], row[1] / 1e6, row[2])):
            logger.info("%s falls behind: the plan is changed around it", peer.name)
            self._plans.send_plans()
