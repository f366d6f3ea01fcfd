"""One payload from a hub to N peers by different trees: p2pcast's own choice or a given number of chains, a star, a
binary tree, bare chains.

The question is ECHO-2's (section 5.5.1). The hub's uplink is B0, each worker's link Bw. A star takes N × payload ÷ B0
once N × Bw exceeds B0, while B0 ÷ Bw chains that forward as they receive stay near payload ÷ Bw. Rows are those of
`netem.lab.experiments.broadcast`, and of a binary tree of forwarding sockets. ``theirs_s``: the paper's formula for
the tree, without the cost of hops. ``simulated`` rows: larger fleets by the model of `topology`, which also gives
``predicted_s`` of measured rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from netem.broadcast.rivals import bare_tree
from netem.broadcast.rows import row
from netem.emulation.description import HUB, EmulatedNetwork, Host
from netem.emulation.namespaces import Namespaces, namespaces
from netem.emulation.streamed_rate import streamed
from netem.emulation.tables import bounded, filled
from netem.lab.case_network import CALIBRATED
from netem.lab.experiments import broadcast
from netem.lab.experiments.broadcast import CROWDED
from netem.lab.model_prediction import FeedTree
from netem.lab.scenario import network_of
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MIB
from topology.broadcast_time import BroadcastNetwork as Model
from topology.broadcast_time import predict
from topology.plan import make_plan
from topology.plan_tree import ROOT, Plan, PlanMember
from topology.version_sizes import VersionSizes

TREE: Final = "tree"
STAR: Final = "star"
FORMULA: Final = "p2pcast by formula"
"""p2pcast with the number of chains of the paper's formula: the uplink ÷ a worker's rate."""
PAPER_BYTES: Final = 16_400_000_000
NEAR: Final = Model(near_rtt_s=0.0, far_rtt_s=0.0)
SHARE: Final = FeedTree(EmulatedNetwork((Host("hub"),)), {}).share(PAPER_BYTES)
"""The share of a link's rate that headers leave to the paper's payload."""
SAMPLED_PEERS: Final = 3
"""Number of peers whose links are measured: all links are made alike."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """As ``broadcast``'s, one ``system`` a case. ``simulate``: peer counts of simulated rows. The case with
    ``simulate_at`` peers adds these rows, at the paper's payload, uplink and worker's rate.
    """

    system: str
    payload_mib: float
    rounds: int = 3
    warm_up: int = 2
    chains: int = 0
    simulate: tuple[int, ...] = ()
    simulate_at: int = 0
    paper_bytes: float = PAPER_BYTES
    paper_uplink_bps: float = 300e6
    paper_peer_bps: float = 100e6

    def check(self) -> None:
        if self.system not in (known := (*broadcast.SYSTEMS, TREE, FORMULA)):
            raise UsageError(f"parameters.system: there is no {self.system!r}, but {', '.join(known)}")
        bounded(self, payload_mib=(0.25, 1024), rounds=(1, 100), warm_up=(0, 100), chains=(0, 10_000))
        bounded(self, simulate=(1, 100_000), simulate_at=(0, 100_000))
        bounded(self, paper_bytes=(1, 1e15), paper_uplink_bps=(1, 1e15), paper_peer_bps=(1, 1e15))


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    network = network_of(argument)
    uplink_bps, peer_bps = rates(network)
    called = given.system
    if called == FORMULA:
        given = dataclasses.replace(given, system=broadcast.P2PCAST, chains=max(1, int(uplink_bps / peer_bps)))
    for said in _measured_and_more(argument, given, network, uplink_bps, peer_bps):
        yield {"row": said["row"] | {"system": called}} if "row" in said else said


def _measured_and_more(
    argument: Mapping[str, Any], given: Parameters, network: EmulatedNetwork, uplink_bps: float, peer_bps: float
) -> Iterator[dict[str, Any]]:
    with namespaces(network) as net:
        calibration = sampled(net)
        yield calibration
        if calibration["off"]:
            return
        if given.system == TREE:
            yield {"row": finished(_tree(net, given), given, uplink_bps, peer_bps)}
    if given.system != TREE:
        passed = {f.name for f in dataclasses.fields(broadcast.Parameters)} & {
            f.name for f in dataclasses.fields(given)
        }
        parameters = {name: getattr(given, name) for name in passed} | {"systems": [given.system]}
        for said in broadcast.results({**argument, "parameters": parameters, CALIBRATED: calibration}):
            if "row" in said:
                yield {"row": finished(said["row"], given, uplink_bps, peer_bps)}
    if len(network.hosts) - 1 == given.simulate_at:
        for peers in given.simulate:
            yield {"row": finished(simulated(given, peers), given, given.paper_uplink_bps, given.paper_peer_bps)}


def rates(network: EmulatedNetwork) -> tuple[float, float]:
    """The hub's uplink and a peer's link. Raises UsageError unless the peers are alike and links have only rates."""
    links = {host.link for host in network.hosts if host.name != HUB}
    hub = next((host.link for host in network.hosts if host.name == HUB), None)
    if hub is None or hub.up_bps is None or len(links) != 1 or (down_bps := next(iter(links)).down_bps) is None:
        raise UsageError(f"hosts: this experiment needs a {HUB!r} and identical peers with rates")
    if not network.only_rates:
        raise UsageError("hosts: links of this experiment have rates alone")
    return hub.up_bps, down_bps


def sampled(net: Namespaces) -> dict[str, Any]:
    """``{calibration, off}`` of the hub's link, and of some of the peers'."""
    peers = net.network.peers
    return streamed(net, [(HUB, peer) for peer in peers[:SAMPLED_PEERS]] + [(peers[0], HUB)])


def shape(system: str, peers: Sequence[str], chains: int) -> dict[str, str]:
    """Parent of each peer: another peer, or ``HUB``."""
    if system == STAR:
        return dict.fromkeys(peers, HUB)
    if system == TREE:
        return {peer: HUB if at == 0 else peers[(at - 1) // 2] for at, peer in enumerate(peers)}
    return {peer: HUB if at < chains else peers[at - chains] for at, peer in enumerate(peers)}


def _tree(net: Namespaces, given: Parameters) -> dict[str, Any]:
    peers = net.network.peers
    ran = bare_tree(net, round(given.payload_mib * MIB), given.rounds)
    tree = FeedTree(net.network, shape(TREE, peers, 1))
    made = row(ran, len(peers), tree.peer_bps)
    del made["settings"], made["every_over_ideal"]
    return made | {"chains": 1, "depth": tree.depth, "crowded": made["machine_busy"] > CROWDED}


def finished(made: dict[str, Any], given: Parameters, uplink_bps: float, peer_bps: float) -> dict[str, Any]:
    """The row with the times of the paper's formula and of the model."""
    if "skipped" in made:
        return made | {"system": given.system}
    peers, payload_bytes = made["peers"], made["payload_bytes"]
    made.setdefault("simulated", False)
    fed = peers if given.system == STAR else given.chains or max(1, int(uplink_bps / peer_bps))
    theirs_s = 8 * payload_bytes / min(peer_bps, uplink_bps / min(peers, fed))
    if given.system == TREE:
        theirs_s = 8 * payload_bytes / (peer_bps / 2 if peers > 2 else peer_bps)
    if made.get("predicted_s") is None:
        names = [f"p{n}" for n in range(1, peers + 1)]
        parent = {
            peer: ROOT if above == HUB else above for peer, above in shape(given.system, names, min(peers, fed)).items()
        }
        made["predicted_s"] = round(predicted_s(parent, payload_bytes, uplink_bps, peer_bps), 4)
        made["predicted_over_measured"] = round(made["predicted_s"] / made["all_s"], 4)
    made |= {
        "system": given.system,
        "asked": str(given.chains or "own"),
        "asked_by": "a number of chains" if given.chains else "p2pcast's own choice",
    }
    return made | {"theirs_s": round(theirs_s, 4), "over_theirs": round(made["all_s"] / theirs_s, 4)}


