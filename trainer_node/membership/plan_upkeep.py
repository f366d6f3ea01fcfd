"""Changes and sends the plan when reports require it, because a peer has moved or falls behind.

Guarantee: a peer that sends corrupt pieces or withholds artifacts feeds no other peer. Each verdict is reported once,
however often its witness repeats the report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from p2pcast.process.events import Events
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
        self,
        ident: bytes,
        membership: Membership,
        plans: PlanDistributor,
        broadcasts: BroadcastPlanner,
        events: Events,
    ) -> None:
        self._ident = ident
        self._membership = membership
        self._plans = plans
        self._broadcasts = broadcasts
        self._events = events

    def settle(self) -> None:
        """Judge withholding peers, and change the plan if that is due. Called every second and after each change."""
        now = time.monotonic()
        self.judge_withholding(now)
        if self._broadcasts.update(now):
            self._plans.send_plans()

    def send_plans(self) -> None:
        self._plans.send_plans()

    def probe(self, ident: str) -> None:
        """Find out which of a peer's addresses answer."""
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
        """Handle the peer's rate during a broadcast."""
        if (row := body.inflow) is None:
            return
        if self._broadcasts.slowed(peer.ident, now, Inflow(row[0], row[1] / 1e6, row[2])):
            logger.info("%s falls behind: the plan is changed around it", peer.name)
            self._plans.send_plans()

    # -- garbage and withholding

    def note_garbled(self, witness: PeerRecord, rows: Iterable[tuple[bytes, int]], now: float) -> None:
        """Handle a peer's counts of corrupt pieces that each peer has sent."""
        blame = self._membership.blame
        named = [(node.hex(), pieces) for node, pieces in rows]
        demoted, given_up = blame.demoted(now), {ident for ident, _ in named if blame.quarantined(ident)}
        for ident in self._membership.note_garbled(witness.ident, named, now):
            name, quarantined = self._membership.peers[ident].name, blame.quarantined(ident)
            if ident in (given_up if quarantined else demoted):
                continue
            self._events.emit("garbled", peer=name, node=ident, witness=witness.name, quarantined=quarantined)
            logger.warning(
                "%s sent %s pieces that do not match: it feeds no other peer %s",
                name, witness.name, "any more" if quarantined else "for a while",
            )  # fmt: skip
        self._plans.send_plans()

    def judge_withholding(self, now: float) -> None:
        """Judge the reports of peers that do not have sealed artifacts."""
        anew = self._membership.judge_withholding(now)
        for ident, witness in anew:
            quarantined = self._membership.withholding.quarantined(ident)
            names = [self._membership.peers[i].name if i in self._membership.peers else i for i in (ident, witness)]
            self._events.emit("withheld", peer=names[0], node=ident, witness=names[1], quarantined=quarantined)
            logger.warning(
                "peer %s did not pass on to %s what was sealed: it feeds no other peer %s",
                names[0], names[1], "any more" if quarantined else "for a while",
            )  # fmt: skip
        if anew:
            self._plans.send_plans()
