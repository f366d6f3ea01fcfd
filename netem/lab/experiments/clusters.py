"""Versions to clusters of peers, each cluster a region behind a trunk of its own: what crosses each trunk, when everybody has it, and for how long rollouts stand still.

A hub and peers as users start them, behind TLS. A version is *full*, all of its words new, so that all of the state has to travel, or a *delta*, ``changed_share`` of the words one step up
or down. A row a version (but for ``warm_up`` ones, which come first: full where some are), one for all and, where some are full, one for the deltas among them: ``bytes`` (the artifact), ``of_full`` (÷ those of the state), ``bytes_REGION`` (over that trunk, headers and all), ``first_s``, ``received_s``, ``all_s`` (until the first peer, and the last, had every piece; until the last had it installed: from the
hub's first step of publishing), ``busy`` (share of processors in use), and the time in which a peer's rollouts stand still, the mean of all peers: ``blocking_s`` where they wait for a version from the
beginning until it is installed, ``background_s`` where they go on meanwhile: what the commit pauses them. Engines are folders of safetensors, which nothing has to pause for; ``engine_pause_ms`` is what an engine
that serves is taken to need besides, in either way. Rows for several have sums of bytes and of standing still, medians of the rest.
``simulated`` rows: the paper's sizes over trunks of ``paper_gbps``, by the model of trees and the plan that was measured.
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

from netem.broadcast.cpu import Meter
from netem.broadcast.rivals import HUB, peers_of
from netem.description import Network
from netem.lab.emulated import emulated
from netem.lab.networks import network_of
from netem.lab.predicted import Tree
from netem.lab.swarm import Swarm, swarm
from netem.lab.tables import bounded, filled
from netem.lab.weights import TENSOR_BYTES, Tensors, nbytes
from netem.namespaces import Namespaces
from p2pcast.errors import UsageError
from p2pcast.limits import MIB

FULL: Final = "full"
DELTA: Final = "delta"
ALL: Final = "all"
DELTAS: Final = "deltas alone"
WORD_BYTES: Final = 2
IDLE_S: Final = 1.0
"""Before each version: several round trips, and longer than TCP's retransmission timer, so windows are what they are between versions of a trainer that computes for longer."""


@dataclass(frozen=True, slots=True)
class Given:
    """``full_every``: the first version that counts and every so many after it are full; 0: none is. ``warm_up``: versions before those. ``chains``: 0 is p2pcast's own choice. ``paper_gib``, ``paper_delta_gib``, ``paper_gbps``: the
    paper's checkpoint, its delta, and what a trunk is taken to carry; 0: nothing is worked out."""

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
                "parameters.state_mib must be from 0.25 to 256, versions from 1 to 500, full_every and chains not below 0"
            )
        if not 0 <= self.warm_up <= 100:
            raise UsageError(f"parameters.warm_up is {self.warm_up}: it must be from 0 to 100")
        bounded(self, engine_pause_ms=(0, 60_000), paper_gib=(0, 1e6), paper_delta_gib=(0, 1e6), paper_gbps=(0, 1e6))
        if not 0 < self.changed_share < 1:
            raise UsageError(f"parameters.changed_share is {self.changed_share:g}: it must be between 0 and 1")


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Given, argument["parameters"], "parameters")
    given.check()
    network = network_of(argument)
    if HUB not in (host.name for host in network.hosts) or not network.regions:
        raise UsageError(f"the experiment clusters has a host {HUB!r}, and regions with peers")
    with emulated(argument) as (net, calibrated):
        yield calibrated
        if calibrated["off"]:
            return
        with swarm(net) as run:
            for row in _rows(net, run, given):
                yield {"row": row}


