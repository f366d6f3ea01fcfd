"""Measured broadcasts of p2pcast on an emulated network, of versions of which every byte is new.

Promises: each version travels as a delta of about the payload's size, since all words are random and new. A peer's time
runs from the hub's first step of publishing, before any encoding, until the peer has verified all pieces. A second time
runs until the version is on disk, decoded and staged. After each version the installed weights are compared with the
trainer's, bit for bit. All clocks are this machine's.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netem.broadcast.cpu import CpuMeter
from netem.broadcast.rows import BroadcastSeries, MeasuredBroadcast
from netem.emulation.description import HUB, Emulated
from netem.fleet.daemon_http import ReportedEvent
from netem.fleet.fleet import Fleet, Hosts, check_same
from netem.fleet.processes import Processes
from netem.fleet.saved_weights import Tensors, noise
from p2pcast.ground.errors import IntegrityError

BALLAST = 4
"""Weights that never change, in payloads. Late peers fetch them for so long that they are still busy when a broadcast
ends.
"""
FETCHED = 0.05
"""Share of the anchor that late peers have when a broadcast begins."""
WARM_UP = 1
"""Uncounted deltas: connections open their windows, and kernels are read from their cache."""


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """``uplink_bps``: the hub's link rate as told to the hub; None: the hub measures it. ``chains``, ``stripes``: None
    is p2pcast's own choice. ``late``: number of hosts, the last ones, whose peers run only during broadcasts beside
    which they catch up. ``absent``: hosts without a peer until ``join``.
    """

    payload_bytes: int
    uplink_bps: float | None = None
    late: int = 0
    plaintext: bool = False
    chains: int | None = None
    stripes: int | None = None
    codec: str = "auto"
    absent: frozenset[str] = frozenset()


class BroadcastFleet(Fleet):
    """``weights``: the states of the versions; by default all words of a payload are new. Call ``begin``, then
    ``publish`` for each version.
    """

    def __init__(
        self,
        net: Emulated,
        processes: Processes,
        folder: Path,
        memory: Path,
        setup: FleetSetup,
        weights: Iterator[Tensors] | None = None,
    ) -> None:
        super().__init__(Hosts(net), processes, folder, memory, ["--plaintext"] if setup.plaintext else [])
        self.setup = setup
        hosts = net.network.peers
        early = len(hosts) - setup.late
        self._early, self._late = hosts[:early], hosts[early:]
        self._running: set[str] = set()
        """Peers that run and are not stopped, late peers excluded."""
        self._frozen: set[str] = set()
        self._cut: set[str] = set()
        self.fetching: list[float] = []
        """For each broadcast beside late peers: the share of them that were still catching up at its end."""
        self._regions = {host.name: host.region for host in net.network.hosts}
        self._weights = noise(setup.payload_bytes, BALLAST if setup.late else 0) if weights is None else weights
        self.sent_bytes = 0
        """Size of the newest version's artifact."""

    @property
    def there(self) -> list[str]:
        """Hosts whose peer is expected to get the next version: it runs, is not stopped, and can be reached."""
        return [host for host in self._early if host in self._running and host not in self._cut]

    def begin(self) -> None:
        """Start the hub, publish a first whole state, start the peers; returns when all peers have it."""
        self.save(next(self._weights))
        words = ["--codec", self.setup.codec]
        if self.setup.uplink_bps is not None:
            words += ["--uplink", f"{self.setup.uplink_bps:.0f}"]
        if self.setup.chains is not None:
            words += ["--chains", str(self.setup.chains)]
        self.hub(self.trained, *words)
        self.until_joinable()
        for peer in self._early:
            if peer not in self.setup.absent:
                self.join(peer)
        self.live(self.there)

    def _start(self, peer: str) -> None:
        words = [] if (region := self._regions[peer]) is None else ["--region", region]
        if self.setup.stripes is not None:
            words += ["--stripes", str(self.setup.stripes)]
        self.peer(peer, *words)

    def _join_late(self) -> None:
        """Start the late peers; returns when each of them fetches missing data."""
        enough = FETCHED * (1 + BALLAST) * self.setup.payload_bytes
        for peer in self._late:
            self._start(peer)

        def fetching() -> bool:
            with contextlib.suppress(OSError):
                return all(self.get(peer)["bytes_received"] >= enough for peer in self._late)
            return False

        self.until(fetching, "late peers that fetch")

    def _leave_late(self) -> None:
        """Stop the late peers, which have caught up, bit for bit. Raises IntegrityError if a late peer received bytes
        twice.
        """
        for peer in self._late:
            if twice := self.twice([peer]):
                raise IntegrityError(f"{peer} received {twice} bytes twice")
        self.leave(*self._late)
        for peer in self._late:
            self.forget(peer)

    # -- faults

    def kill(self, name: str) -> None:
        super().kill(name)
        self._running.discard(name)
        self._frozen.discard(name)

    def freeze(self, name: str) -> None:
        super().freeze(name)
        self._running.discard(name)
        self._frozen.add(name)

    def thaw(self, name: str) -> None:
        """Continue a frozen peer, unless it was killed meanwhile."""
        if name in self._frozen:
            self._frozen.remove(name)
            super().thaw(name)
            self._running.add(name)

    def join(self, peer: str) -> None:
        """Start a peer: an absent one, or a killed one with its stored state."""
        self._start(peer)
        self._running.add(peer)

    def expect(self, peer: str, *, there: bool) -> None:
        """Set whether a host can be reached. Versions are awaited at a reachable host with a running peer."""
        if there:
            self._cut.discard(peer)
        else:
            self._cut.add(peer)

    # -- versions

    def status(self) -> dict[str, Any]:
        """The hub's status; empty while the hub does not answer."""
        with contextlib.suppress(OSError):
            return self.get(HUB)
        return {}

    def publish(self, *, beside: bool = False, during: Callable[[float], None] | None = None) -> MeasuredBroadcast:
        """Publish one more version to all peers and check it. ``beside``: while late peers catch up; their times are
        not included. ``during`` is called with the opening time and may disturb peers; the peers that are then
        available are awaited.

        Raises IntegrityError if a peer installed other bytes, or received bytes twice.
        """
        if beside:
            self._join_late()
        meter = CpuMeter(self.processes.pids)
        saved = self.save(next(self._weights))
        began_s = self.wait_for(HUB, "opened", version=self.version).time_s
        if during is not None:
            during(began_s)
        reported = {peer: self.moments(peer, "staged") for peer in self.there}
        cpu_s, busy = meter.processes_s(), meter.busy()
        if beside:
            self.fetching.append(sum(self.get(peer)["staged"] is None for peer in self._late) / len(self._late))
        times_s = {peer: _received(events) - began_s for peer, events in reported.items()}
        staged_s = max(events["staged"].time_s for events in reported.values()) - began_s
        everybody = [*self.there, *(self._late if beside else ())]
        self.until(lambda: self._committed(everybody), f"{self.version} at {len(everybody)} peers")
        for peer in everybody:
            check_same(saved, self.installed(peer) / saved.name)
        if beside:
            self._leave_late()
        self.sent_bytes = int(self.status()["last"]["bytes"])
        shutil.rmtree(saved)
        return MeasuredBroadcast(list(times_s.values()), cpu_s, busy, staged_s, times_s)

    def _committed(self, peers: list[str]) -> bool:
        """Whether the hub knows that all these peers have installed the newest version."""
        committed = {peer["name"]: peer["committed"] for peer in self.status().get("peers", [])}
        return all(committed.get(peer) == self.version for peer in peers)

    def parents(self) -> dict[str, str]:
        """Parent of each available peer by the hub's plan: another peer, or ``HUB``."""
        return {p["name"]: p["parent"] for p in self.status()["peers"] if p["name"] in self.there}

    def links(self) -> dict[str, list[dict[str, Any]]]:
        """Links of the hub and of each available peer, from their status."""
        return {host: list(self.get(host)["links"]) for host in (HUB, *self.there)}

    def twice_bytes(self) -> dict[str, int]:
        """Bytes that each available peer has received twice since its start."""
        return {peer: self.twice([peer]) for peer in self.there}


