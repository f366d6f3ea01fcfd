"""Broadcasts versions to clusters of peers, each a region behind its own trunk. Measures the traffic over each trunk,
the times, and how long rollouts pause.

The hub and the peers are started as a user would start them, with TLS. A version is *full* (all words are new, so the
whole state has to be sent) or a *delta* (``changed_share`` of the words move one step up or down). There is one row per
version, except for the ``warm_up`` versions, which come first and are full if any version is full. One more row sums up
all versions; if any are full, another sums up the deltas.

Columns: ``bytes`` (the artifact), ``of_full`` (relative to the state's bytes), ``bytes_REGION`` (over that trunk,
headers included). ``first_s``, ``received_s``, ``all_s``: from the hub's first step of publishing until the first peer
has every piece, the last peer has, and the last has installed it. ``busy``: share of processors in use. Two columns
give the pause of a peer's rollouts, as the mean over all peers. ``blocking_s``: if rollouts stop from the start of a
version until it is installed. ``background_s``: if rollouts continue and pause only for the commit.

Engines are folders of safetensors, which need no pause; ``engine_pause_ms`` is the assumed additional pause of a
serving engine in both cases. Rows for several versions have sums of bytes and pauses, and medians of the rest.
``simulated`` rows give the paper's sizes over trunks of ``paper_gbps``, computed with the tree model from the measured
plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from statistics import fmean, median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from netem.broadcast.cpu import CpuMeter
from netem.emulation.description import HUB, EmulatedNetwork
from netem.emulation.namespaces import Namespaces
from netem.emulation.tables import bounded, filled
from netem.fleet.fleet import Fleet, emulated_fleet
from netem.fleet.saved_weights import TENSOR_BYTES, Tensors, nbytes
from netem.lab.case_network import emulated
from netem.lab.model_prediction import FeedTree
from netem.lab.network_tables import network_of
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MIB

FULL: Final = "full"
DELTA: Final = "delta"
ALL: Final = "all"
DELTAS: Final = "deltas alone"
WORD_BYTES: Final = 2
IDLE_S: Final = 1.0
"""Pause before each version: several round trips, and more than TCP's retransmission timer, so congestion windows are
as between versions of a slower trainer.
"""


@dataclass(frozen=True, slots=True)
class Parameters:
    """``full_every``: the first counted version is full, and every ``full_every``-th after it; 0 means none.
    ``warm_up``: versions before the counted ones. ``chains``: 0 leaves the choice to p2pcast. ``paper_gib``,
    ``paper_delta_gib``, ``paper_gbps``: the paper's checkpoint, its delta, and a trunk's assumed rate; 0 means no
    simulated rows.
    """

    state_mib: float
    versions: int
    full_every: int = 0
    warm_up: int = 1
    changed_share: float = 0.02
    chains: int = 0
    engine_pause_ms: float = 0.0
    paper_gib: float = 0.0
    paper_delta_gib: float = 0.0
    paper_gbps: float = 0.0

    def check(self) -> None:
        if not 0.25 <= self.state_mib <= 256 or not 1 <= self.versions <= 500 or self.full_every < 0 or self.chains < 0:
            raise UsageError(
                "parameters.state_mib must be from 0.25 to 256, versions from 1 to 500, full_every and chains not "
                "below 0"
            )
        if not 0 <= self.warm_up <= 100:
            raise UsageError(f"parameters.warm_up is {self.warm_up}: it must be from 0 to 100")
        bounded(self, engine_pause_ms=(0, 60_000), paper_gib=(0, 1e6), paper_delta_gib=(0, 1e6), paper_gbps=(0, 1e6))
        if not 0 < self.changed_share < 1:
            raise UsageError(f"parameters.changed_share is {self.changed_share:g}: it must be between 0 and 1")


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    network = network_of(argument)
    if HUB not in (host.name for host in network.hosts) or not network.regions:
        raise UsageError(f"the experiment clusters needs a host {HUB!r}, and regions with peers")
    with emulated(argument) as (net, calibrated):
        yield calibrated
        if calibrated["off"]:
            return
        with emulated_fleet(net) as run:
            for row in _rows(net, run, given):
                yield {"row": row}


def states(given: Parameters, seed: int = 0) -> Iterator[tuple[str, Tensors]]:
    """Yield the kind and the tensors of each version after the initial state: first the warm-up versions, then the
    counted ones.
    """
    random = np.random.default_rng(seed)
    tensors = max(1, round(given.state_mib * MIB) // TENSOR_BYTES)
    words = _drawn(random, tensors)
    yield FULL, _tensors(words)
    for number in count(1 - given.warm_up):
        kind = FULL if given.full_every and (number < 1 or (number - 1) % given.full_every == 0) else DELTA
        if kind == FULL:
            words = _drawn(random, tensors)
        else:
            moved = random.random(words.shape) < given.changed_share
            words = words + np.where(moved, random.choice(np.array([1, 65535], np.uint16), words.shape), np.uint16(0))
        yield kind, _tensors(words)


def _drawn(random: np.random.Generator, tensors: int) -> npt.NDArray[np.uint16]:
    """Return bf16 weights with the magnitudes of real models."""
    drawn = random.standard_normal((tensors, TENSOR_BYTES // WORD_BYTES), np.float32) * np.float32(0.02)
    high: npt.NDArray[np.uint16] = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    return high


def _tensors(words: npt.NDArray[np.uint16]) -> Tensors:
    return {f"w{n:05}": ("BF16", (row.size,), row) for n, row in enumerate(words)}


def _rows(net: Namespaces, run: Fleet, given: Parameters) -> Iterator[dict[str, Any]]:
    versions = states(given)
    run.save(next(versions)[1])
    up_bps = net.network.link(HUB).up_bps
    options = [] if up_bps is None else ["--uplink", f"{up_bps:.0f}"]
    if given.chains:
        options += ["--chains", str(given.chains)]
    run.hub(run.trained, *options)
    run.until_joinable()
    peers = net.network.peers
    regions = {host.name: host.region for host in net.network.hosts}
    for peer in peers:
        run.peer(peer, "--region", regions[peer] or "")
    run.live(peers)
    rows = []
    for number, (kind, tensors) in enumerate(islice(versions, given.warm_up + given.versions), 1 - given.warm_up):
        tree = _tree(net, run, peers)
        row = _version(net, run, peers, tensors, given.engine_pause_ms / 1e3)
        predicted_s = tree.predicted_s(row["bytes"])
        if number > 0:
            row |= {
                "depth": tree.depth, "stripes": tree.stripes, "predicted_s": predicted_s and round(predicted_s, 4),
                "predicted_over_measured": predicted_s and round(predicted_s / row["received_s"], 4),
            }  # fmt: skip
            rows.append({"version": number, "kind": kind, "entered": sum(entries(tree).values()), **row})
            yield rows[-1]
    yield {"version": len(rows), "kind": ALL, **whole(rows, given), "simulated": False}
    deltas = [row for row in rows if row["kind"] == DELTA]
    if given.full_every and deltas:
        yield {"version": len(deltas), "kind": DELTAS, **whole(deltas, given), "simulated": False}
    if given.paper_gib and given.paper_gbps:
        yield from at_scale(tree, rows, given)


def _tree(net: Namespaces, run: Fleet, peers: list[str]) -> FeedTree:
    """Return the hub's current plan, with the links in use."""
    status = run.get(HUB)
    names = {peer["node"]: peer["name"] for peer in status["peers"]}
    links = [*status["links"], *(link for peer in peers for link in run.get(peer)["links"])]
    stripes = {
        names[link["node"]]: int(link["stripes_in_use"])
        for link in links
        if link["role"] == "child" and link["node"] in names
    }
    return FeedTree(net.network, {p["name"]: p["parent"] for p in status["peers"]}, stripes)


