"""What a peer tells the hub: who it is and where it may be reached, and with each report what it has come to hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pcast import limits
from p2pcast.addresses import family_of, may_be_told
from p2pcast.transport.binding import own_hosts, told
from p2pcast.wire.messages import Body

if TYPE_CHECKING:
    from rollout_node.peer import Peer


class Telling:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._told: set[bytes] = set()
        """Artifacts that the hub knows to be held here, since it was joined at ``_told_at``."""
        self._told_at: float | None = None

    def join(self) -> Body:
        peer, config, port = self._peer, self._peer.config, self._peer.listener.address[1]
        own = [host for host in dict.fromkeys([peer.control.own_host, *own_hosts()]) if may_be_told(host)]
        ways = config.advertise or [(host, port) for host in told(config.listen, own)]
        return {
            "name": config.name,
            "region": config.region,
            "listen": list(config.advertise[0] if config.advertise else ("", port)),
            "ways": [list(way) for way in ways[: limits.MAX_WAYS]],
            "families": sorted({family for host in own if (family := family_of(host)) is not None}),
            "held": None if peer.staged is None else list(peer.staged),
        }

    def _evidence(self) -> Body:
        """Signed records of the newest versions here: what a hub that has lost them, or a part of its state, has to know before it goes on."""
        newest = sorted(self._peer.node.holdings.values(), key=lambda h: h.open.version, reverse=True)
        durable = (h.assembly.durable_signed for h in newest)
        return {
            "durable": [signed for signed in durable if signed is not None][: limits.MAX_EVIDENCE],
            "opened": [h.assembly.open_signed for h in newest[: limits.MAX_EVIDENCE]],
        }

    def report(self) -> Body:
        peer = self._peer
        transfer, peer.receiving.transfer = peer.receiving.transfer, None
        return peer.view.report(transfer) | self._news()

    def _news(self) -> Body:
        """What has come to be held here, or is no longer, since the hub was last told: all of it, where it knows nothing yet."""
        peer = self._peer
        first = self._told_at != peer.control.joined_at
        if first:
            self._told_at, self._told = peer.control.joined_at, set()
        held = {h.id for h in peer.node.holdings.values() if h.completed_at is not None}
        body: Body = {
            "held": sorted(held - self._told)[: limits.MAX_HELD],
            "dropped": sorted(self._told - held)[: limits.MAX_HELD],
            "garbled": [list(row) for row in peer.node.garbled.most_common(limits.MAX_GARBLED)],
            "evicted": peer.heeding.untold(),
            "lacking": peer.lacking.rows(),
            "spoilt": [] if peer.mirrored is None else peer.mirrored.complaints(),
            **(self._evidence() if first else {}),
        }
        self._told = (self._told | set(body["held"])) - set(body["dropped"])
        return {key: value for key, value in body.items() if value}
