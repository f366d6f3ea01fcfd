"""p2pcast on an emulated network: a hub and its peers as users start them, and versions of which every byte is new.

Promises: each version travels as a delta of about the payload's size, since all words are random and new. A peer's time
runs from the hub's first step of publishing, before any encoding, until the peer has verified all pieces. A second time
runs until the version is on disk, decoded and staged. After each version the installed weights are compared with the
trainer's, bit for bit. All clocks are this machine's.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from netem.broadcast.cpu import Meter
from netem.broadcast.daemons import Daemons
from netem.broadcast.host_http import HTTP_PORT, document, events
from netem.broadcast.rivals import HUB, peers_of
from netem.broadcast.rows import Broadcast, BroadcastSeries
from netem.broadcast.weights import NewWeights, Tensors
from netem.emulation.description import Emulated
from p2pcast.checkpoint.folder import Checkpoint
from p2pcast.checkpoint.folder_form import STABLE
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version

HUB_PORT, PEER_PORT = 7077, 7079
LIMIT_S = 300.0
"""Long enough for the first daemon on a machine to compile kernels while all daemons start at once."""
POLL_S = 0.05
HTTP_S = 10.0
BALLAST = 4
"""Weights that never change, in payloads. Late peers fetch them for so long that they are still busy when a broadcast
ends.
"""
FETCHED = 0.05
"""Share of the anchor that late peers have when a broadcast begins."""
WARM_UP = 1
"""Uncounted deltas: connections open their windows, and kernels are read from their cache."""


@dataclass(frozen=True, slots=True)
class Setup:
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


class Fleet:
    """``folder``: for all files. ``weights``: returns the state of each next version; by default all words of a
    payload are new. Call ``start``, then ``publish`` for each version; ``Daemons`` ends the processes.
    """

    def __init__(
        self,
        net: Emulated,
        daemons: Daemons,
        folder: Path,
        memory: Path,
        setup: Setup,
        weights: Callable[[], Tensors] | None = None,
    ) -> None:
        self.setup = setup
        hosts = peers_of(net)
        early = len(hosts) - setup.late
        self._early, self._late = hosts[:early], hosts[early:]
        self._running: set[str] = set()
        """Peers that run and are not stopped, late peers excluded."""
        self._frozen: set[str] = set()
        self._cut: set[str] = set()
        self.fetching: list[float] = []
        """For each broadcast beside late peers: the share of them that were still catching up at its end."""
        self._net, self._daemons = net, daemons
        self._folder, self._memory = folder, memory
        self._payload_bytes = setup.payload_bytes
        self._weights = NewWeights(setup.payload_bytes, BALLAST if setup.late else 0) if weights is None else weights
        self.step = 0
        """Of the newest version."""
        self.saved_at_s = 0.0
        """Unix time when the newest folder was renamed into place."""
        self.sent_bytes = 0
        """Size of the newest version's artifact."""
        (folder / "train").mkdir()

    @property
    def there(self) -> list[str]:
        """Hosts whose peer is expected to get the next version: it runs, is not stopped, and can be reached."""
        return [host for host in self._early if host in self._running and host not in self._cut]

    # -- daemons

    def start(self) -> None:
        """Start the hub, publish a first whole state, start the peers; returns when all peers have it."""
        self.save()
        token = self._folder / "token"
        words: list[str | Path] = ["--token-file", token, "--codec", self.setup.codec]
        if self.setup.uplink_bps is not None:
            words += ["--uplink", f"{self.setup.uplink_bps:.0f}"]
        if self.setup.chains is not None:
            words += ["--chains", str(self.setup.chains)]
        self._daemon(HUB, "seed", self._folder / "train", "--listen", f"0.0.0.0:{HUB_PORT}", *words)
        self._until(token.exists, "the hub's token")
        for peer in self._early:
            if peer not in self.setup.absent:
                self._join(peer)
                self._running.add(peer)
        self.until_live(self.there)

    def _join(self, peer: str) -> None:
        region = next(host.region for host in self._net.network.hosts if host.name == peer)
        words: list[str | Path] = ["--install", f"safetensors:{self.installed(peer)}", "--keep", "1", "--name", peer]
        if region is not None:
            words += ["--region", region]
        if self.setup.stripes is not None:
            words += ["--stripes", str(self.setup.stripes)]
        hub = f"{self._net.network.address(HUB)}:{HUB_PORT}"
        self._daemon(
            peer, "join", hub, "--listen", f"0.0.0.0:{PEER_PORT}", "--token-file", self._folder / "token", *words
        )  # fmt: skip

    def _join_late(self) -> None:
        """Start the late peers; returns when each of them fetches missing data."""
        enough = FETCHED * (1 + BALLAST) * self._payload_bytes
        for peer in self._late:
            self._join(peer)

        def fetching() -> bool:
            with contextlib.suppress(OSError):
                return all(self._get(peer, "/status", HTTP_S)["bytes_received"] >= enough for peer in self._late)
            return False

        self._until(fetching, "late peers that fetch")

    def _leave_late(self) -> None:
        """Stop the late peers, which have caught up, bit for bit. Raises IntegrityError if a late peer received bytes
        twice.
        """
        for peer in self._late:
            if twice := self._get(peer, "/status", HTTP_S)["bytes_duplicate"]:
                raise IntegrityError(f"{peer} received {twice} bytes twice")
        self._daemons.stop(*self._late)
        for peer in self._late:
            for folder in (self._folder / "state" / peer, self._memory / peer, self.installed(peer)):
                shutil.rmtree(folder, ignore_errors=True)

    def _daemon(self, host: str, *words: str | Path) -> None:
        every: list[str | Path] = [*words, "--http", f"127.0.0.1:{HTTP_PORT}"]
        every += ["--state", self._folder / "state" / host, "--shadow", self._memory / host]
        if self.setup.plaintext:
            every.append("--plaintext")
        self._daemons.start(host, every, self._net.space(host))

    # -- faults

    def kill(self, peer: str) -> None:
        """Kill the peer's process group at once; files on disk remain."""
        self._signal(peer, signal.SIGKILL)
        self._frozen.discard(peer)

    def freeze(self, peer: str) -> None:
        self._signal(peer, signal.SIGSTOP)
        self._frozen.add(peer)

    def thaw(self, peer: str) -> None:
        """Continue a frozen peer, unless it was killed meanwhile."""
        if peer in self._frozen:
            self._frozen.remove(peer)
            self._daemons.daemons[peer].signal(signal.SIGCONT)
            self._daemons.daemons[peer].expected = False
            self._running.add(peer)

    def join(self, peer: str) -> None:
        """Start a peer: an absent one, or a killed one with its stored state."""
        self._join(peer)
        self._running.add(peer)

    def expect(self, peer: str, *, there: bool) -> None:
        """Set whether a host can be reached. Versions are awaited at a reachable host with a running peer."""
        if there:
            self._cut.discard(peer)
        else:
            self._cut.add(peer)

    def _signal(self, peer: str, number: signal.Signals) -> None:
        self._daemons.daemons[peer].expected = True
        self._daemons.daemons[peer].signal(number)
        self._running.discard(peer)

    def installed(self, peer: str) -> Path:
        """The folder into which the peer installs."""
        return self._folder / "peers" / peer

    def status(self) -> dict[str, Any]:
        """The hub's status; empty while the hub does not answer."""
        with contextlib.suppress(OSError):
            return self._get(HUB, "/status", HTTP_S)
        return {}

    def _get(self, host: str, path: str, timeout_s: float) -> dict[str, Any]:
        self._daemons.check()
        try:
            return document(self._net, host, path, timeout_s)
        except LocalError as error:
            raise self._daemons.daemons[host].failure(str(error)) from None

    def _until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not done():
            self._daemons.check()
            if time.monotonic() > deadline:
                raise self._daemons.daemons[HUB].failure(f"no {what} within {LIMIT_S:.0f} s")
            time.sleep(POLL_S)

    # -- versions

    def save(self, before_rename: Callable[[], None] = lambda: None) -> Path:
        """Save the next version as a trainer does, with STABLE written last."""
        part, folder = self._folder / "part", self._folder / "train" / f"step_{self.step}"
        part.mkdir()
        self.write(part)
        (part / STABLE).touch()
        before_rename()
        self.saved_at_s = time.time()
        part.rename(folder)
        return folder

    def write(self, folder: Path) -> None:
        """Write the next state into a new folder."""
        save_file(self._weights(), folder / "model.safetensors")

    def until_live(self, hosts: Sequence[str]) -> None:
        """Return when all hosts have installed the newest version."""
        version = str(Version(0, self.step))

        def live() -> bool:
            committed = {peer["name"]: peer["committed"] for peer in self.status().get("peers", [])}
            return all(committed.get(host) == version for host in hosts)

        self._until(live, f"{version} at {len(hosts)} peers")

    def publish(self, *, beside: bool = False, during: Callable[[float], None] | None = None) -> Broadcast:
        """Publish one more version to all peers and check it. ``beside``: while late peers catch up; their times are
        not included. ``during`` is called with the opening time and may disturb peers; the peers that are then
        available are awaited.

        Raises IntegrityError if a peer installed other bytes, or received bytes twice.
        """
        if beside:
            self._join_late()
        self.step += 1
        version = str(Version(0, self.step))
        meter = Meter(self._daemons.pids)
        saved = self.save()
        began_s = float(self.events_of(HUB, "opened", version)["opened"]["time"])
        if during is not None:
            during(began_s)
        reported = {peer: self.events_of(peer, "staged", version) for peer in self.there}
        cpu_s, busy = meter.processes_s(), meter.busy()
        if beside:
            self.fetching.append(
                sum(self._get(peer, "/status", HTTP_S)["staged"] is None for peer in self._late) / len(self._late)
            )
        times_s = {peer: _received(events) - began_s for peer, events in reported.items()}
        staged_s = max(float(events["staged"]["time"]) for events in reported.values()) - began_s
        everybody = [*self.there, *(self._late if beside else ())]
        self.until_live(everybody)
        for peer in everybody:
            check(saved, self.installed(peer) / saved.name)
        if beside:
            self._leave_late()
        self.sent_bytes = int(self.status()["last"]["bytes"])
        shutil.rmtree(saved)
        return Broadcast(list(times_s.values()), cpu_s, busy, staged_s, times_s)

    def parents(self) -> dict[str, str]:
        """Parent of each available peer by the hub's plan: another peer, or ``HUB``."""
        return {p["name"]: p["parent"] for p in self.status()["peers"] if p["name"] in self.there}

    def links(self) -> dict[str, list[dict[str, Any]]]:
        """Links of the hub and of each available peer, from their status."""
        return {host: list(self._get(host, "/status", HTTP_S)["links"]) for host in (HUB, *self.there)}

    def twice_bytes(self) -> dict[str, int]:
        """Bytes that each available peer has received twice since its start."""
        return {peer: int(self._get(peer, "/status", HTTP_S)["bytes_duplicate"]) for peer in self.there}

    def events_of(self, host: str, last: str, version: str) -> dict[str, dict[str, Any]]:
        """Events of that version at the host by kind, up to the event ``last``, which is awaited; ``time``: Unix time.
        A process that was just started gets time to answer.
        """
        found: dict[str, dict[str, Any]] = {}
        why = "the stream ended"
        try:
            self._until(lambda: self._answers(host), f"answer of {host}")
            with events(self._net, host, LIMIT_S, LIMIT_S) as every:
                for kind, facts in every:
                    if facts.get("version") == version:
                        found[kind] = facts
                        if kind == last:
                            return found
        except OSError as error:
            why = str(error)
        raise self._daemons.daemons[host].failure(f"{host} reported no {last} of {version}: {why}")

    def _answers(self, host: str) -> bool:
        try:
            self._net.connect(host, ("127.0.0.1", HTTP_PORT), HTTP_S).close()
        except ConnectionRefusedError:
            return False
        return True


def _received(events: dict[str, dict[str, Any]]) -> float:
    """Time of the last verified piece; if the peer restarted during the version, time of staging."""
    if "receiving" in events and "received" in events:
        return float(events["receiving"]["time"] + events["received"]["took_s"])
    return float(events["staged"]["time"])


def check(saved: Path, installed: Path) -> None:
    """Check that both folders hold the same weights. Raises IntegrityError."""
    ours, theirs = Checkpoint.open(saved), Checkpoint.open(installed)
    layout = ours.layout()
    if theirs.layout() != layout or any(
        not np.array_equal(ours.words(cell), theirs.words(cell)) for cell in layout.cells
    ):
        raise IntegrityError(f"{installed} differs from the published {saved.name}")


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
    (folder / "logs").mkdir()
    with Daemons(folder / "logs") as daemons:
        fleet = Fleet(net, daemons, folder, memory / "shadows", Setup(payload_bytes, uplink_bps, late, plaintext))
        fleet.start()
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