def _version(net: Namespaces, run: Fleet, peers: list[str], tensors: Tensors, pause_s: float) -> dict[str, Any]:
    time.sleep(IDLE_S)
    state_bytes = nbytes(tensors)
    meter = CpuMeter({})
    before = {region.name: net.passed(region.name)[0] for region in net.network.regions}
    run.save(tensors)
    line = run.timeline(peers)
    busy = meter.busy()
    network = net.network
    received_s = {
        f"received_{region.name}_s": round(
            max(line.received_s[h.name] for h in network.hosts if h.region == region.name), 4
        )
        for region in network.regions
    }
    crossed = {f"bytes_{name}": net.passed(name)[0] - count for name, count in before.items()}
    pauses = [run.wait_for(peer, "committed", version=line.version).facts["pause_s"] for peer in peers]
    return {
        "bytes": line.bytes, "of_full": round(line.bytes / state_bytes, 5), **crossed, **received_s,
        "first_s": round(min(line.received_s.values()), 4),
        "received_s": round(max(line.received_s.values()), 4), "all_s": round(max(line.committed_s.values()), 4),
        "background_s": round(fmean(pauses) + pause_s, 5),
        "blocking_s": round(fmean(line.committed_s.values()) + pause_s, 4), "busy": round(busy, 3), "simulated": False,
    }  # fmt: skip


