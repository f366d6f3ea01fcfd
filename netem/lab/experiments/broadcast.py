"""Broadcasts by p2pcast and its rivals over one network, undisturbed or with events during the broadcast, compared with
the tree model's prediction.

All systems are real processes: ``p2pcast seed``, ``p2pcast join``, and the rivals' own. There is one row per system,
with the medians of its broadcasts. With events, only p2pcast runs, with one row per version. The hub runs on host
``hub``, and a peer on every other host. Every p2pcast version is compared bit for bit at every peer; a difference fails
the case.

With events, two more columns count from the first event. ``silence_s`` is the longest time in which an unaffected,
incomplete peer received no piece. ``twice_bytes`` counts bytes sent again to peers that had them.

Columns in addition to those of ``netem.broadcast.rows``:

- ``half_rtts_s``: the sum of delays along the longest path from the hub.
- ``over_ideal``: the time to the last peer, less these delays, relative to the ideal time.
- ``predicted_s``: see ``netem.lab.model_prediction``.
- ``retransmitted``: the largest share of its sent bytes that any node had to retransmit.
- ``crowded``: whether busy processors, rather than links, determined the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from netem.broadcast.emulated_fleet import BroadcastFleet, FleetSetup, broadcast_fleet
from netem.broadcast.rivals import RIVALS
from netem.broadcast.rows import BroadcastSeries, left_out, row
from netem.emulation.description import HUB
from netem.emulation.namespaces import Namespaces
from netem.emulation.tables import filled
from netem.fleet.fleet import folders
from netem.lab.case_events import EventPlayer
from netem.lab.case_network import emulated
from netem.lab.model_prediction import FeedTree
from netem.lab.network_tables import NetworkEvent, events_of
from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.ground.limits import MIB

P2PCAST: Final = "p2pcast"
PLAINTEXT: Final = "p2pcast, plaintext"
SYSTEMS: Final = (P2PCAST, PLAINTEXT, *RIVALS)
CHAINED: Final = ("chain", "shardcast")
"""Rivals arranged in chains; the hub feeds the peers of the others directly."""
CROWDED: Final = 0.9
"""Share of the machine's processors in use; above it, processors affect the times."""
IDLE_S: Final = 0.4
IDLE_ROUND_TRIPS: Final = 4
"""Pause before each version. The pause exceeds TCP's retransmission timer, so congestion windows are as between
versions of a slower trainer.
"""


