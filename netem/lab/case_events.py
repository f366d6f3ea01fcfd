"""Applies a case's events to a fleet and its network during a broadcast, and measures how long peers received nothing.

Guarantee: when the block exits, the network is back to its original description, and no process is stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final

from netem.broadcast.emulated_fleet import BroadcastFleet
from netem.emulation.description import HUB
from netem.emulation.namespaces import DEVICE, Namespaces
from netem.lab.network_tables import NetworkEvent

SAMPLE_S: Final = 0.02
LINKS: Final = ("cut", "heal", "degrade")
"""Events on links, and not on processes."""


class EventPlayer:
    def __init__(self, net: Namespaces, fleet: BroadcastFleet) -> None:
        self._net, self._fleet = net, fleet
        self._described = net.network
        self._frozen: set[str] = set()
        self._cut: set[str] = set()

    def __enter__(self) -> EventPlayer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in list(self._frozen):
            self._fleet.thaw(peer)
        for name in list(self._cut):
            self._net.heal(name)
        for name in [
            *(host.name for host in self._described.hosts),
            *(region.name for region in self._described.regions),
        ]:
            if self._net.network.link(name) != self._described.link(name):
                self._net.reshape(name, self._described.link(name))

    def play(self, events: Sequence[NetworkEvent], began_s: float) -> None:
        """Apply each event at its time after ``began_s`` (Unix time)."""
        for event in events:
            time.sleep(max(0.0, began_s + event.at_s - time.time()))
            self.apply(event)

    def apply(self, event: NetworkEvent) -> None:
        fleet, place = self._fleet, event.place
        if event.do in LINKS:
            self._relink(event)
        elif event.do == "kill":
            fleet.kill(place)
        elif event.do == "stop":
            self._frozen.add(place)
            fleet.freeze(place)
        elif event.do == "continue":
            self._frozen.discard(place)
            fleet.thaw(place)
        else:
            fleet.join(place)

    def _relink(self, event: NetworkEvent) -> None:
        net, place = self._net, event.place
        if event.link is not None:
            net.reshape(place, event.link)
            return
        if event.do == "cut":
            self._cut.add(place)
            net.cut(place)
        else:
            self._cut.discard(place)
            net.heal(place)
            net.reshape(place, self._described.link(place))
        for host in self._described.hosts:
            if host.name != HUB and place in (host.name, host.region):
                self._fleet.expect(host.name, there=self._cut.isdisjoint((host.name, host.region)))

    @contextmanager
    def sampling(self) -> Iterator[ReceiveSampler]:
        sampler = ReceiveSampler(self._net, [host.name for host in self._described.hosts])
        sampler.start()
        try:
            yield sampler
        finally:
            sampler.stop()


class ReceiveSampler:
    """Records repeatedly how many bytes each host's device has received."""

    def __init__(self, net: Namespaces, hosts: Sequence[str]) -> None:
        # <namespace>/../../net/dev is /proc/PID/net/dev
        self._paths = {host: Path(net.space(host)).parents[1] / "net" / "dev" for host in hosts}
        self._seen: dict[str, list[tuple[float, int]]] = {host: [] for host in hosts}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="p2pcast-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            now = time.time()
            for host, path in self._paths.items():
                self._seen[host].append((now, _bytes_in(path)))

    def silences_s(self, since_s: float, until_s: Mapping[str, float], piece_bytes: int) -> dict[str, float]:
        """For each of these peers, return the longest time without a piece between ``since_s`` and completion (Unix
        times).
        """
        return {
            host: longest_silence_s(self._seen[host], since_s, end_s, piece_bytes)
            for host, end_s in until_s.items()
            if end_s > since_s
        }


def longest_silence_s(seen: Sequence[tuple[float, int]], since_s: float, until_s: float, enough_bytes: int) -> float:
    """Return the longest time during which fewer than ``enough_bytes`` arrived. ``seen``: (time, bytes so far)."""
    longest_s, mark_s, counted = 0.0, since_s, None
    for at_s, count in seen:
        if at_s < since_s:
            continue
        if at_s > until_s:
            break
        if counted is None:
            counted = count
        if count - counted >= enough_bytes:
            longest_s, mark_s, counted = max(longest_s, at_s - mark_s), at_s, count
    return max(longest_s, until_s - mark_s)


def _bytes_in(path: Path) -> int:
    """Return the bytes that a host's link has received, from its ``/proc/…/net/dev``."""
    try:
        line = next(line for line in path.read_text().splitlines() if line.lstrip().startswith(f"{DEVICE}:"))
    except (OSError, StopIteration):
        return 0
    return int(line.partition(":")[2].split()[0])