def entries(tree: FeedTree) -> dict[str, int]:
    """Return the number of links by which the plan enters each region from outside."""
    regions = {host.name: host.region for host in tree.network.hosts}
    crossing = [regions[peer] for peer, above in tree.above.items() if regions[peer] != regions.get(above)]
    return {region.name: crossing.count(region.name) for region in tree.network.regions}


def whole(rows: list[dict[str, Any]], given: Parameters) -> dict[str, Any]:
    """Return one row for several versions."""
    keys = [key for key in rows[0] if key.startswith("bytes")]
    sent = {key: sum(row[key] for row in rows) for key in keys}
    return {
        **sent,
        "of_full": round(sent["bytes"] / (len(rows) * given.state_mib * MIB), 5),
        "received_s": round(median(row["received_s"] for row in rows), 4),
        "busy": round(median(row["busy"] for row in rows), 3),
        "all_s": round(median(row["all_s"] for row in rows), 4),
        "background_s": round(sum(row["background_s"] for row in rows), 4),
        "blocking_s": round(sum(row["blocking_s"] for row in rows), 4),
        "background_share": round(sum(row["background_s"] for row in rows) / sum(row["blocking_s"] for row in rows), 5),
    }


def at_scale(tree: FeedTree, rows: list[dict[str, Any]], given: Parameters) -> Iterator[dict[str, Any]]:
    """Yield rows for a full checkpoint and a delta of the paper's size, and a delta with the measured share."""
    shares = [row["bytes"] / (given.state_mib * MIB) for row in rows if row["kind"] == DELTA]
    gib = {"full, the paper's": given.paper_gib, "delta, the paper's": given.paper_delta_gib}
    if shares:
        gib["delta, ours"] = given.paper_gib * median(shares)
    grown = FeedTree(widened(tree.network, given.paper_gbps * 1e9), tree.above)
    into = entries(tree)
    for kind, size in gib.items():
        if not size:
            continue
        sent = round(size * 1024 * MIB)
        seconds = grown.predicted_s(sent)
        yield {
            "kind": kind, "bytes": sent, **{f"bytes_{name}": sent * often for name, often in into.items()},
            "received_s": round(seconds or 0.0, 3), "simulated": True,
        }  # fmt: skip


def widened(network: EmulatedNetwork, trunk_bps: float) -> EmulatedNetwork:
    """Return the network with trunks of that rate, and a hub link as wide as all trunks together (same delays)."""
    regions = tuple(
        replace(region, link=replace(region.link, up_bps=trunk_bps, down_bps=trunk_bps)) for region in network.regions
    )
    wide = len(regions) * trunk_bps
    hosts = tuple(replace(host, link=replace(host.link, up_bps=wide, down_bps=wide)) for host in network.hosts)
    return replace(network, hosts=hosts, regions=regions)
