"""A fleet that just keeps a trainer busy, and the failure of one worker: during a broadcast in which it feeds others,
or between two versions.

ECHO-2's fault injection (appendix D, Table 4) has eight workers and none to spare. One worker slows to half its rate or
drops out; a replacement starts and takes its place. Here peers and versions are real, the fault comes at half of a
broadcast's ideal time, and the replacement has an older version on disk.

Measured times: ``silence_s``, the longest time in which an incomplete survivor received no piece. ``survivors_s``: from
opening until all peers except the victim had the version. ``delay_s``: ``survivors_s`` minus the time of an undisturbed
broadcast. ``replaced_s``: from starting the replacement until it had the newest version. ``recovery_s``: from the fault
until as many workers as before had the newest version.

Rows at the paper's scale come from the simulator, for an 8B model. ``sent`` has two values: whole states, as the
paper's trainer sends, and p2pcast's deltas. A replacement ``has`` nothing and fetches the state, or has an older
version and fetches the hub's squashes. It fetches at a worker's rate; ``least_s`` is the time of that fetch alone.

Workers continue with their current version during a broadcast. So only a dead worker's time is lost, and no other
admissible rollouts (one version of staleness is allowed): ``lost_worker_s``. ``kept``: the remaining share of all
workers' time in one training step, whose length has the paper's ratio to the broadcast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

from netem.broadcast.emulated_fleet import BroadcastFleet, FleetSetup, broadcast_fleet
from netem.emulation.description import HUB, EmulatedLink
from netem.emulation.namespaces import Namespaces, namespaces
from netem.fleet.fleet import folders
from netem.lab.case_events import EventPlayer
from netem.lab.experiments.broadcast import sent_twice
from netem.lab.experiments.fanout import SHARE, rates, sampled, shape
from netem.lab.scenario import filled, network_of
from netem.simulation.broadcast_replay import BroadcastFault, replay
from netem.simulation.fleet_simulator import FleetEvents
from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MIB
from p2pcast.relay.tuning import PULL_SHARE
from topology.plan_tree import ROOT

NONE: Final = "none"
WHOLE: Final = "whole states"
DELTAS: Final = "deltas"
NOTHING: Final = "nothing"
OLDER: Final = "an older version"
PLACES: Final = ("head", "middle", "tail")
KINDS: Final = {
    "kill": "the process is killed",
    "freeze": "the process is stopped (SIGSTOP)",
    "slow": "the link falls to half of its rate",
}
IDLE: Final = "kill idle"
SLOW_SHARE: Final = 0.5
STRUCK_AT: Final = 0.5
"""Time of the fault as a share of the ideal time."""
UP_S: Final = 60.0
SETTLING: Final = 2
"""Versions between two faults: the hub measures a returning peer's rate again, and may move the peer."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """``faults``: a kind and a place in the longest chain, or ``none``, or ``kill idle``. ``spare``: the replacement's
    host; the replacement starts ``replaced_after_s`` after a worker's death. ``step_ratio``: a training step ÷ the
    state's ideal broadcast. Shares of the state: ``delta_share``, a version's delta; ``behind_share``, fetched by a
    replacement with an older version.
    """

    payload_mib: float
    faults: tuple[str, ...]
    spare: str
    chains: int = 3
    rounds: int = 3
    replaced_after_s: float = 1.0
    step_ratio: float = 1500 / 1312
    paper_bytes: float = 16.4e9
    delta_share: float = 0.0113
    behind_share: float = 0.108
    paper_uplink_bps: float = 300e6
    paper_peer_bps: float = 100e6

    def check(self) -> None:
        known = {NONE, IDLE, *(f"{kind} {place}" for kind in KINDS for place in PLACES)}
        if strange := [fault for fault in self.faults if fault not in known]:
            raise UsageError(f"parameters.faults: there is no {strange[0]!r}, but {', '.join(sorted(known))}")


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    network = network_of(argument)
    uplink_bps, peer_bps = rates(network)
    with namespaces(network) as net:
        calibration = sampled(net)
        yield calibration
        if calibration["off"]:
            return
        if given.spare not in net.network.peers:
            raise UsageError(f"parameters.spare: there is no host {given.spare!r}")
        setup = FleetSetup(round(given.payload_mib * MIB), uplink_bps, chains=given.chains, codec="flat")
        with folders() as (folder, memory), broadcast_fleet(net, folder, memory, setup) as fleet:
            yield from ({"row": row} for row in _Training(net, fleet, given, peer_bps).rows())
    for fault in given.faults:
        yield from ({"row": row} for row in at_scale(given, fault, len(net.network.peers) - 1))


class _Training:
    def __init__(self, net: Namespaces, fleet: BroadcastFleet, given: Parameters, peer_bps: float) -> None:
        self._net, self._fleet, self._given = net, fleet, given
        self._ideal_s = 8 * given.payload_mib * MIB / peer_bps
        self._undisturbed_s = 0.0
        self._began_s = self._struck_s = 0.0
        self._replaced_s = 0.0

    def rows(self) -> Iterator[dict[str, Any]]:
        fleet, given = self._fleet, self._given
        fleet.publish()
        fleet.kill(given.spare)
        with EventPlayer(self._net, fleet) as self._timeline:
            calm = [max(fleet.publish().times_s) for _ in range(1 + given.rounds)]
            self._undisturbed_s = median(calm[1:])
            for fault in given.faults:
                yield self._undisturbed(calm[1:]) if fault == NONE else self._faulted(fault)
                for _ in range(SETTLING):
                    fleet.publish()

    def _undisturbed(self, times_s: Sequence[float]) -> dict[str, Any]:
        return self._row(NONE, "", {"survivors_s": median(times_s)})

    def _faulted(self, fault: str) -> dict[str, Any]:
        fleet, given = self._fleet, self._given
        kind, _, place = fault.partition(" ")
        chain = longest_chain(fleet.parents())
        victim = chain[{"head": 0, "tail": len(chain) - 1}.get(place, len(chain) // 2)]
        link, twice = self._net.network.link(victim), fleet.twice_bytes()
        if fault == IDLE:
            self._inject(kind, victim, link)
            self._replace(kind)
            ready_s = self._current(given.spare)
            made = self._row(fault, "between versions", self._replacement(ready_s))
        else:
            with self._timeline.sampling() as watch:
                done = fleet.publish(during=self._during(kind, victim, link))
            began_s = self._began_s
            survivors = {peer: s for peer, s in done.by_peer_s.items() if peer not in (victim, given.spare)}
            silences = watch.silences_s(
                self._struck_s, {peer: began_s + s for peer, s in survivors.items()}, piece_bytes(fleet.sent_bytes)
            )
            facts = {"survivors_s": max(survivors.values()), "delay_s": max(survivors.values()) - self._undisturbed_s}
            facts["silence_s"] = max(silences.values(), default=0.0)
            if kind == "kill":
                facts |= self._replacement(began_s + done.by_peer_s[given.spare])
            elif kind == "slow":
                facts["recovery_s"] = began_s + max(done.times_s) - self._struck_s
            made = self._row(fault, "broadcast", facts)
        made["twice_bytes"] = sent_twice(twice, fleet.twice_bytes())
        self._restore(kind, victim, link)
        return made

    def _replacement(self, ready_s: float) -> dict[str, float]:
        recovery_s = ready_s - self._struck_s
        return {"replaced_s": ready_s - self._replaced_s, "recovery_s": recovery_s, "lost_worker_s": recovery_s}

    def _row(self, fault: str, stage: str, facts: Mapping[str, float]) -> dict[str, Any]:
        workers = len(self._net.network.peers) - 1
        lost_s = facts.get("lost_worker_s", 0.0)
        step_s = self._given.step_ratio * self._ideal_s
        ratio = {"recovery_to_ideal": round(facts["recovery_s"] / self._ideal_s, 4)} if "recovery_s" in facts else {}
        return {
            "fault": fault, "stage": stage, "simulated": False, "workers": workers, "chains": self._given.chains,
            "ideal_s": round(self._ideal_s, 4), **{key: round(value, 4) for key, value in facts.items()},
            **ratio, "kept": round(1 - lost_s / (workers * max(step_s, lost_s)), 4),
        }  # fmt: skip

    def _during(self, kind: str, victim: str, link: EmulatedLink) -> Callable[[float], None]:
        def during(began_s: float) -> None:
            self._began_s = began_s
            time.sleep(max(0.0, began_s + STRUCK_AT * self._ideal_s - time.time()))
            self._inject(kind, victim, link)
            self._replace(kind)

        return during

    def _inject(self, kind: str, victim: str, link: EmulatedLink) -> None:
        self._struck_s = time.time()
        if kind == "kill":
            self._fleet.kill(victim)
        elif kind == "freeze":
            self._fleet.freeze(victim)
        else:
            assert link.up_bps is not None
            assert link.down_bps is not None
            slower = replace(link, up_bps=SLOW_SHARE * link.up_bps, down_bps=SLOW_SHARE * link.down_bps)
            self._net.reshape(victim, slower)

    def _replace(self, kind: str) -> None:
        """Start the spare peer if a worker has died."""
        if kind != "kill":
            return
        time.sleep(self._given.replaced_after_s)
        self._replaced_s = time.time()
        self._fleet.join(self._given.spare)
        self._up(self._given.spare)

    def _up(self, peer: str) -> None:
        """Return when the peer answers."""
        self._fleet.until(lambda: self._fleet.answers(peer), f"answer of {peer}", UP_S)

    def _current(self, peer: str) -> float:
        """Unix time at which the hub knew that the peer had staged the newest version."""

        def staged() -> bool:
            status = self._fleet.status()
            return any(p["name"] == peer and p["staged"] == status["version"] for p in status.get("peers", []))

        self._fleet.until(staged, f"newest version at {peer}", UP_S)
        return time.time()

    def _restore(self, kind: str, victim: str, link: EmulatedLink) -> None:
        """Restore the original state: the victim back in its place, the replacement stopped."""
        if kind == "slow":
            self._net.reshape(victim, link)
        elif kind == "freeze":
            self._fleet.thaw(victim)
        else:
            self._fleet.join(victim)
            self._up(victim)
            self._fleet.kill(self._given.spare)


def longest_chain(parents: Mapping[str, str]) -> list[str]:
    """The longest chain, from its head down."""
    ways: list[list[str]] = []
    for peer in parents:
        way = [peer]
        while (above := parents[way[0]]) != HUB and len(way) <= len(parents):
            way.insert(0, above)
        ways.append(way)
    return max(ways, key=len)


def at_scale(given: Parameters, fault: str, workers: int) -> Iterator[dict[str, Any]]:
    """The same fault at the paper's size over its links, in the simulator, which uses the decisions of hub and peers.
    No rows for faults that the simulator does not model.
    """
    if fault.startswith("freeze"):
        return
    for sent, share in ((WHOLE, 1.0), (DELTAS, given.delta_share)):
        made = _simulated(given, fault, workers, share * given.paper_bytes) | {"sent": sent}
        if not fault.startswith("kill"):
            yield made
            continue
        rest_s = made.pop("rest_s")
        for has, fetched in ((NOTHING, 1.0), (OLDER, given.behind_share)):
            if sent == DELTAS or has == NOTHING:
                yield made | _replaced(given, workers, fetched * given.paper_bytes, rest_s) | {"has": has}


def _simulated(given: Parameters, fault: str, workers: int, payload_bytes: float) -> dict[str, Any]:
    """A broadcast of ``payload_bytes``. ``rest_s``: remaining time of the broadcast when a replacement starts."""
    kind, _, place = fault.partition(" ")
    names = [f"p{n}" for n in range(1, workers + 1)]
    above = shape("chain", names, given.chains)
    chain = longest_chain(above)
    ideal_s = 8 * payload_bytes / given.paper_peer_bps
    facts = {
        "fault": fault,
        "simulated": True,
        "workers": workers,
        "chains": given.chains,
        "ideal_s": round(ideal_s, 1),
    }
    if fault == IDLE:
        return facts | {"stage": "between versions", "rest_s": 0.0}
    scenario = FleetEvents(
        peers=0, regions=1, payload_bytes=payload_bytes, uplink_bps=given.paper_uplink_bps * SHARE,
        peer_bps=given.paper_peer_bps * SHARE,
    )  # fmt: skip
    links = {peer: ROOT if over == HUB else over for peer, over in above.items()}
    victim = chain[{"head": 0, "tail": len(chain) - 1}.get(place, len(chain) // 2)]
    slow_bps = None if kind == "kill" else SLOW_SHARE * given.paper_peer_bps * SHARE
    struck_s = STRUCK_AT * ideal_s
    blows = [] if fault == NONE else [BroadcastFault(struck_s, victim, slow_bps)]
    times_s = replay(scenario, links, blows, given.chains, most_s=100 * ideal_s)
    calm_s = max(replay(scenario, links, [], given.chains, most_s=100 * ideal_s).values())
    last_s = max(s for peer, s in times_s.items() if peer != victim or not blows)
    facts |= {
        "stage": "" if fault == NONE else "broadcast",
        "survivors_s": round(last_s, 1),
        "delay_s": round(last_s - calm_s, 1),
    }
    if kind == "kill":
        return facts | {"rest_s": max(0.0, last_s - struck_s - given.replaced_after_s)}
    recovery_s = max(times_s.values()) - struck_s
    return (
        facts
        if fault == NONE
        else facts | {"recovery_s": round(recovery_s, 1), "recovery_to_ideal": round(recovery_s / _state_s(given), 4)}
    )


def _replaced(given: Parameters, workers: int, fetched_bytes: float, rest_s: float) -> dict[str, Any]:
    """Fetch time of a replacement. Several live peers serve it at its own rate; during a broadcast it gets only the
    small share that catch-up traffic is limited to.
    """
    bps, bits = given.paper_peer_bps * SHARE, 8 * fetched_bytes
    yielding_bps = PULL_SHARE * bps
    early = min(bits, yielding_bps * rest_s)
    fetch_s = early / yielding_bps if early == bits else rest_s + (bits - early) / bps
    recovery_s, least_s = given.replaced_after_s + fetch_s, bits / given.paper_peer_bps
    step_s = max(given.step_ratio * _state_s(given), recovery_s)
    return {
        "replaced_s": round(fetch_s, 1),
        "recovery_s": round(recovery_s, 1),
        "least_s": round(least_s, 1),
        "recovery_to_least": round(recovery_s / least_s, 4),
        "recovery_to_ideal": round(recovery_s / _state_s(given), 4),
        "kept": round(1 - recovery_s / (workers * step_s), 4),
    }


def _state_s(given: Parameters) -> float:
    """The paper's ideal broadcast: the whole state at a worker's rate."""
    return 8 * given.paper_bytes / given.paper_peer_bps
