"""The prediction of the tree model (``topology.flow_model``), by which p2pcast compares its plans, for a broadcast on
an emulated network. Pure.

Payload gets a link's rate minus headers. Pieces on several stripes share that rate, so each takes a multiple of the
time; links over a trunk share the trunk's rate. Each hop adds its delay and one round trip. Some of a version's last
packets are lost while connections probe for bandwidth, and are sent again a round trip later. That round trip was
measured (docs/design/decisions/chains.md); the rest is arithmetic. Each pair of hosts has the round
trip of the network's description.

Connections are assumed to be open and warm, as between versions. BBR, which p2pcast uses, resumes at its last known
rate after any pause (unlike CUBIC, which restarts slowly). Encoding, verification and forwarding are assumed to cost no
processor time. So a first version, and a version that takes only some tenths of a second, take longer than predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from netem.emulation.description import HUB
from netem.emulation.description import EmulatedNetwork as Emulated
from netem.emulation.shaping import FRAME_BYTES
from netem.lab.network_tables import NetworkEvent
from netem.simulation.broadcast_replay import BroadcastFault, replay
from netem.simulation.fleet_simulator import FleetEvents
from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.ground.errors import UsageError
from p2pcast.relay.tuning import PACING_HEADROOM
from topology.broadcast_time import BroadcastNetwork
from topology.flow_model import FlowModel
from topology.plan_tree import ROOT

TCP_IP_BYTES: Final = 52
"""IPv4, TCP and its timestamps."""
PIECE_HEADER_BYTES: Final = 16
"""Header of a piece's frame."""
HASH_BYTES: Final = 32
"""A piece's hash in its signed batch, which is sent on each stripe."""


@dataclass(frozen=True)
class PairRoundTrips(BroadcastNetwork):
    """Broadcast trips by host: each host is a region of its own here, and the hub's is the root region."""

    network: Emulated | None = None
    rtts_s: dict[tuple[str, str], float] = field(default_factory=dict, compare=False)

    def rtt_s(self, a: str, b: str) -> float:
        assert self.network is not None
        if (a, b) not in self.rtts_s:
            there, back = self.network.way(a, b), self.network.way(b, a)
            self.rtts_s[a, b] = there.delay_s + back.delay_s
        return self.rtts_s[a, b]