def states(given: Given, seed: int = 0) -> Iterator[tuple[str, Tensors]]:
    """The kind of each version and what it holds, from what everybody begins with: those to warm up with, and then those that count."""
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
    """Weights of the size that models' are, in bf16."""
    drawn = random.standard_normal((tensors, TENSOR_BYTES // WORD_BYTES), np.float32) * np.float32(0.02)
    high: npt.NDArray[np.uint16] = (drawn.view(np.uint32) >> 16).astype(np.uint16)
    return high


def _tensors(words: npt.NDArray[np.uint16]) -> Tensors:
    return {f"w{n:05}": ("BF16", (row.size,), row) for n, row in enumerate(words)}


def _rows(net: Namespaces, run: Swarm, given: Given) -> Iterator[dict[str, Any]]:
    versions = states(given)
    run.save(next(versions)[1])
    up_bps = net.network.link(HUB).up_bps
    options: list[str | float] = [] if up_bps is None else ["--uplink", f"{up_bps:.0f}"]
    if given.chains:
        options += ["--chains", given.chains]
    run.hub(*options)
    peers = peers_of(net)
    regions = {host.name: host.region for host in net.network.hosts}
    for peer in peers:
        run.join(peer, options=["--region", regions[peer] or ""])
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


def _tree(net: Namespaces, run: Swarm, peers: list[str]) -> Tree:
    """As the hub has planned it, of links as they are."""
    status = run.get(HUB)
    names = {peer["node"]: peer["name"] for peer in status["peers"]}
    links = [*status["links"], *(link for peer in peers for link in run.get(peer)["links"])]
    stripes = {
        names[link["node"]]: int(link["stripes_in_use"]) for link in links if link["role"] == "child" and link["node"] in names
    }
    return Tree(net.network, {p["name"]: p["parent"] for p in status["peers"]}, stripes)


def _version(net: Namespaces, run: Swarm, peers: list[str], tensors: Tensors, pause_s: float) -> dict[str, Any]:
    time.sleep(IDLE_S)
    state_bytes = nbytes(tensors)
    meter = Meter({})
    before = {region.name: net.passed(region.name)[0] for region in net.network.regions}
    run.save(tensors)
    line = run.timeline(peers)
    busy = meter.busy()
    network = net.network
    received_s = {
        f"received_{region.name}_s": round(max(line.received_s[h.name] for h in network.hosts if h.region == region.name), 4)
        for region in network.regions
    }
    crossed = {f"bytes_{name}": net.passed(name)[0] - count for name, count in before.items()}
    pauses = [run.told(peer, "committed", version=line.version).facts["pause_s"] for peer in peers]
    return {
        "bytes": line.bytes, "of_full": round(line.bytes / state_bytes, 5), **crossed, **received_s,
        "first_s": round(min(line.received_s.values()), 4),
        "received_s": round(max(line.received_s.values()), 4), "all_s": round(max(line.committed_s.values()), 4),
        "background_s": round(fmean(pauses) + pause_s, 5),
        "blocking_s": round(fmean(line.committed_s.values()) + pause_s, 4), "busy": round(busy, 3), "simulated": False,
    }  # fmt: skip


def entries(tree: Tree) -> dict[str, int]:
    """How often the plan enters each region from outside."""
    regions = {host.name: host.region for host in tree.network.hosts}
    crossing = [regions[peer] for peer, above in tree.above.items() if regions[peer] != regions.get(above)]
    return {region.name: crossing.count(region.name) for region in tree.network.regions}


def whole(rows: list[dict[str, Any]], given: Given) -> dict[str, Any]:
    """Of several versions."""
    keys = [key for key in rows[0] if key.startswith("bytes")]
    sent = {key: sum(row[key] for row in rows) for key in keys}
    return {
        **sent,
        "of_full": round(sent["bytes"] / (len(rows) * given.state_mib * MIB), 5),
        "received_s": round(median(row["received_s"] for row in rows), 4), "busy": round(median(row["busy"] for row in rows), 3), "all_s": round(median(row["all_s"] for row in rows), 4),
        "background_s": round(sum(row["background_s"] for row in rows), 4), "blocking_s": round(sum(row["blocking_s"] for row in rows), 4),
        "background_share": round(sum(row["background_s"] for row in rows) / sum(row["blocking_s"] for row in rows), 5),
    }  # fmt: skip


def at_scale(tree: Tree, rows: list[dict[str, Any]], given: Given) -> Iterator[dict[str, Any]]:
    """A full checkpoint and a delta of the paper's size, and a delta as small as ours were."""
    shares = [row["bytes"] / (given.state_mib * MIB) for row in rows if row["kind"] == DELTA]
    gib = {"full, the paper's": given.paper_gib, "delta, the paper's": given.paper_delta_gib}
    if shares:
        gib["delta, ours"] = given.paper_gib * median(shares)
    grown = Tree(widened(tree.network, given.paper_gbps * 1e9), tree.above)
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


def widened(network: Network, trunk_bps: float) -> Network:
    """Trunks of that rate, the hub's link as wide as all of them; delays as they are."""
    regions = tuple(
        replace(region, link=replace(region.link, up_bps=trunk_bps, down_bps=trunk_bps)) for region in network.regions
    )
    wide = len(regions) * trunk_bps
    hosts = tuple(replace(host, link=replace(host.link, up_bps=wide, down_bps=wide)) for host in network.hosts)
    return replace(network, hosts=hosts, regions=regions)
