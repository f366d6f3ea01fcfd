"""A network to be emulated, as data: hosts, each behind a link of its own, around one switch. Pure; backends (``netem.rate``) make it real.

Rates are in bits per second on the wire, headers included, as `tc` counts them; times in seconds.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from socket import socket
from typing import Final, Protocol

from p2pcast.errors import UsageError

MAX_HOSTS: Final = 1000
"""Linux's bridge has 1024 ports."""
SUBNET: Final = ipaddress.ip_network("10.77.0.0/16")


@dataclass(frozen=True, slots=True)
class Link:
    """A host's access link. ``up_bps``, ``down_bps``: None is as fast as the machine. ``delay_s``: one way; ``loss``: share of packets."""

    up_bps: float | None = None
    down_bps: float | None = None
    delay_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    link: Link = Link()


@dataclass(frozen=True, slots=True)
class Network:
    """``mtu``: bytes of an IP packet. ``queue_s``: what a link may hold back before it drops. ``congestion``: TCP's congestion control at every host; None is
    the machine's own. Raises UsageError for what no backend could make."""

    hosts: tuple[Host, ...]
    mtu: int = 1500
    queue_s: float = 0.05
    congestion: str | None = None

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if len(set(names)) != len(names):
            raise UsageError("two hosts have one name")
        if not 0 < len(names) <= MAX_HOSTS:
            raise UsageError(f"a network of {len(names)} hosts: 1 to {MAX_HOSTS} can be emulated")
        if any(rate is not None and not rate > 0 for host in self.hosts for rate in (host.link.up_bps, host.link.down_bps)):
            raise UsageError("a link's rate must be above 0")

    def address(self, name: str) -> str:
        """IPv4, by the host's place in the list."""
        index = next(i for i, host in enumerate(self.hosts) if host.name == name)
        return str(SUBNET[index + 1])


class Emulated(Protocol):
    """A network that runs."""

    network: Network

    def inside(self, name: str) -> Sequence[str]:
        """Words before a command that make it run at that host."""

    def connect(self, name: str, address: tuple[str, int], timeout_s: float) -> socket:
        """A TCP connection from that host to ``address`` as it is seen there, in the hands of this process. Raises OSError."""


def star(hub: Link, peers: int, peer: Link, congestion: str | None = None) -> Network:
    """A hub and ``peers`` alike: ``hub``, ``p1``, ``p2`` …"""
    return Network((Host("hub", hub), *(Host(f"p{n}", peer) for n in range(1, peers + 1))), congestion=congestion)
