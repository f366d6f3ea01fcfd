"""One peer behind one link, and every path to the newest version: from the previous version, from nothing, or from an
older version.

The paths are PULSE's (section 4.2, appendix G): *fast path*, one delta; *cold start*, a whole state; *slow path*, a
whole state and the deltas since. Weights are real, under real AdamW steps; hub and peer are started as users start
them, behind TLS. Times of a fast path run from the hub's first step of publishing, before any encoding. Times of the
other paths run from the moment at which the hub admits the peer. All end when the peer has decoded the newest version
and checked its digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from statistics import median
from typing import Any

from netem.bench.codec_comparison.comparison import Dataset, speeds
from netem.emulation.description import HUB, EmulatedLink
from netem.emulation.namespaces import Namespaces, namespaces
from netem.emulation.streamed_rate import streamed
from netem.emulation.tables import bounded, filled, not_empty, rates_of
from netem.fleet.fleet import Fleet, emulated_fleet
from netem.fleet.saved_weights import Tensors, nbytes, trained
from netem.lab.scenario import network_of
from p2pcast.codec.codec_prediction import PEER_CORES, BroadcastPath, Cost, StateSize, predict
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import CELL_WORDS, MIB

CELL_BYTES = 2 * CELL_WORDS
SAMPLED_BYTES = 64 * MIB
FAST, COLD, SLOW, MISSED = "fast path", "cold start", "slow path", "missed versions"


@dataclass(frozen=True, slots=True)
class Parameters:
    """``rates``: of the peer's link, one after the other. ``rounds``: fast paths at each rate, for medians. ``behind``:
    versions after the whole state in a slow path, and missed versions. ``paper_bytes``: of the paper's model,
    ``paper_bps``: of its link, ``paper_cores``: of hosts with a GPU; rows for these are computed from the measurements.
    """

    learning_rate: float = 1e-6
    copies: int = 4
    rates: tuple[str, ...] = ("400mbit", "40mbit")
    rounds: int = 4
    behind: int = 9
    paper_bytes: float = 14e9
    paper_bps: float = 400e6
    paper_cores: int = PEER_CORES

    def check(self) -> None:
        not_empty(self, "rates")
        rates_of(self.rates, "rates")
        bounded(self, learning_rate=(1e-9, 1), copies=(1, 64), rounds=(1, 100), behind=(2, 1000))
        bounded(self, paper_bytes=(1, 1e15), paper_bps=(1, 1e15), paper_cores=(1, 1024))
        if self.behind < len(self.rates) * self.rounds + 1:
            raise UsageError(
                f"parameters.behind must be at least {len(self.rates) * self.rounds + 1}: rates × rounds, and one to "
                "warm up"
            )


@dataclass(frozen=True, slots=True)
class SyncPath:
    """``bytes``: transferred over the link. ``received_s``: until the last byte was verified. ``ready_s``: until the
    version could be installed.
    """

    name: str
    rate_bps: float
    artifacts: int
    bytes: int
    received_s: float
    ready_s: float


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    rates = rates_of(given.rates, "rates")
    versions = trained(given.learning_rate, given.copies)
    first = next(versions)
    state_bytes = nbytes(first)
    with namespaces(network_of(argument)) as net:
        peer = _only_peer(net)
        for rate in rates:
            net.reshape(peer, EmulatedLink(rate, rate))
            calibration = streamed(net, [(HUB, peer), (peer, HUB)])
            yield calibration
            if calibration["off"]:
                return
        with emulated_fleet(net) as run:
            paths = []
            for path in _paths(_Run(run, peer, net), chain([first], versions), rates, given):
                paths.append(path)
                yield {"row": row(path, state_bytes)}
    for path in at_scale(paths, state_bytes, measured_cost(*islice(versions, 2)), given):
        yield {"row": row(path, round(given.paper_bytes), simulated=True)}


def _only_peer(net: Namespaces) -> str:
    peers = net.network.peers
    if len(peers) != 1:
        raise UsageError("hosts: this experiment needs a hub and one peer")
    return peers[0]


@dataclass(frozen=True, slots=True)
class _Run:
    swarm: Fleet
    peer: str
    net: Namespaces

    def at(self, rate_bps: float) -> None:
        self.net.reshape(self.peer, EmulatedLink(rate_bps, rate_bps))

    def anew(self) -> None:
        """Stop the peer and delete its stored state."""
        self.swarm.leave(self.peer)
        self.swarm.forget(self.peer)

    def received(self) -> int:
        return int(self.swarm.get(self.peer)["bytes_received"])


def _paths(run: _Run, versions: Iterator[Tensors], rates: Sequence[float], given: Parameters) -> Iterator[SyncPath]:
    swarm, peer = run.swarm, run.peer
    swarm.save(next(versions))
    swarm.hub(swarm.trained)
    swarm.until_joinable()
    for rate in rates:
        run.at(rate)
        if rate != rates[0]:
            run.anew()
        swarm.peer(peer)
        yield _caught_up(run, COLD, rate)
    swarm.save(next(versions))
    swarm.timeline([peer])
    for rate in rates:
        run.at(rate)
        yield _fast([_next(run, tensors) for tensors in islice(versions, given.rounds)], rate)
    for tensors in islice(versions, given.behind - swarm.step):
        _next(run, tensors)
    for rate in rates:
        run.at(rate)
        run.anew()
        swarm.peer(peer, "--squashes", "none")
        yield _caught_up(run, SLOW, rate)
    for rate in rates:
        run.at(rate)
        swarm.leave(peer)
        for tensors in islice(versions, given.behind):
            _alone(swarm, tensors)
        swarm.peer(peer)
        yield _caught_up(run, MISSED, rate)


def _next(run: _Run, tensors: Tensors) -> tuple[int, float, float]:
    """Bytes, and the two times of a fast path."""
    before = run.received()
    run.swarm.save(tensors)
    line = run.swarm.timeline([run.peer])
    return run.received() - before, line.received_s[run.peer], line.staged_s[run.peer]


def _fast(taken: Sequence[tuple[int, float, float]], rate: float) -> SyncPath:
    nbytes, received, ready = (median(values) for values in zip(*taken, strict=True))
    return SyncPath(FAST, rate, 1, round(nbytes), received, ready)


def _alone(run: Fleet, tensors: Tensors) -> None:
    """Publish a version while no peer is connected."""
    run.save(tensors)
    run.wait_for(HUB, "sealed", version=run.version)


def _caught_up(run: _Run, name: str, rate: float) -> SyncPath:
    """Path of a peer that has just been started."""
    swarm, peer = run.swarm, run.peer
    ready = swarm.wait_for(peer, "staged", version=swarm.version)
    swarm.live([peer])
    swarm.exact(peer)
    joined = max(e.time_s for e in swarm.events[HUB].reported if e.kind == "joined" and e.facts["peer"] == peer)
    received = [e.time_s for e in swarm.events[peer].reported if e.kind == "received"]
    return SyncPath(name, rate, len(received), run.received(), max(received) - joined, ready.time_s - joined)


def at_scale(paths: Sequence[SyncPath], state_bytes: int, context: Cost, given: Parameters) -> Iterator[SyncPath]:
    """The same paths for the paper's model over its link, computed. Bytes grow with the state, and keep their measured
    ratio of time to bare rate. ``p2pcast.codec.codec_prediction`` predicts encoding, transfer and decoding of a delta
    from the measured speed of one core and ``paper_cores`` at either end. A whole state is checked as it arrives.
    """
    grown = given.paper_bytes / state_bytes
    slowest = min(path.rate_bps for path in paths)
    cold = next(path for path in paths if path.name == COLD and path.rate_bps == slowest)
    carried_bps = given.paper_bps * 8 * cold.bytes / cold.rate_bps / cold.received_s
    for path in paths:
        if path.rate_bps != slowest:
            continue
        nbytes = path.bytes * grown
        carried_s = 8 * nbytes / carried_bps
        cost = Cost(context.encode_bytes_s, context.decode_bytes_s, path.bytes / state_bytes)
        times = predict(
            cost,
            BroadcastPath(carried_bps, given.paper_cores, given.paper_cores),
            StateSize(round(given.paper_bytes), CELL_BYTES),
        )
        deltas = path.artifacts - (path.name in (COLD, SLOW))
        ready_s = times.whole_s if path.name == FAST else carried_s + deltas * times.decode_s
        yield SyncPath(path.name, given.paper_bps, path.artifacts, round(nbytes), carried_s, ready_s)


def measured_cost(before: Tensors, after: Tensors) -> Cost:
    """Cost of the context codec on these states: one core, CPU time."""
    states = [{name: words.reshape(-1) for name, (_, _, words) in each.items()} for each in (before, after)]
    layout = Layout(Tensor(name, kind, tuple(shape)) for name, (kind, shape, _) in before.items())
    timed = speeds(Dataset("trained", layout, states), "context", working_set_bytes=SAMPLED_BYTES, repeats=3)
    return Cost(timed["timed_bytes"] / timed["encode_s"], timed["timed_bytes"] / timed["decode_s"], 0.0)


def row(path: SyncPath, state_bytes: int, *, simulated: bool = False) -> dict[str, Any]:
    """``ready_to_whole``: time ÷ time of the whole state at the link's rate, which compares runs of any size."""
    whole_s = 8 * state_bytes / path.rate_bps
    return {
        "path": path.name,
        "simulated": simulated,
        "state_bytes": state_bytes,
        "rate_mbit_s": round(path.rate_bps / 1e6, 3),
        "artifacts": path.artifacts,
        "bytes": path.bytes,
        "times_smaller": round(state_bytes / path.bytes, 2) if path.bytes else None,
        "received_s": round(path.received_s, 4),
        "ready_s": round(path.ready_s, 4),
        "whole_s": round(whole_s, 4),
        "ready_to_whole": round(path.ready_s / whole_s, 5),
    }