@dataclass(frozen=True, slots=True)
class Parameters:
    """``chains``, ``stripes``: 0 leaves the choice to p2pcast; rivals get as many chains as the hub's link can feed.
    ``warm_up``: versions before the counted ones. ``rate_stated``: whether an option gives the hub its link's rate;
    otherwise the hub measures it. ``absent``: hosts whose peers start with an event.
    """

    payload_mib: float
    systems: tuple[str, ...] = (P2PCAST,)
    rounds: int = 3
    warm_up: int = 2
    chains: int = 0
    stripes: int = 0
    codec: str = "flat"
    rate_stated: bool = True
    absent: tuple[str, ...] = ()

    def check(self, events: list[NetworkEvent]) -> None:
        if strange := [name for name in self.systems if name not in SYSTEMS]:
            raise UsageError(f"parameters.systems: there is no {strange[0]!r}, but {', '.join(SYSTEMS)}")
        if events and (rivals := [name for name in self.systems if name in RIVALS]):
            raise UsageError(f"parameters.systems: events apply to p2pcast alone, not to {rivals[0]!r}")
        if not 0.25 <= self.payload_mib <= 1024:
            raise UsageError(f"parameters.payload_mib is {self.payload_mib:g}: it must be from 0.25 to 1024")
        if not (1 <= self.rounds <= 100 and 0 <= self.warm_up <= 100 and self.chains >= 0 and self.stripes >= 0):
            raise UsageError("parameters.rounds must be from 1 to 100, warm_up to 100, chains and stripes not below 0")
        if late := [event.version for event in events if (event.version or 0) > self.rounds]:
            raise UsageError(f"an event is set for version {late[0]}: there are {self.rounds}")


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield ``{calibration, off}``, then ``{row}`` for each system or version. Call it from the main thread. Raises
    UsageError, LocalError, IntegrityError.
    """
    given = filled(Parameters, argument["parameters"], "parameters")
    events = events_of(argument)
    given.check(events)
    with emulated(argument) as (net, calibrated):
        if HUB not in (host.name for host in net.network.hosts):
            raise UsageError(f"hosts: one must be called {HUB!r}")
        if unknown := set(given.absent) - set(net.network.peers):
            raise UsageError(f"parameters.absent: there is no host {min(unknown)!r}")
        # Links as fast as the machine have no ideal time to compare with.
        _ = FeedTree(net.network, dict.fromkeys(net.network.peers, HUB)).peer_bps
        yield calibrated
        if calibrated["off"]:
            return
        for system in given.systems:
            with folders() as (folder, memory):
                if system in RIVALS:
                    yield {"row": _rival(net, given, system, folder)}
                    continue
                for each in _p2pcast(net, given, events, folder, memory, plaintext=system == PLAINTEXT):
                    yield {"row": each}


def _p2pcast(
    net: Namespaces, given: Parameters, events: list[NetworkEvent], folder: Path, memory: Path, *, plaintext: bool
) -> Iterator[dict[str, Any]]:
    setup = FleetSetup(
        round(given.payload_mib * MIB),
        net.network.link(HUB).up_bps if given.rate_stated else None,
        plaintext=plaintext,
        chains=given.chains or None,
        stripes=given.stripes or None,
        codec=given.codec,
        absent=frozenset(given.absent),
    )
    system = PLAINTEXT if plaintext else P2PCAST
    with broadcast_fleet(net, folder, memory, setup) as fleet:
        for _ in range(given.warm_up):
            _idle(net)
            fleet.publish()
        if events:
            yield from _faulted(net, given, events, fleet, system)
            return
        rounds, trees = [], []
        for _ in range(given.rounds):
            _idle(net)
            trees.append(_tree(net, fleet))
            rounds.append(fleet.publish())
        ran = BroadcastSeries(system, fleet.sent_bytes, rounds, {"codec": fleet.status()["last"]["codec"]})
        made = _row(net, ran, trees[-1], lambda tree: tree.predicted_s(ran.payload_bytes))
        yield made | {"stripes": trees[-1].stripes, "retransmitted": round(_retransmitted(fleet), 4)}


def _faulted(
    net: Namespaces, given: Parameters, events: list[NetworkEvent], fleet: BroadcastFleet, system: str
) -> Iterator[dict[str, Any]]:
    """Broadcast one version after another, each with its events."""
    with EventPlayer(net, fleet) as timeline:
        for event in (event for event in events if event.version is None):
            timeline.apply(event)
        for version in range(1, given.rounds + 1):
            _idle(net)
            due = [event for event in events if event.version == version]
            tree, twice = _tree(net, fleet), fleet.twice_bytes()
            began: list[float] = []

            def during(began_s: float, due: list[NetworkEvent] = due, began: list[float] = began) -> None:
                began.append(began_s)
                timeline.play(due, began_s)

            with timeline.sampling() as watch:
                done = fleet.publish(during=during)
            ran = BroadcastSeries(system, fleet.sent_bytes, [done])
            made = _row(net, ran, tree, lambda tree, ran=ran, due=due: tree.predicted_s(ran.payload_bytes, due))  # type: ignore[misc]
            struck_s = began[0] + min((event.at_s for event in due), default=0.0)
            befallen = {event.place for event in due if event.do != "degrade"}
            done_s = {
                host.name: began[0] + done.by_peer_s[host.name]
                for host in net.network.hosts
                if host.name in done.by_peer_s and not befallen & {host.name, host.region}
            }
            silences = watch.silences_s(struck_s, done_s, piece_bytes(ran.payload_bytes))
            made |= {
                "peers": len(done.by_peer_s),
                "version": version,
                "events": "; ".join(f"{event.do} {event.place} at {event.at_s:g} s" for event in due),
                "silence_s": round(max(silences.values(), default=0.0), 3),
                "twice_bytes": sent_twice(twice, fleet.twice_bytes()),
            }
            yield made


def sent_twice(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Return the bytes counted by all peers between two readings. A counter restarts with its process."""
    return sum(count - (was if (was := before.get(peer, 0)) <= count else 0) for peer, count in after.items())


