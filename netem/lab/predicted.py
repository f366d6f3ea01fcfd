"""What the model of trees (``topology.flow``), by which p2pcast compares its plans, says of a broadcast on an emulated network. Pure.

Of a link's rate, payload gets what headers leave; as many pieces as a link has stripes in use share its rate, so each takes as many times as long; those that a trunk leads to, or from, share it.
Each hop adds its delay, and a round trip more: of a version's last packets some are lost, wherever connections search for what a way carries, and come again so much later. That round
trip is what was measured (docs/measurements.md, chains over long ways); the rest is arithmetic. Each pair of hosts has the round trip that the network's description gives it.

Connections are taken to be open and warm, as they are from one version to the next: BBR, by which p2pcast sends, begins again at the rate that it knew, however long it rested (unlike
CUBIC, there is no slow start after idleness). Processors are taken to cost nothing: what encodes, proves and passes on. So a first version, and one that is through within a few
tenths of a second, take longer than is predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from netem.broadcast.rivals import HUB
from netem.description import Network as Emulated
from netem.lab.networks import Event
from netem.shaping import FRAME_BYTES
from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.errors import UsageError
from p2pcast.relay.smoothing import HEADROOM
from topology.flow import Flow
from topology.model import Network
from topology.tree import ROOT
from trainer_node.replay import Blow, replay
from trainer_node.simulator import Scenario

TCP_IP_BYTES: Final = 52
"""IPv4, TCP and its timestamps."""
PIECE_HEADER_BYTES: Final = 16
"""Of a piece's frame."""
HASH_BYTES: Final = 32
"""Of a piece, in the batch that vouches for it, which goes out on each stripe."""


@dataclass(frozen=True)
class Ways(Network):
    """Round trips by host: each is a region of its own here, the root that of the hub."""

    network: Emulated | None = None
    rtts_s: dict[tuple[str, str], float] = field(default_factory=dict, compare=False)

    def rtt_s(self, a: str, b: str) -> float:
        assert self.network is not None
        if (a, b) not in self.rtts_s:
            there, back = self.network.way(a, b), self.network.way(b, a)
            self.rtts_s[a, b] = there.delay_s + back.delay_s
        return self.rtts_s[a, b]


