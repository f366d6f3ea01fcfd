"""Rivals that get the whole state instead of a delta, and p2pcast on the same states.

A row's payload is the state. Its settings hold the traffic: ``moved_bytes``, the most received by one peer over its
link, headers included, and ``peer_sent_bytes``, the most sent by one peer. Every peer's final state is compared with
the hub's, bit for bit, after the clock has stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from netem.broadcast.agents import Agents
from netem.broadcast.dense_rivals import CHANGED, ZSTD_LEVEL, ZSTD_THREADS, first, rsync_options, stepped
from netem.broadcast.emulated_fleet import WARM_UP, FleetSetup, broadcast_fleet
from netem.broadcast.json_lines import PORT
from netem.broadcast.rivals import needed, run_broadcast
from netem.broadcast.rows import BroadcastSeries, MeasuredBroadcast
from netem.emulation.description import HUB, Emulated
from netem.fleet.saved_weights import Tensors
from p2pcast.ground.errors import IntegrityError


def rsync(net: Emulated, state_bytes: int, rounds: int, folder: Path) -> BroadcastSeries:
    """A daemon at the hub; every peer fetches the new file against its old one. Raises RivalMissingError,
    IntegrityError.
    """
    needed(command="rsync")
    options = rsync_options(net.network)
    given = {"state_bytes": state_bytes, "folder": str(folder), "hub": net.network.address(HUB), "options": options}
    with Agents(net) as hubs, Agents(net) as agents:
        _start(net, hubs, agents, "rsync", given)
        ran, moved = _rounds(hubs, agents, rounds, lambda number: agents.send_order(fetch=number))
    return BroadcastSeries("rsync", state_bytes, ran, {"options": " ".join(options), **moved})


def zstd(net: Emulated, state_bytes: int, rounds: int, folder: Path) -> BroadcastSeries:
    """The whole file from the hub over HTTP, compressed once while it is sent. Raises IntegrityError."""
    given = {"state_bytes": state_bytes, "folder": str(folder), "url": f"http://{net.network.address(HUB)}:{PORT}"}
    with Agents(net) as hubs, Agents(net) as agents:
        _start(net, hubs, agents, "zstd", given)

        def begin(number: int) -> None:
            hubs.send_order(publish=number)
            agents.send_order(fetch=number)

        ran, moved = _rounds(hubs, agents, rounds, begin)
    return BroadcastSeries(
        "zstd of the file", state_bytes, ran, {"level": ZSTD_LEVEL, "threads": ZSTD_THREADS, **moved}
    )


def _start(net: Emulated, hubs: Agents, agents: Agents, role: str, given: Mapping[str, Any]) -> None:
    hubs.start(HUB, f"{role}-hub", given)
    for peer in net.network.peers:
        agents.start(peer, role, given)
    for some in (hubs, agents):
        some.answers("ready")


def _rounds(
    hubs: Agents, agents: Agents, rounds: int, begin: Callable[[int], None]
) -> tuple[list[MeasuredBroadcast], dict[str, Any]]:
    """Broadcasts of the states after the common first one, and their traffic."""
    ran, came, sent = [], [], []
    for number in range(1, rounds + 1):
        hubs.send_order(save=True)
        hubs.answers("saved")
        ran.append(run_broadcast(agents, lambda number=number: begin(number), hubs))  # type: ignore[misc]
        hubs.send_order(facts=True)
        agents.send_order(facts=True)
        (hub,), peers = hubs.answers("facts").values(), agents.answers("facts")
        for host, facts in peers.items():
            if facts["digest"] != hub["digest"]:
                raise IntegrityError(f"{host} ended with other bytes than the hub's state {number}")
        came.append(max(facts["received_bytes"] for facts in peers.values()))
        sent.append(max(facts["sent_bytes"] for facts in peers.values()))
    return ran, _moved(came, sent)


def _moved(came: Sequence[int], sent: Sequence[int]) -> dict[str, Any]:
    return {"changed_share": CHANGED, "moved_bytes": round(median(came)), "peer_sent_bytes": round(median(sent))}


def _states(state_bytes: int) -> Iterator[Tensors]:
    """Yields the states as p2pcast publishes them: one bf16 tensor."""
    words = first(state_bytes // 2)
    for step in count(1):
        yield {"w": ("BF16", (words.size,), words)}
        words = stepped(words, step)


def p2pcast(
    net: Emulated, state_bytes: int, rounds: int, uplink_bps: float, folder: Path, memory: Path
) -> BroadcastSeries:
    """Until the last peer has the new state: verified, decoded, in its shadow, with its delta on disk. From the main
    thread. Raises LocalError, IntegrityError.
    """
    with broadcast_fleet(net, folder, memory, FleetSetup(state_bytes, uplink_bps), _states(state_bytes)) as fleet:
        for _ in range(WARM_UP):
            fleet.publish()
        every, came, sent = [], [], []
        for _ in range(rounds):
            before = {peer: net.passed(peer) for peer in net.network.peers}
            every.append(fleet.publish())
            after = {peer: net.passed(peer) for peer in net.network.peers}
            came.append(max(after[peer][0] - was for peer, (was, _) in before.items()))
            sent.append(max(after[peer][1] - was for peer, (_, was) in before.items()))
        status = fleet.status()
    ran = [replace(each, times_s=[each.staged_s or max(each.times_s)]) for each in every]
    settings = {
        "codec": status["last"]["codec"],
        "chains": status["chains"],
        **_moved(came, sent),
    }
    return BroadcastSeries("p2pcast, whole state", state_bytes, ran, settings)


WHOLE: Mapping[str, Callable[[Emulated, int, int, Path], BroadcastSeries]] = {"rsync": rsync, "zstd": zstd}
"""By option value."""
