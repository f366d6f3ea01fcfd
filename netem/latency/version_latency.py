"""Small versions from one trainer to all peers of an emulated network, moment by moment. A backend with namespaces runs
this module: this machine's kernel, or user-mode Linux.

Promises: every moment is read from the daemons' own events, on one clock. A version is live where the peer's installer
has installed it, and each installed version is compared with the trainer's, bit for bit.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from netem.broadcast.agents import Agents
from netem.broadcast.emulated_fleet import BroadcastFleet, FleetSetup, broadcast_fleet
from netem.broadcast.weights import SparseWeights
from netem.emulation.calibration import calibrated
from netem.emulation.description import HUB, EmulatedLink, star
from netem.emulation.namespaces import Namespaces, namespaces
from netem.fleet.fleet import HUB_PORT, check_same, folders
from netem.fleet.saved_weights import Tensors
from netem.latency import FOLDER

WORK = "netem.latency.version_latency:results"
MODULE = "netem.latency.live_trainer"
WARM_UP = 2
"""Versions of each size that are not counted."""
IDLE_S = 0.5
"""Pause before each version, as between the steps of a trainer."""
MOMENTS = ("opened", "receiving", "received", "staged", "live")
"""In order: the hub has begun the version; the last peer has its first message, its last piece, the next state whole,
and serves it.
"""


@dataclass(frozen=True, slots=True)
class LatencyCase:
    """``rtt_s``: between any two hosts. ``rate_bps``: of each link, each way. ``delta_bytes``: sizes of versions of a
    state of ``state_bytes``. ``source``: of SOURCES.
    """

    source: str
    rtt_s: float
    rate_bps: float
    peers: int
    state_bytes: int
    delta_bytes: tuple[int, ...]
    rounds: int


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """``argument``: the fields of a ``LatencyCase``. Yields ``{calibration: …, off: […]}`` first, then ``{row: …}`` for
    each size. There are no rows if the network differs from the request. From the main thread. Raises LocalError,
    IntegrityError.
    """
    given = LatencyCase(**{**argument, "delta_bytes": tuple(argument["delta_bytes"])})
    link = EmulatedLink(given.rate_bps, given.rate_bps, given.rtt_s / 4)
    with namespaces(star(link, given.peers, link)) as net:
        measured = calibrated(net) if given.rtt_s else {"calibration": [], "off": []}
        yield measured
        if measured["off"]:
            return
        with _trainer(net, given) as (fleet, publish):
            for size in given.delta_bytes:
                yield {"row": _row(given, fleet, size, publish)}


Publish = Callable[[int], tuple[float, Path]]
"""Publishes the next version with a delta of about so many bytes. Returns the Unix time of its beginning, and a folder
with its weights.
"""


@contextmanager
def _trainer(net: Namespaces, given: LatencyCase) -> Iterator[tuple[BroadcastFleet, Publish]]:
    """A fleet that has the first state, and its trainer."""
    weights = SparseWeights(given.state_bytes, given.delta_bytes[0])
    setup = FleetSetup(given.delta_bytes[0], given.rate_bps)
    with (
        folders() as (folder, memory),
        broadcast_fleet(net, folder, memory, setup, _states(weights)) as fleet,
        Agents(net, MODULE) as agents,
    ):
        if given.source == FOLDER:
            yield fleet, _from_folder(fleet, weights)
            return
        settings = {
            "hub": f"127.0.0.1:{HUB_PORT}",
            "token_file": str(fleet.token),
            "base": str(fleet.trained / "step_0"),
            "state_bytes": given.state_bytes,
        }
        agents.start(HUB, "trainer", settings)
        agents.answers("ready")
        yield fleet, _from_publisher(fleet, agents, folder)


def _states(weights: SparseWeights) -> Iterator[Tensors]:
    while True:
        yield {name: ("F16", words.shape, words) for name, words in weights().items()}


def _from_folder(fleet: BroadcastFleet, weights: SparseWeights) -> Publish:
    states = _states(weights)

    def publish(size: int) -> tuple[float, Path]:
        weights.delta_bytes = size
        saved = fleet.save(next(states), IDLE_S)
        return fleet.saved_at_s, saved

    return publish


def _from_publisher(fleet: BroadcastFleet, agents: Agents, folder: Path) -> Publish:
    def publish(size: int) -> tuple[float, Path]:
        fleet.step += 1
        saved = folder / "published" / f"step_{fleet.step}"
        agents.send_order(step=fleet.step, delta_bytes=size, save=str(saved), idle_s=IDLE_S)
        return float(agents.answers("began_s")[HUB]), saved

    return publish


def _row(given: LatencyCase, fleet: BroadcastFleet, size: int, publish: Publish) -> dict[str, Any]:
    """Medians over the rounds, in seconds since the trainer's call or rename."""
    rounds = []
    for number in range(WARM_UP + given.rounds):
        began_s, saved = publish(size)
        moments = _moments(fleet, began_s)
        for peer in fleet.there:
            check_same(saved, fleet.installed(peer) / saved.name)
        shutil.rmtree(saved)
        if number >= WARM_UP:
            rounds.append(moments)
    sent = int(fleet.status()["last"]["bytes"])
    hops = depth(fleet.parents())
    transfer_s, half_trips_s = 8 * sent / given.rate_bps, hops * given.rtt_s / 2
    medians = {f"{name}_s": round(median(one[name] for one in rounds), 4) for name in rounds[0]}
    return {
        "source": given.source,
        "rtt_s": given.rtt_s,
        "delta_bytes": size,
        "bytes": sent,
        **medians,
        "every_live_s": [round(one["live"], 4) for one in rounds],
        "hops": hops,
        "transfer_s": round(transfer_s, 5),
        "half_trips_s": half_trips_s,
        "beyond_s": round(medians["live_s"] - transfer_s - half_trips_s, 4),
    }


def _moments(fleet: BroadcastFleet, began_s: float) -> dict[str, float]:
    peers = [fleet.moments(peer, "committed") for peer in fleet.there]
    hub = fleet.moments(HUB, "sealed")
    at = {
        "opened": hub["opened"].time_s,
        "receiving": max(one["receiving"].time_s for one in peers),
        "received": max(one["received"].time_s for one in peers),
        "staged": max(one["staged"].time_s for one in peers),
        "first_live": min(one["committed"].time_s for one in peers),
        "live": max(one["committed"].time_s for one in peers),
        "sealed": hub["sealed"].time_s,
    }
    return {name: when - began_s for name, when in at.items()}


def depth(parents: Mapping[str, str]) -> int:
    """Hops from the hub to the deepest peer. ``parents``: of each peer, by name."""

    def hops(peer: str) -> int:
        return 0 if peer == HUB else 1 + hops(parents[peer])

    return max(map(hops, parents), default=0)