class Tree:
    """``above``: of each peer, the one that feeds it, or ``HUB``. ``stripes``: in use, of each link, or by the peer that it feeds."""

    def __init__(self, network: Emulated, above: Mapping[str, str], stripes: int | Mapping[str, int] = 1) -> None:
        self.network = network
        self.above = dict(above)
        self._stripes = (
            dict.fromkeys(above, stripes) if isinstance(stripes, int) else {peer: stripes.get(peer, 1) for peer in above}
        )
        regions = {host.name: host.region for host in network.hosts}
        self._regions = regions
        apart = [(regions[feeder], regions[peer]) for peer, feeder in above.items() if regions[feeder] != regions[peer]]
        self._out, self._in = Counter(a for a, _ in apart), Counter(b for _, b in apart)
        """Links of the plan over each trunk."""

    @property
    def stripes(self) -> int:
        """Of a link, the median."""
        return round(median(self._stripes.values())) if self._stripes else 1

    def way(self, peer: str) -> list[str]:
        """From the hub to a peer, both included."""
        way = [peer]
        while way[0] != HUB:
            way.insert(0, self.above[way[0]])
            if len(way) > len(self.above) + 1:
                raise UsageError(f"a plan in which {peer} hangs below itself")
        return way

    @property
    def chains(self) -> int:
        return sum(above == HUB for above in self.above.values())

    @property
    def depth(self) -> int:
        """Hops to the peer that is the furthest down."""
        return max((len(self.way(peer)) - 1 for peer in self.above), default=0)

    @property
    def half_rtts_s(self) -> float:
        """The most that delays add up to from the hub to a peer, hop by hop."""
        delays = (sum(self.network.way(a, b).delay_s for a, b in pairwise(self.way(peer))) for peer in self.above)
        return max(delays, default=0.0)

    @property
    def peer_bps(self) -> float:
        """At which the peer with the narrowest way from the hub receives, at best. Raises UsageError where nothing limits it."""
        rates = [rate for peer in self.above if (rate := self.network.way(HUB, peer).rate_bps) is not None]
        if not rates:
            raise UsageError("hosts: no link has a rate, so there is nothing to compare times with")
        return min(rates)

    def share(self, payload_bytes: int) -> float:
        """Of a rate on the wire, what a payload of so many bytes gets."""
        packets, piece = (self.network.mtu - TCP_IP_BYTES) / (self.network.mtu + FRAME_BYTES), piece_bytes(payload_bytes)
        return packets * piece / (piece + PIECE_HEADER_BYTES + HASH_BYTES * self.stripes)

    def predicted_s(self, payload_bytes: int, events: Sequence[Event] = ()) -> float | None:
        """Until the last peer has it all. None where the model can't say: of links that are as fast as the machine, of frozen peers, whose kernels go on receiving, of those that join, whose
        processes have to start, of those that are cut off for good, of delays that change, and of what befalls trunks."""
        share = self.share(payload_bytes)
        blows = _blows(events, share)
        if blows is None or any(blow.peer not in self.above for blow in blows):
            return None
        ways = Ways(root_region=HUB, network=self.network)
        limits = {peer: bps * share for peer in self.above if (bps := self._peer_bps(peer)) is not None}
        uplink_bps = self.network.link(HUB).up_bps
        if uplink_bps is None or len(limits) < len(self.above):
            return None
        if not events:
            return self._flowing(payload_bytes, uplink_bps * share, limits, ways)
        if len(set(limits.values())) > 1:
            return None
        scenario = Scenario(
            peers=0, regions=1, payload_bytes=payload_bytes, uplink_bps=uplink_bps * share,
            peer_bps=next(iter(limits.values())), network=self._alike(payload_bytes),
        )  # fmt: skip
        links = {peer: ROOT if above == HUB else above for peer, above in self.above.items()}
        return max(replay(scenario, links, blows, self.chains).values(), default=0.0)

    def _flowing(self, payload_bytes: int, uplink_bps: float, limits: Mapping[str, float], ways: Ways) -> float:
        flow = Flow(payload_bytes, uplink_bps, {peer: peer for peer in self.above}, ways)
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
        """What the hops down to a peer add: of each its delay and a round trip for what is lost at the end, and below the first, which is the flow itself, the pieces that a link's
        stripes hold at a time. What a relay sends is held to little more than what comes in."""
        total_s, narrowest_bps, piece = 0.0, 0.0, piece_bytes(payload_bytes)
        for above, below in pairwise(self.way(peer)):
            total_s += 2 * self.network.way(above, below).delay_s + self.network.way(below, above).delay_s
            if above == HUB:
                narrowest_bps = limits[below]
                continue
            at_once = min(self._stripes[below], -(-payload_bytes // piece))
            total_s += 8.0 * min(piece, payload_bytes) * at_once / min(limits[below], HEADROOM * narrowest_bps)
            narrowest_bps = min(narrowest_bps, limits[below])
        return total_s

    def _alike(self, payload_bytes: int) -> Network:
        """One round trip for all pairs of hosts: the longest of this tree's."""
        longest_s = max(2 * self.network.way(above, peer).delay_s for peer, above in self.above.items())
        return Network(near_rtt_s=longest_s, far_rtt_s=longest_s, piece_bytes=self.stripes * piece_bytes(payload_bytes))

    def _peer_bps(self, peer: str) -> float | None:
        """What it takes in and passes on: the model has one rate for both. Beyond a trunk it is no more than its part of what that carries."""
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


def _blows(events: Sequence[Event], share: float) -> list[Blow] | None:
    """None where some can't be replayed."""
    blows = []
    for at, event in enumerate(events):
        if event.do == "kill":
            blows.append(Blow(event.at_s, event.place, None))
        elif event.do == "degrade":
            rates = [] if event.link is None else [bps for bps in (event.link.up_bps, event.link.down_bps) if bps is not None]
            if not rates:
                return None
            blows.append(Blow(event.at_s, event.place, min(rates) * share))
        elif event.do == "cut":
            healed = next((e.at_s for e in events[at:] if e.do == "heal" and e.place == event.place), None)
            if healed is None:
                return None
            blows.append(Blow(event.at_s, event.place, healed_s=healed))
        elif event.do != "heal" or not any(e.do == "cut" and e.place == event.place for e in events[:at]):
            return None
    return blows
