"""Whole states from the hub to all peers. p2pcast finds and sends the changes; rsync and zstd of the file get the state
(``netem.broadcast.whole_states``).

One word in a hundred changes from one state to the next. There is one row a system, with the medians of its broadcasts.
Every peer must end with the hub's bytes, or the case fails. ``moved_mb``: received by a peer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from netem.broadcast.rows import left_out, row
from netem.broadcast.whole_states import WHOLE, p2pcast
from netem.emulation.description import HUB
from netem.emulation.namespaces import Namespaces
from netem.emulation.tables import filled
from netem.fleet.fleet import folders
from netem.lab.case_network import emulated
from p2pcast.ground.errors import LocalError, UsageError
from p2pcast.ground.limits import MIB

P2PCAST: Final = "p2pcast"
SYSTEMS: Final = (P2PCAST, *WHOLE)


@dataclass(frozen=True, slots=True)
class Parameters:
    state_mib: float
    system: str = P2PCAST
    rounds: int = 2

    def check(self) -> None:
        if self.system not in SYSTEMS:
            raise UsageError(f"parameters.system: there is no {self.system!r}, but {', '.join(SYSTEMS)}")
        if not 1 <= self.state_mib <= 4096 or not 1 <= self.rounds <= 100:
            raise UsageError("parameters.state_mib must be from 1 to 4096, rounds from 1 to 100")


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields ``{calibration, off}``, then ``{row}``. From the main thread. Raises UsageError, LocalError,
    IntegrityError.
    """
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    with emulated(argument) as (net, calibrated):
        uplink_bps, peer_bps = _rates(net)
        yield calibrated
        if calibrated["off"]:
            return
        with folders() as (folder, memory):
            peers, state_bytes = len(net.network.peers), round(given.state_mib * MIB)
            if given.system == P2PCAST:
                ran = p2pcast(net, state_bytes, given.rounds, uplink_bps, folder, memory)
            else:
                try:
                    ran = WHOLE[given.system](net, state_bytes, given.rounds, memory)
                except LocalError as error:
                    # A missing package or a failed rival does not stop the comparison of the others.
                    yield {"row": left_out(given.system, peers, str(error))}
                    return
            made = row(ran, peers, peer_bps)
            settings = made.pop("settings")
            del made["every_over_ideal"]
            moved = {"moved_mb": settings["moved_bytes"] / 1e6, "peer_sent_mb": settings["peer_sent_bytes"] / 1e6}
            yield {"row": made | moved | {"system": given.system, "options": settings.get("options")}}


def _rates(net: Namespaces) -> tuple[float, float]:
    """Rates of the hub's link and of the slowest peer's. Raises UsageError for a link without a rate, or
    without a hub.
    """
    links = {host.name: host.link for host in net.network.hosts}
    if HUB not in links or len(links) < 2:
        raise UsageError(f"hosts: one must be called {HUB!r}, and at least one other is needed")
    up_bps, down = links[HUB].up_bps, [link.down_bps for name, link in links.items() if name != HUB]
    rates = [rate for rate in down if rate is not None]
    if up_bps is None or len(rates) < len(down):
        raise UsageError("hosts: every link needs a rate, as the ideal time depends on it")
    return up_bps, min(rates)
