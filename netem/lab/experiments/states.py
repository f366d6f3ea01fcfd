"""Whole states from the hub to everybody: p2pcast, which finds and sends what changed, beside rsync and zstd of the file, which are given the state (``netem.broadcast.whole``).

One word in a hundred changes from one state to the next. A row a system, of the medians of its broadcasts; every peer ends with the hub's bytes, or the case fails. ``moved_mb``: what came to a peer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from netem.broadcast.figures import left_out, row
from netem.broadcast.folders import own_folder
from netem.broadcast.rivals import HUB, peers_of
from netem.broadcast.whole import WHOLE, p2pcast
from netem.lab.emulated import emulated
from netem.lab.tables import filled
from netem.namespaces import Namespaces
from p2pcast.errors import LocalError, UsageError
from p2pcast.limits import MIB

P2PCAST: Final = "p2pcast"
SYSTEMS: Final = (P2PCAST, *WHOLE)
TMPFS: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Given:
    state_mib: float
    system: str = P2PCAST
    rounds: int = 2

    def check(self) -> None:
        if self.system not in SYSTEMS:
            raise UsageError(f"parameters.system: there is no {self.system!r}, but {', '.join(SYSTEMS)}")
        if not 1 <= self.state_mib <= 4096 or not 1 <= self.rounds <= 100:
            raise UsageError("parameters.state_mib must be from 1 to 4096, rounds from 1 to 100")


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """``{calibration, off}``, then ``{row}``. From the main thread. Raises UsageError, LocalError, IntegrityError."""
    given = filled(Given, argument["parameters"], "parameters")
    given.check()
    with emulated(argument) as (net, calibrated):
        uplink_bps, peer_bps = _rates(net)
        yield calibrated
        if calibrated["off"]:
            return
        with ExitStack() as owned:
            folder = owned.enter_context(own_folder(Path(tempfile.gettempdir())))
            apart = Path(tempfile.gettempdir()) != TMPFS and os.access(TMPFS, os.W_OK)
            memory = owned.enter_context(own_folder(TMPFS)) if apart else folder
            peers, state_bytes = len(peers_of(net)), round(given.state_mib * MIB)
            if given.system == P2PCAST:
                ran = p2pcast(net, state_bytes, given.rounds, uplink_bps, folder, memory)
            else:
                try:
                    ran = WHOLE[given.system](net, state_bytes, given.rounds, memory)
                except LocalError as error:
                    # Not installed, or it has come to nothing: the others are compared all the same.
                    yield {"row": left_out(given.system, peers, str(error))}
                    return
            made = row(ran, peers, peer_bps)
            settings = made.pop("settings")
            del made["every_over_ideal"]
            moved = {"moved_mb": settings["moved_bytes"] / 1e6, "peer_sent_mb": settings["peer_sent_bytes"] / 1e6}
            yield {"row": made | moved | {"system": given.system, "options": settings.get("options")}}


def _rates(net: Namespaces) -> tuple[float, float]:
    """Of the hub's link, and of the slowest peer's. Raises UsageError where a link has none, or there is no hub."""
    links = {host.name: host.link for host in net.network.hosts}
    if HUB not in links or len(links) < 2:
        raise UsageError(f"hosts: one must be called {HUB!r}, and there must be others")
    up_bps, down = links[HUB].up_bps, [link.down_bps for name, link in links.items() if name != HUB]
    rates = [rate for rate in down if rate is not None]
    if up_bps is None or len(rates) < len(down):
        raise UsageError("hosts: every link needs a rate, or there is nothing to compare times with")
    return up_bps, min(rates)
