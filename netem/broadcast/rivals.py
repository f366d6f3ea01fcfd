"""The others, given the same bytes as p2pcast: bare chains of forwarding sockets (the least that any relay does), libtorrent and shardcast set up for this, and a star over HTTP
(aiohttp). Those that know of no deltas are in ``netem.broadcast.whole``."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from netem.broadcast.agents import Agents
from netem.broadcast.contenders import TORRENT_PIECE_BYTES, TORRENT_SETTINGS
from netem.broadcast.cpu import Meter
from netem.broadcast.figures import Ran, Round
from netem.broadcast.shards import settings_for as shardcast_settings
from netem.broadcast.speech import PORT
from netem.description import Emulated
from p2pcast.errors import LocalError
from p2pcast.limits import PIECE_BYTES

HUB = "hub"


class MissingError(LocalError):
    """A rival's package is not installed."""


def needed(module: str | None = None, command: str | None = None) -> None:
    """Raises MissingError that says what to install."""
    if module is not None and importlib.util.find_spec(module) is None:
        raise MissingError(f"{module} is not installed: pip install 'p2pcast[rivals]'")
    if command is not None and shutil.which(command) is None:
        raise MissingError(f"there is no {command} command: apt-get install {command}")


def peers_of(net: Emulated) -> list[str]:
    return [host.name for host in net.network.hosts if host.name != HUB]


def ran_once(agents: Agents, begin: Callable[[], None], servers: Agents | None = None) -> Round:
    """``begin`` starts a broadcast; each of ``agents`` at a peer then says when it was done. ``servers``: who takes part, and says nothing."""
    meter = Meter(agents.pids if servers is None else agents.pids | servers.pids)
    began_s = time.time()
    begin()
    done = agents.answers("done_s")
    cpu_s, busy = meter.processes_s(), meter.busy()
    return Round([at - began_s for host, at in done.items() if host != HUB], cpu_s, busy)


def bare_chain(net: Emulated, payload_bytes: int, rounds: int, chains: int, folder: Path) -> Ran:
    """The same chains as p2pcast's at its best: as many as the uplink feeds, peers dealt in turn; pieces as large, one connection a hop."""
    peers = peers_of(net)
    below = {HUB: peers[:chains], **{peer: peers[at + chains : at + chains + 1] for at, peer in enumerate(peers)}}
    return Ran(
        "bare chain", payload_bytes, _forwarded(net, payload_bytes, rounds, below), {"chains": chains, "piece_bytes": PIECE_BYTES}
    )


def bare_tree(net: Emulated, payload_bytes: int, rounds: int) -> Ran:
    """The same sockets in a binary tree: the hub feeds one peer, and everybody two, who share what it sends."""
    peers = peers_of(net)
    below = {HUB: peers[:1], **{peer: peers[2 * at + 1 : 2 * at + 3] for at, peer in enumerate(peers)}}
    return Ran("bare tree", payload_bytes, _forwarded(net, payload_bytes, rounds, below), {"piece_bytes": PIECE_BYTES})


def _forwarded(net: Emulated, payload_bytes: int, rounds: int, below: Mapping[str, list[str]]) -> list[Round]:
    """The rounds, without one to open windows."""
    with Agents(net) as agents:
        for host, children in below.items():
            addresses = [[net.network.address(child), PORT] for child in children]
            agents.start(host, "chain", {"children": addresses, "source": host == HUB})
        agents.answers("ready")
        agents.tell(listening=True)
        agents.answers("ready")
        return [ran_once(agents, lambda: agents.tell(bytes=payload_bytes, piece=PIECE_BYTES)) for _ in range(rounds + 1)][1:]


def http_star(net: Emulated, payload_bytes: int, rounds: int, chains: int, folder: Path) -> Ran:
    """Everybody fetches everything from the hub; connections stay open from one round to the next."""
    with Agents(net) as servers, Agents(net) as agents:
        servers.start(HUB, "star-hub", {"bytes": payload_bytes})
        servers.answers("ready")
        for peer in peers_of(net):
            agents.start(peer, "star", {"url": f"http://{net.network.address(HUB)}:{PORT}/"})
        agents.answers("ready")
        ran = [ran_once(agents, lambda: agents.tell(fetch=True), servers) for _ in range(rounds)]
    return Ran("http star", payload_bytes, ran)


def libtorrent(net: Emulated, payload_bytes: int, rounds: int, chains: int, folder: Path) -> Ran:
    """All connected to all, and the payload known by its torrent, before the clock starts. Raises MissingError."""
    needed("libtorrent")
    peers = peers_of(net)
    everybody = [net.network.address(host) for host in (HUB, *peers)]
    with Agents(net) as agents:
        for host in (HUB, *peers):
            others = [a for a in everybody if a != net.network.address(host)]
            agents.start(host, "torrent", {"peers": others, "folder": str(folder)})
        version = agents.answers("ready")[HUB]
        ran = [_torrent_round(agents, payload_bytes) for _ in range(rounds)]
    return Ran("libtorrent", payload_bytes, ran, {"version": version, "piece_bytes": TORRENT_PIECE_BYTES, **TORRENT_SETTINGS})


def _torrent_round(agents: Agents, payload_bytes: int) -> Round:
    hub = agents.agents[HUB]
    hub.tell(seed=payload_bytes)
    document = hub.answer("torrent")
    peers = [agent for host, agent in agents.agents.items() if host != HUB]
    for agent in peers:
        agent.tell(torrent=document)
    for agent in peers:
        agent.answer("torrent")
    return ran_once(agents, lambda: agents.tell(go=True))


def shardcast(net: Emulated, payload_bytes: int, rounds: int, chains: int, folder: Path) -> Ran:
    """An origin at the hub and a middle node at each peer, in the same chains: with clients below one tier of middle nodes it took half as long again. The clock starts before the file is cut into
    shards; all are up and have found their servers before. Raises MissingError."""
    needed("shardcast", "wget")
    peers = peers_of(net)
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
            origins.tell(save=payload_bytes)
            origins.answers("saved")
            agents.tell(wait=number)
            ran.append(ran_once(agents, lambda: origins.tell(go=True), origins))
    told = {"version": version, "layout": "middle nodes in chains", "chains": chains, **settings}
    return Ran("shardcast", payload_bytes, ran, told)


RIVALS: Mapping[str, Callable[[Emulated, int, int, int, Path], Ran]] = {
    "chain": bare_chain,
    "libtorrent": libtorrent,
    "shardcast": shardcast,
    "star": http_star,
}
"""By the word with which they are asked for."""