def _received(events: Mapping[str, ReportedEvent]) -> float:
    """Time of the last verified piece; if the peer restarted during the version, time of staging."""
    if "receiving" in events and "received" in events:
        return float(events["receiving"].time_s + events["received"].facts["took_s"])
    return events["staged"].time_s


@contextlib.contextmanager
def broadcast_fleet(
    net: Emulated, folder: Path, memory: Path, setup: FleetSetup, weights: Iterator[Tensors] | None = None
) -> Iterator[BroadcastFleet]:
    """A fleet that has its first version, for the length of the block; with logs in the folder's ``logs``. From the
    main thread.
    """
    with Processes(folder / "logs") as processes:
        fleet = BroadcastFleet(net, processes, folder, memory, setup, weights)
        try:
            fleet.begin()
            yield fleet
        finally:
            fleet.close()


def p2pcast(
    net: Emulated,
    payload_bytes: int,
    rounds: int,
    uplink_bps: float,
    folder: Path,
    memory: Path,
    late: int = 0,
    *,
    plaintext: bool = False,
) -> list[BroadcastSeries]:
    """Broadcasts by p2pcast, behind TLS unless ``plaintext``. With ``late``, every other broadcast runs while so many
    peers, which are not counted, catch up from nothing. ``memory``: for shadows, in tmpfs.

    From the main thread. Raises LocalError, IntegrityError.
    """
    with broadcast_fleet(net, folder, memory, FleetSetup(payload_bytes, uplink_bps, late, plaintext)) as fleet:
        for _ in range(WARM_UP):
            fleet.publish()
        alone, beside = [], []
        for _ in range(rounds):
            alone.append(fleet.publish())
            if late:
                beside.append(fleet.publish(beside=True))
        status = fleet.status()
    settings = {"chains": status["chains"], "codec": status["last"]["codec"]}
    ran = [BroadcastSeries("p2pcast, plaintext" if plaintext else "p2pcast", fleet.sent_bytes, alone, settings)]
    if late:
        fetching = {"late": late, "still_fetching": fleet.fetching}
        ran.append(BroadcastSeries(f"p2pcast, {late} late", fleet.sent_bytes, beside, settings | fetching))
    return ran