def _tree(net: Namespaces, fleet: BroadcastFleet) -> FeedTree:
    """Return the hub's current plan, with the links in use."""
    stripes = [
        int(link["stripes_in_use"]) for links in fleet.links().values() for link in links if link["role"] == "child"
    ]
    return FeedTree(net.network, fleet.parents(), round(median(stripes)) if stripes else 1)


def _retransmitted(fleet: BroadcastFleet) -> float:
    """Return the largest share of retransmitted bytes in what a node sent to its children over its current links."""
    shares = [0.0]
    for links in fleet.links().values():
        sent = [
            (int(link["sent_bytes"]), float(link["retransmitted"] or 0.0)) for link in links if link["role"] == "child"
        ]
        if whole := sum(count for count, _ in sent):
            shares.append(sum(count * share for count, share in sent) / whole)
    return max(shares)


def _rival(net: Namespaces, given: Parameters, system: str, folder: Path) -> dict[str, Any]:
    peers = net.network.peers
    chains = min(len(peers), given.chains or _chains(net))
    _idle(net)
    try:
        ran = RIVALS[system](net, round(given.payload_mib * MIB), given.rounds, chains, folder)
    except LocalError as error:
        # A missing package or a failed rival does not stop the comparison of the others.
        return left_out(system, len(peers), str(error))
    above = {peer: peers[at - chains] if at >= chains and system in CHAINED else HUB for at, peer in enumerate(peers)}
    return _row(net, ran, FeedTree(net.network, above), None)


def _chains(net: Namespaces) -> int:
    """Return how many chains the hub's link can feed at a peer's full rate."""
    up_bps = net.network.link(HUB).up_bps
    slowest = min(
        (link.down_bps for peer in net.network.peers if (link := net.network.link(peer)).down_bps is not None),
        default=None,
    )
    return 1 if up_bps is None or slowest is None else max(1, int(up_bps / slowest))


def _row(
    net: Namespaces, ran: BroadcastSeries, tree: FeedTree, predict: Callable[[FeedTree], float | None] | None
) -> dict[str, Any]:
    made = row(ran, len(tree.above), tree.peer_bps)
    half_rtts_s, all_s = tree.half_rtts_s, made["all_s"]
    predicted_s = None if predict is None else predict(tree)
    made["codec"] = made.pop("settings").get("codec")
    made["every_s"] = " ".join(f"{max(each.times_s):.2f}" for each in ran.rounds)
    del made["every_over_ideal"]
    return made | {
        "chains": tree.chains,
        "depth": tree.depth,
        "half_rtts_s": round(half_rtts_s, 4),
        "over_ideal": round((all_s - half_rtts_s) / made["ideal_s"], 4),
        "predicted_s": None if predicted_s is None else round(predicted_s, 4),
        "predicted_over_measured": None if predicted_s is None else round(predicted_s / all_s, 4),
        "crowded": median(each.busy for each in ran.rounds) > CROWDED,
    }


def _idle(net: Namespaces) -> None:
    longest_s = max((host.link.delay_s for host in net.network.hosts), default=0.0)
    trunk_s = max((region.link.delay_s for region in net.network.regions), default=0.0)
    time.sleep(IDLE_S + IDLE_ROUND_TRIPS * 4 * (longest_s + trunk_s))
