"""A network to be emulated, as data: hosts, each behind a link of its own, around one switch. Pure; backends (``netem.rate``, ``netem.native``) make it real.

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
MAX_DELAY_S: Final = 60.0
SUBNET: Final = ipaddress.ip_network("10.77.0.0/16")


@dataclass(frozen=True, slots=True)
class Bursts:
    """Loss in bursts, after Gilbert and Elliott: a link is good or bad, and changes with each packet. ``enter``, ``leave``: the chance that a good one turns
    bad, a bad one good; ``bad``, ``good``: the share of packets that is lost meanwhile."""

    enter: float
    leave: float
    bad: float = 1.0
    good: float = 0.0

    @property
    def mean(self) -> float:
        """Share of all packets that is lost in the long run."""
        share = self.enter / (self.enter + self.leave)
        return share * self.bad + (1 - share) * self.good


@dataclass(frozen=True, slots=True)
class Link:
    """A host's access link, the same both ways but for its rates. ``up_bps``, ``down_bps``: None is as fast as the machine.

    ``delay_s``: one way, give or take ``jitter_s`` (packets overtake each other then); ``loss``: share of packets, each by itself or in bursts; ``reorder``:
    share of packets that skip the delay; ``queue_s``: what may wait for the rate before packets are dropped, instead of the network's.
    """

    up_bps: float | None = None
    down_bps: float | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float | Bursts = 0.0
    reorder: float = 0.0
    queue_s: float | None = None

    @property
    def only_rates(self) -> bool:
        return not (self.delay_s or self.jitter_s or self.loss or self.reorder)

    @property
    def mean_loss(self) -> float:
        return self.loss.mean if isinstance(self.loss, Bursts) else self.loss

    def check(self) -> None:
        """Raises UsageError for what no backend could make."""
        if any(rate is not None and not rate > 0 for rate in (self.up_bps, self.down_bps)):
            raise UsageError("a link's rate must be above 0")
        if not 0 <= self.jitter_s <= self.delay_s <= MAX_DELAY_S:
            raise UsageError(f"a link's delay must be from 0 to {MAX_DELAY_S:g} s, and its jitter no more than its delay")
        bursts = self.loss if isinstance(self.loss, Bursts) else None
        shares = (
            [self.loss, self.reorder] if bursts is None else [bursts.enter, bursts.leave, bursts.bad, bursts.good, self.reorder]
        )
        if not all(0 <= share <= 1 for share in shares if isinstance(share, float | int)):
            raise UsageError("shares of packets (loss, reorder) must be from 0 to 1")
        if bursts is not None and not bursts.enter + bursts.leave > 0:
            raise UsageError("a link that loses packets in bursts has to turn bad, or good again, at some time")
        if self.reorder and not self.delay_s:
            raise UsageError("packets skip a delay to be reordered: without a delay there is no reordering")
        if self.queue_s is not None and not self.queue_s > 0:
            raise UsageError("a link's queue must be above 0 s")


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
        for host in self.hosts:
            host.link.check()

    @property
    def only_rates(self) -> bool:
        return all(host.link.only_rates for host in self.hosts)

    def address(self, name: str) -> str:
        """IPv4, by the host's place in the list."""
        index = next(i for i, host in enumerate(self.hosts) if host.name == name)
        return str(SUBNET[index + 1])


@dataclass(frozen=True, slots=True)
class Way:
    """What a packet from one host to another meets, by description. ``rate_bps``: at which packets arrive when too many are sent; None: nothing holds them."""

    rate_bps: float | None
    delay_s: float
    loss: float


def way(sender: Link, receiver: Link) -> Way:
    # What a link loses is lost before its rate counts it.
    up_bps = None if sender.up_bps is None else sender.up_bps * (1 - receiver.mean_loss)
    rates = [rate for rate in (up_bps, receiver.down_bps) if rate is not None]
    return Way(min(rates, default=None), sender.delay_s + receiver.delay_s, 1 - (1 - sender.mean_loss) * (1 - receiver.mean_loss))


class Emulated(Protocol):
    """A network that runs."""

    network: Network

    def inside(self, name: str) -> Sequence[str]:
        """Words before a command that make it run at that host."""

    def space(self, name: str) -> str:
        """The path of its network namespace."""

    def connect(self, name: str, address: tuple[str, int], timeout_s: float) -> socket:
        """A TCP connection from that host to ``address`` as it is seen there, in the hands of this process. Raises OSError."""


def star(hub: Link, peers: int, peer: Link, congestion: str | None = None) -> Network:
    """A hub and ``peers`` alike: ``hub``, ``p1``, ``p2`` …"""
    return Network((Host("hub", hub), *(Host(f"p{n}", peer) for n in range(1, peers + 1))), congestion=congestion)
