"""Links of every number of stripes, one after the other, over one emulated path. A backend with netem runs this module
(user-mode Linux or this machine's kernel).
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from netem.broadcast.agents import Agents
from netem.emulation.calibration import calibrated
from netem.emulation.description import EmulatedLink, EmulatedNetwork, Host
from netem.emulation.namespaces import Namespaces, namespaces
from netem.fleet.workspace import own_folder
from p2pcast.transport.socket_options import PREFERRED, choose_sockets

MODULE = "netem.stripes.ends"
ENDS = ("parent", "child")
IDLE_S = 0.4
IDLE_ROUND_TRIPS = 4
"""Pause before each version. The pause exceeds TCP's retransmission timer, so congestion windows shrink as between real
versions.
"""


@dataclass(frozen=True, slots=True)
class Sweep:
    """One path, and the links tried on it. ``limit``: time allowed for a version, as a multiple of the payload's time
    at the full rate; bytes received by then count. ``mtu``: bytes of an IP packet.
    """

    rate_bps: float
    rtt_s: float
    loss: float
    payload_bytes: int
    stripes: tuple[int, ...]
    congestion: tuple[str, ...]
    buffers: tuple[int | None, ...]
    rounds: int
    limit: float
    mtu: int = 1500

    @property
    def ideal_s(self) -> float:
        return 8 * self.payload_bytes / self.rate_bps


def sweep(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields ``{calibration: …, off: […]}`` first, then ``{row: …}`` for each link. There are no rows if the path
    differs from the request. Raises LocalError, UsageError.
    """
    lists = {name: tuple(argument[name]) for name in ("stripes", "congestion", "buffers")}
    given = Sweep(**{**argument, **lists})
    for name in given.congestion:
        choose_sockets(name)
    # The payload's direction carries the whole delay except half of the round trip, which acknowledgements take.
    access = EmulatedLink(given.rate_bps, given.rate_bps, given.rtt_s / 2, loss=given.loss)
    with namespaces(EmulatedNetwork((Host("parent"), Host("child", access)), given.mtu)) as net:
        calibration = calibrated(net)
        yield calibration
        if calibration["off"]:
            return
        with ends(net) as agents:
            for congestion, stripes in settings(given):
                for buffer_bytes in given.buffers:
                    yield {"row": link(net, agents, given, stripes, congestion, buffer_bytes)}


def settings(given: Sweep) -> list[tuple[str, int | None]]:
    """All settings tried; the last is p2pcast's own choice, with its preferred congestion control among these."""
    own = PREFERRED if PREFERRED in given.congestion else given.congestion[0]
    return [*product(given.congestion, given.stripes), (own, None)]


@contextmanager
def ends(net: Namespaces) -> Iterator[Agents]:
    """Agents at the hosts ``parent`` and ``child``, ready for orders."""
    with own_folder(Path(tempfile.gettempdir())) as folder, Agents(net, MODULE) as agents:
        for name in ENDS:
            agents.start(name, name, {"folder": str(folder)})
        agents.answers("ready")
        yield agents


def link(
    net: Namespaces, agents: Agents, given: Sweep, stripes: int | None, congestion: str, buffer_bytes: int | None
) -> dict[str, Any]:
    """One link between the hosts ``parent`` and ``child``, where ``ends`` runs. ``stripes``: None leaves the number to
    both ends; the result is then in ``chosen``.
    """
    parent, child = agents.agents["parent"], agents.agents["child"]
    common = {
        "key": secrets.token_hex(32), "secret": secrets.token_hex(20), "bytes": given.payload_bytes,
        "congestion": congestion, "buffer_bytes": buffer_bytes,
    }  # fmt: skip
    parent.send_order(**common)
    port = parent.answer("listening")
    child.send_order(**common, address=net.network.address("parent"), port=port, stripes=stripes)
    child.answer("attached")
    limit_s = given.limit * given.ideal_s + given.rtt_s
    goodputs: list[float] = []
    left = None
    for _ in range(given.rounds):
        parent.send_order(prepare=True)
        parent.answer("prepared")
        time.sleep(IDLE_S + IDLE_ROUND_TRIPS * given.rtt_s)
        child.send_order(wait=limit_s)
        parent.send_order(publish=True)
        began, received = parent.answer("began"), child.answer("received")
        goodputs.append(8 * received["bytes"] / (received["at"] - began))
        left = received["left"]
        if not received["whole"]:
            break
    parent.send_order(close=True)
    # Close last: the counters of a link disappear with the link.
    sent = parent.answer("sent")
    child.send_order(close=True)
    child.answer("closed")
    return {
        "rtt_s": given.rtt_s,
        "loss": given.loss,
        "rate_bps": given.rate_bps,
        "congestion": congestion,
        "stripes": stripes or sent["stripes_in_use"],
        "chosen": stripes is None,
        "buffer_bytes": buffer_bytes,
        "goodputs_bps": [round(g) for g in goodputs],
        "whole": received["whole"],
        "left": left,
        "retransmitted": sent["retransmitted_bytes"] / max(1, sent["sent_bytes"]),
    }