class FeedTree:
    """``above``: each peer's parent, or ``HUB``. ``stripes``: in use on each link, or by the fed peer."""

    def __init__(self, network: Emulated, above: Mapping[str, str], stripes: int | Mapping[str, int] = 1) -> None:
        self.network = network
        self.above = dict(above)
        self._stripes = (
            dict.fromkeys(above, stripes)
            if isinstance(stripes, int)
            else {peer: stripes.get(peer, 1) for peer in above}
        )
        regions = {host.name: host.region for host in network.hosts}
        self._regions = regions
        apart = [(regions[feeder], regions[peer]) for peer, feeder in above.items() if regions[feeder] != regions[peer]]
        self._out, self._in = Counter(a for a, _ in apart), Counter(b for _, b in apart)
        """Number of plan links over each trunk."""

    @property
    def stripes(self) -> int:
        """Median of all links."""
        return round(median(self._stripes.values())) if self._stripes else 1

    def way(self, peer: str) -> list[str]:
        """The path from the hub to a peer, both included."""
        way = [peer]
        while way[0] != HUB:
            way.insert(0, self.above[way[0]])
            if len(way) > len(self.above) + 1:
                raise UsageError(f"a plan with a loop at {peer}")
        return way

    @property
    def chains(self) -> int:
        return sum(above == HUB for above in self.above.values())

    @property
    def depth(self) -> int:
        """Hops to the peer farthest from the hub."""
        return max((len(self.way(peer)) - 1 for peer in self.above), default=0)

    @property
    def half_rtts_s(self) -> float:
        """The largest sum of delays from the hub to a peer, over all hops."""
        delays = (sum(self.network.way(a, b).delay_s for a, b in pairwise(self.way(peer))) for peer in self.above)
        return max(delays, default=0.0)

    @property
    def peer_bps(self) -> float:
        """The best rate of the peer with the narrowest path from the hub. Raises UsageError if nothing limits that
        rate.
        """
        rates = [rate for peer in self.above if (rate := self.network.way(HUB, peer).rate_bps) is not None]
        if not rates:
            raise UsageError("hosts: no link has a rate, so there is no ideal time")
        return min(rates)

    def share(self, payload_bytes: int) -> float:
        """A payload's share of a rate on the wire."""
        packets, piece = (
            (self.network.mtu - TCP_IP_BYTES) / (self.network.mtu + FRAME_BYTES),
            piece_bytes(payload_bytes, self.depth),
        )
        return packets * piece / (piece + PIECE_HEADER_BYTES + HASH_BYTES * self.stripes)

    def predicted_s(self, payload_bytes: int, events: Sequence[NetworkEvent] = ()) -> float | None:
        """Seconds until the last peer has the payload. None for cases outside the model:

        - links as fast as the machine
        - stopped peers, whose kernels continue to receive
        - joining peers, whose processes have to start
        - permanent cuts, changing delays, and events on trunks
        """
        share = self.share(payload_bytes)
        faults = _faults(events, share)
        if faults is None or any(fault.peer not in self.above for fault in faults):
            return None
        ways = PairRoundTrips(root_region=HUB, network=self.network)
        limits = {peer: bps * share for peer in self.above if (bps := self._peer_bps(peer)) is not None}
        uplink_bps = self.network.link(HUB).up_bps
        if uplink_bps is None or len(limits) < len(self.above):
            return None
        if not events:
            return self._flowing(payload_bytes, uplink_bps * share, limits, ways)
        if len(set(limits.values())) > 1:
            return None
        scenario = FleetEvents(
            peers=0, regions=1, payload_bytes=payload_bytes, uplink_bps=uplink_bps * share,
            peer_bps=next(iter(limits.values())), network=self._alike(payload_bytes),
        )  # fmt: skip
        links = {peer: ROOT if above == HUB else above for peer, above in self.above.items()}
        return max(replay(scenario, links, faults, self.chains).values(), default=0.0)

    def _flowing(
        self, payload_bytes: int, uplink_bps: float, limits: Mapping[str, float], ways: PairRoundTrips
    ) -> float:
        flow = FlowModel(payload_bytes, uplink_bps, {peer: peer for peer in self.above}, ways)
        for peer, bps in limits.items():
            flow.add(peer, bps)
        for peer, above in self.above.items():
            flow.attach(peer, ROOT if above == HUB else above)
        now_s, last_s, left = 0.0, 0.0, len(self.above)
        while left:
            now_s, finished = flow.advance(now_s + 3600.0)
            left -= len(finished)
            last_s = max([last_s, *(now_s + self._hops_s(peer, payload_bytes, limits) for peer in finished)])
        return last_s

    def _hops_s(self, peer: str, payload_bytes: int, limits: Mapping[str, float]) -> float:
        """Time added by the hops down to a peer. Each hop adds its delay and a round trip for losses at the end. Below
        the first hop, which the flow itself covers, each hop also adds the pieces that a link's stripes hold at a time.
        A relay sends little faster than it receives.
        """
        total_s, narrowest_bps, piece = 0.0, 0.0, piece_bytes(payload_bytes, self.depth)
        for above, below in pairwise(self.way(peer)):
            total_s += 2 * self.network.way(above, below).delay_s + self.network.way(below, above).delay_s
            if above == HUB:
                narrowest_bps = limits[below]
                continue
            at_once = min(self._stripes[below], -(-payload_bytes // piece))
            total_s += 8.0 * min(piece, payload_bytes) * at_once / min(limits[below], PACING_HEADROOM * narrowest_bps)
            narrowest_bps = min(narrowest_bps, limits[below])
        return total_s

    def _alike(self, payload_bytes: int) -> BroadcastNetwork:
        """A network with one round trip for all pairs of hosts: the longest of this tree's."""
        longest_s = max(2 * self.network.way(above, peer).delay_s for peer, above in self.above.items())
        return BroadcastNetwork(
            near_rtt_s=longest_s, far_rtt_s=longest_s, piece_bytes=self.stripes * piece_bytes(payload_bytes, self.depth)
        )

    def _peer_bps(self, peer: str) -> float | None:
        """The rate at which a peer receives and forwards; the model has one rate for both. Beyond a trunk, at most the
        peer's part of the trunk.
        """
        feeder = self.above[peer]
        rates = [self.network.way(feeder, peer).rate_bps]
        there, here = self._regions[feeder], self._regions[peer]
        if there != here:
            up_bps = None if there is None else self.network.link(there).up_bps
            down_bps = None if here is None else self.network.link(here).down_bps
            rates += [
                None if up_bps is None else up_bps / self._out[there],
                None if down_bps is None else down_bps / self._in[here],
            ]
        rates += [self.network.link(peer).up_bps] if peer in self.above.values() else []
        return min((rate for rate in rates if rate is not None), default=None)


def _faults(events: Sequence[NetworkEvent], share: float) -> list[BroadcastFault] | None:
    """None if some event cannot be replayed."""
    faults = []
    for at, event in enumerate(events):
        if event.do == "kill":
            faults.append(BroadcastFault(event.at_s, event.place, None))
        elif event.do == "degrade":
            rates = (
                []
                if event.link is None
                else [bps for bps in (event.link.up_bps, event.link.down_bps) if bps is not None]
            )
            if not rates:
                return None
            faults.append(BroadcastFault(event.at_s, event.place, min(rates) * share))
        elif event.do == "cut":
            healed = next((e.at_s for e in events[at:] if e.do == "heal" and e.place == event.place), None)
            if healed is None:
                return None
            faults.append(BroadcastFault(event.at_s, event.place, healed_s=healed))
        elif event.do != "heal" or not any(e.do == "cut" and e.place == event.place for e in events[:at]):
            return None
    return faults