def predicted_s(parent: Mapping[str, str], payload_bytes: int, uplink_bps: float, peer_bps: float) -> float:
    """Time until the last peer has the payload, by the model; rates are those after headers."""
    members = [PlanMember(peer, bps=peer_bps * SHARE) for peer in parent]
    return predict(Plan((1, 0), parent), members, payload_bytes, uplink_bps * SHARE, NEAR).last_s


def simulated(given: Parameters, peers: int) -> dict[str, Any]:
    """A fleet at the paper's scale, by the model; p2pcast with the plan that it would make."""
    uplink_bps, peer_bps, payload_bytes = given.paper_uplink_bps, given.paper_peer_bps, round(given.paper_bytes)
    names = [f"p{n:05}" for n in range(1, peers + 1)]
    if given.system == broadcast.P2PCAST and not given.chains:
        members = [PlanMember(name, bps=peer_bps) for name in names]
        sizes = VersionSizes()
        sizes.published(payload_bytes)
        plan = make_plan(members, uplink_bps, epoch=(1, 0), payload_bytes=sizes.bytes, network=NEAR)
    else:
        chains = given.chains or max(1, int(uplink_bps / peer_bps))
        above = shape(given.system, names, min(peers, chains))
        plan = Plan((1, 0), {peer: ROOT if over == HUB else over for peer, over in above.items()})
    ideal_s, last_s = 8 * payload_bytes / peer_bps, predicted_s(plan.parent, payload_bytes, uplink_bps, peer_bps)
    return {
        "system": given.system,
        "peers": peers,
        "payload_bytes": payload_bytes,
        "ideal_s": round(ideal_s, 4),
        "all_s": round(last_s, 4),
        "all_over_ideal": round(last_s / ideal_s, 4),
        "chains": len(plan.children(ROOT)),
        "depth": plan.depth,
        "predicted_s": round(last_s, 4),
        "simulated": True,
    }
