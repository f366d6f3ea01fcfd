"""``bench broadcast``: every system on its own network, one after the other, in one run.

Promise: processes, namespaces and folders are gone at the end, whatever happens. After SIGKILL the kernel ends the
processes and with them the namespaces; the next run removes the folders.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netem.broadcast.emulated_fleet import p2pcast
from netem.broadcast.rivals import RIVALS, RivalMissingError
from netem.broadcast.rows import left_out, row
from netem.broadcast.whole_states import WHOLE
from netem.broadcast.whole_states import p2pcast as p2pcast_whole
from netem.emulation.description import EmulatedLink, star
from netem.emulation.rate import rate_network
from netem.fleet.fleet import folders

PLAINTEXT = "p2pcast, plaintext"
"""p2pcast without TLS."""
STATE = "p2pcast, whole state"
"""p2pcast on the states of the rivals without deltas."""


@dataclass(frozen=True, slots=True)
class BroadcastBench:
    """``congestion``: TCP's congestion control at every host; None is the machine's own. ``folder``: parent of
    temporary folders. ``late``: peers that catch up beside every other p2pcast broadcast. ``plaintext``: also run
    p2pcast without TLS. ``state_bytes``: state size for rivals without deltas.
    """

    peers: Sequence[int]
    payload_bytes: int
    uplink_bps: float
    peer_bps: float
    rounds: int
    rivals: Sequence[str]
    congestion: str | None = None
    folder: Path | None = None
    late: int = 0
    plaintext: bool = False
    state_bytes: int = 32 << 20

    def chains(self, peers: int) -> int:
        """The number of chains that the uplink feeds at a peer's full rate."""
        return min(peers, max(1, int(self.uplink_bps / self.peer_bps)))


def bench_broadcast(bench: BroadcastBench, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """``show`` receives each row as soon as it is measured. From the main thread. Raises LocalError, IntegrityError."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows = []
    given, whole = ([name for name in bench.rivals if name in table] for table in (RIVALS, WHOLE))
    systems = ["p2pcast", *([PLAINTEXT] if bench.plaintext else []), *given, *([STATE] if whole else []), *whole]
    for peers in bench.peers:
        for system in systems:
            for made in _rows(bench, system, peers):
                rows.append(made)
                show(made)
    return {
        "uplink_bps": bench.uplink_bps,
        "peer_bps": bench.peer_bps,
        "congestion": bench.congestion or Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "rounds": bench.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "rows": rows,
    }


def _rows(bench: BroadcastBench, system: str, peers: int) -> list[dict[str, Any]]:
    uplink, link = EmulatedLink(bench.uplink_bps, bench.uplink_bps), EmulatedLink(bench.peer_bps, bench.peer_bps)
    late = bench.late if system == "p2pcast" else 0
    network = star(uplink, peers + late, link, bench.congestion)
    with folders(bench.folder) as (folder, memory), rate_network(network) as net:
        try:
            if system in ("p2pcast", PLAINTEXT):
                plaintext = system == PLAINTEXT
                ran = p2pcast(
                    net, bench.payload_bytes, bench.rounds, bench.uplink_bps, folder, memory, late, plaintext=plaintext
                )
            elif system == STATE:
                ran = [p2pcast_whole(net, bench.state_bytes, bench.rounds, bench.uplink_bps, folder, memory)]
            elif system in WHOLE:
                ran = [WHOLE[system](net, bench.state_bytes, bench.rounds, memory)]
            else:
                ran = [RIVALS[system](net, bench.payload_bytes, bench.rounds, bench.chains(peers), folder)]
        except RivalMissingError as error:
            return [left_out(system, peers, str(error))]
        return [row(each, peers, bench.peer_bps) for each in ran]
