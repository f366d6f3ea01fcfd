"""The rivals, which get the same bytes as p2pcast. They are bare chains of forwarding sockets (the least work of any
relay), libtorrent, shardcast, and a star over HTTP (aiohttp). Rivals without deltas are in
``netem.broadcast.whole_states``.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from netem.broadcast.agents import Agents
from netem.broadcast.contenders import TORRENT_PIECE_BYTES, TORRENT_SETTINGS
from netem.broadcast.cpu import CpuMeter
from netem.broadcast.json_lines import PORT
from netem.broadcast.rows import BroadcastSeries, MeasuredBroadcast
from netem.broadcast.shardcast_roles import settings_for as shardcast_settings
from netem.emulation.description import HUB, Emulated
from p2pcast.ground.errors import LocalError
from p2pcast.ground.limits import PIECE_BYTES


class RivalMissingError(LocalError):
    """The package of a rival is not installed."""


def needed(module: str | None = None, command: str | None = None) -> None:
    """Raises RivalMissingError with the package to install."""
    if module is not None and importlib.util.find_spec(module) is None:
        raise RivalMissingError(f"{module} is not installed: pip install 'p2pcast[rivals]'")
    if command is not None and shutil.which(command) is None:
        raise RivalMissingError(f"there is no {command} command: apt-get install {command}")


def run_broadcast(agents: Agents, begin: Callable[[], None], servers: Agents | None = None) -> MeasuredBroadcast:
    """``begin`` starts a broadcast; each of ``agents`` at a peer then reports its end. ``servers``: further processes
    that take part without a report.
    """
    meter = CpuMeter(agents.pids if servers is None else agents.pids | servers.pids)
    began_s = time.time()
    begin()
    done = agents.answers("done_s")
    cpu_s, busy = meter.processes_s(), meter.busy()
    return MeasuredBroadcast([at - began_s for host, at in done.items() if host != HUB], cpu_s, busy)


def bare_chain(net: Emulated, payload_bytes: int, rounds: int, chains: int, folder: Path) -> BroadcastSeries:
    """The best chains of p2pcast: as many as the uplink feeds, peers dealt in turn, pieces of the same size, one
    connection a hop.
    """
    peers = net.network.peers
    below = {HUB: peers[:chains], **{peer: peers[at + chains : at + chains + 1] for at, peer in enumerate(peers)}}
    return BroadcastSeries(
        "bare chain",
        payload_bytes,
        _forwarded(net, payload_bytes, rounds, below),
        {"chains": chains, "piece_bytes": PIECE_BYTES},
    )


def bare_tree(net: Emulated, payload_bytes: int, rounds: int) -> BroadcastSeries:
    """The same sockets in a binary tree: the hub feeds one peer, and every peer feeds two, which share its uplink."""
    peers = net.network.peers
    below = {HUB: peers[:1], **{peer: peers[2 * at + 1 : 2 * at + 3] for at, peer in enumerate(peers)}}
    return BroadcastSeries(
        "bare tree", payload_bytes, _forwarded(net, payload_bytes, rounds, below), {"piece_bytes": PIECE_BYTES}
    )


def _forwarded(
    net: Emulated, payload_bytes: int, rounds: int, below: Mapping[str, list[str]]
) -> list[MeasuredBroadcast]:
    """All rounds after an uncounted one that opens TCP windows."""
    with Agents(net) as agents:
        for host, children in below.items():
            addresses = [[net.network.address(child), PORT] for child in children]
            agents.start(host, "chain", {"children": addresses, "source": host == HUB})
        agents.answers("ready")
        agents.send_order(listening=True)
        agents.answers("ready")
        return [
            run_broadcast(agents, lambda: agents.send_order(bytes=payload_bytes, piece=PIECE_BYTES))
            for _ in range(rounds + 1)
        ][1:]


def http_star(net: Emulated, payload_bytes: int, rounds: int, chains: int, folder: Path) -> BroadcastSeries:
    """Every peer fetches all bytes from the hub; connections stay open between rounds."""
    with Agents(net) as servers, Agents(net) as agents:
        servers.start(HUB, "star-hub", {"bytes": payload_bytes})
        servers.answers("ready")
        for peer in net.network.peers:
            agents.start(peer, "star", {"url": f"http://{net.network.address(HUB)}:{PORT}/"})
        agents.answers("ready")
        ran = [run_broadcast(agents, lambda: agents.send_order(fetch=True), servers) for _ in range(rounds)]
    return BroadcastSeries("http star", payload_bytes, ran)


def libtorrent(net: Emulated, payload_bytes: int, rounds: int, chains: int, folder: Path) -> BroadcastSeries:
    """All peers are connected to all, and have the torrent file, before the clock starts. Raises RivalMissingError."""
    needed("libtorrent")
    peers = net.network.peers
    everybody = [net.network.address(host) for host in (HUB, *peers)]
    with Agents(net) as agents:
        for host in (HUB, *peers):
            others = [a for a in everybody if a != net.network.address(host)]
            agents.start(host, "torrent", {"peers": others, "folder": str(folder)})
        version = agents.answers("ready")[HUB]
        ran = [_torrent_round(agents, payload_bytes) for _ in range(rounds)]
    return BroadcastSeries(
        "libtorrent", payload_bytes, ran, {"version": version, "piece_bytes": TORRENT_PIECE_BYTES, **TORRENT_SETTINGS}
    )


def _torrent_round(agents: Agents, payload_bytes: int) -> MeasuredBroadcast:
    hub = agents.agents[HUB]
    hub.send_order(seed=payload_bytes)
    document = hub.answer("torrent")
    peers = [agent for host, agent in agents.agents.items() if host != HUB]
    for agent in peers:
        agent.send_order(torrent=document)
    for agent in peers:
        agent.answer("torrent")
    return run_broadcast(agents, lambda: agents.send_order(go=True))


def shardcast(net: Emulated, payload_bytes: int, rounds: int, chains: int, folder: Path) -> BroadcastSeries:
    """An origin at the hub and a middle node at each peer, in the same chains. Clients below one tier of middle nodes
    took half as long again. The clock starts before the file is cut into shards, when all nodes are up and have found
    their servers. Raises RivalMissingError.
    """
    needed("shardcast", "wget")
    peers = net.network.peers
    with Agents(net) as origins, Agents(net) as agents:
        settings = shardcast_settings(net.network, payload_bytes)
        origins.start(HUB, "shardcast-origin", settings)
        version = origins.answers("ready")[HUB]
        for index, peer in enumerate(peers):
            above = HUB if index < chains else peers[index - chains]
            agents.start(peer, "shardcast-middle", {"upstream": [net.network.address(above)], **settings})
            agents.agents[peer].answer("ready")
        ran = []
        for number in range(1, rounds + 1):
            origins.send_order(save=payload_bytes)
            origins.answers("saved")
            agents.send_order(wait=number)
            ran.append(run_broadcast(agents, lambda: origins.send_order(go=True), origins))
    facts = {"version": version, "layout": "middle nodes in chains", "chains": chains, **settings}
    return BroadcastSeries("shardcast", payload_bytes, ran, facts)


RIVALS: Mapping[str, Callable[[Emulated, int, int, int, Path], BroadcastSeries]] = {
    "chain": bare_chain,
    "libtorrent": libtorrent,
    "shardcast": shardcast,
    "star": http_star,
}
"""By option value."""
