"""An emulated network as data: hosts, each behind its own link, around a central switch or the switch of their region.
A region's switch has a link to the central one, its *trunk*. Pure; ``netem.emulation.namespaces`` builds the network.

Rates are in bits per second on the wire, headers included, as `tc` counts them; times are in seconds.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, replace
from socket import socket
from typing import Final, Protocol

from p2pcast.ground.errors import UsageError

MAX_HOSTS: Final = 1000
"""Linux's bridge has 1024 ports."""
MAX_REGIONS: Final = 20
MAX_DELAY_S: Final = 60.0
MAX_QUEUE_S: Final = 10.0
HUB: Final = "hub"
"""The host of the hub."""
SUBNET: Final = ipaddress.ip_network("10.77.0.0/16")


@dataclass(frozen=True, slots=True)
class Bursts:
    """Loss in bursts by the Gilbert–Elliott model: a link is good or bad, and may change with each packet. ``enter``,
    ``leave``: probability of turning bad, and of turning good again. ``bad``, ``good``: share of packets lost in that
    state.
    """

    enter: float
    leave: float
    bad: float = 1.0
    good: float = 0.0

    @property
    def mean(self) -> float:
        """Long-term share of lost packets."""
        share = self.enter / (self.enter + self.leave)
        return share * self.bad + (1 - share) * self.good


@dataclass(frozen=True, slots=True)
class EmulatedLink:
    """A host's access link or a region's trunk; both directions are alike except for their rates. ``up_bps`` (towards
    the centre), ``down_bps``: None means unlimited.

    ``delay_s``: one way, plus or minus ``jitter_s`` (packets may then overtake each other). ``loss``: share of packets,
    independent or in bursts. ``reorder``: share of packets that skip the delay. ``queue_s``: longest wait for the rate
    before packets are dropped; None means the network's.
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
        """Raises UsageError for values that no backend supports."""
        if any(rate is not None and not rate > 0 for rate in (self.up_bps, self.down_bps)):
            raise UsageError("a link's rate must be above 0")
        if not 0 <= self.jitter_s <= self.delay_s <= MAX_DELAY_S:
            raise UsageError(
                f"a link's delay must be from 0 to {MAX_DELAY_S:g} s, and its jitter no more than its delay"
            )
        bursts = self.loss if isinstance(self.loss, Bursts) else None
        shares = (
            [self.loss, self.reorder]
            if bursts is None
            else [bursts.enter, bursts.leave, bursts.bad, bursts.good, self.reorder]
        )
        if not all(0 <= share <= 1 for share in shares if isinstance(share, float | int)):
            raise UsageError("shares of packets (loss, reorder) must be from 0 to 1")
        if bursts is not None and not bursts.enter + bursts.leave > 0:
            raise UsageError(
                "a link with loss in bursts needs probabilities above 0 of turning bad and of turning good"
            )
        if self.reorder and not self.delay_s:
            raise UsageError("reordered packets skip the delay: reordering needs a delay")
        if self.queue_s is not None and not 0 < self.queue_s <= MAX_QUEUE_S:
            raise UsageError(f"a link's queue must be above 0 s, to {MAX_QUEUE_S:g} s")


@dataclass(frozen=True, slots=True)
class Host:
    """``region``: the region of its switch; None for the central switch."""

    name: str
    link: EmulatedLink = EmulatedLink()
    region: str | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """``link``: the region's trunk."""

    name: str
    link: EmulatedLink = EmulatedLink()


@dataclass(frozen=True, slots=True)
class EmulatedPath:
    """The path of a packet from one host to another, by description. ``rate_bps``: rate of arrival when too many
    packets are sent; None means unlimited.
    """

    rate_bps: float | None
    delay_s: float
    loss: float


@dataclass(frozen=True, slots=True)
class EmulatedNetwork:
    """``mtu``: bytes of an IP packet. ``queue_s``: longest wait in a link's queue before packets are dropped.
    ``congestion``: TCP's congestion control at every host; None is the machine's own. Raises UsageError for values that
    no backend supports.
    """

    hosts: tuple[Host, ...]
    mtu: int = 1500
    queue_s: float = 0.05
    congestion: str | None = None
    regions: tuple[Region, ...] = ()

    def __post_init__(self) -> None:
        names = [place.name for place in self.places]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"two hosts or regions have the same name, {twice[0]}")
        if not 0 < len(self.hosts) <= MAX_HOSTS or len(self.regions) > MAX_REGIONS:
            raise UsageError(
                f"a network of {len(self.hosts)} hosts in {len(self.regions)} regions: the limits are 1 to "
                f"{MAX_HOSTS} hosts and {MAX_REGIONS} regions"
            )
        regions = {region.name for region in self.regions}
        for host in self.hosts:
            if host.region is not None and host.region not in regions:
                raise UsageError(f"{host.name} is in a region {host.region!r} that does not exist")
        for link in self.links:
            link.check()

    @property
    def places(self) -> tuple[Host | Region, ...]:
        """All hosts and regions."""
        return (*self.hosts, *self.regions)

    @property
    def links(self) -> tuple[EmulatedLink, ...]:
        return tuple(place.link for place in self.places)

    @property
    def only_rates(self) -> bool:
        return all(link.only_rates for link in self.links)

    @property
    def peers(self) -> list[str]:
        """All hosts but the hub's."""
        return [host.name for host in self.hosts if host.name != HUB]

    def address(self, name: str) -> str:
        """IPv4, by the host's position in the list."""
        return str(SUBNET[self._index(name) + 1])

    def _index(self, name: str) -> int:
        return next(i for i, host in enumerate(self.hosts) if host.name == name)

    def link(self, name: str) -> EmulatedLink:
        """The link of a host, or the trunk of a region. Raises UsageError."""
        for place in self.places:
            if place.name == name:
                return place.link
        raise UsageError(f"there is no host and no region {name!r}")

    def behind(self, name: str, link: EmulatedLink) -> EmulatedNetwork:
        """The same network with another link for that host or region."""
        self.link(name)
        return replace(
            self,
            hosts=tuple(replace(host, link=link) if host.name == name else host for host in self.hosts),
            regions=tuple(replace(region, link=link) if region.name == name else region for region in self.regions),
        )

    def path(self, sender: str, receiver: str) -> tuple[list[EmulatedLink], list[EmulatedLink]]:
        """The links that packets pass towards the centre, and away from it: both access links, and trunks between
        different regions.
        """
        one, other = (self.hosts[self._index(name)] for name in (sender, receiver))
        apart = one.region != other.region
        up = [one.link, *([self.link(one.region)] if apart and one.region is not None else [])]
        down = [*([self.link(other.region)] if apart and other.region is not None else []), other.link]
        return up, down

    def way(self, sender: str, receiver: str) -> EmulatedPath:
        return way(*self.path(sender, receiver))


def way(up: Sequence[EmulatedLink], down: Sequence[EmulatedLink]) -> EmulatedPath:
    """The path over links towards the centre, then away from it, each in order of passage."""
    rate_bps, delay_s, kept = None, 0.0, 1.0
    for link, link_bps in [*((link, link.up_bps) for link in up), *((link, link.down_bps) for link in down)]:
        # Loss comes before the rate, so lost packets do not count against the rate.
        arriving_bps = None if rate_bps is None else rate_bps * (1 - link.mean_loss)
        rate_bps = min((rate for rate in (arriving_bps, link_bps) if rate is not None), default=None)
        delay_s += link.delay_s
        kept *= 1 - link.mean_loss
    return EmulatedPath(rate_bps, delay_s, 1 - kept)


class Emulated(Protocol):
    """A running network."""

    network: EmulatedNetwork

    def inside(self, name: str) -> Sequence[str]:
        """Command prefix that runs a command at that host."""

    def space(self, name: str) -> str:
        """The path of its network namespace."""

    def connect(self, name: str, address: tuple[str, int], timeout_s: float) -> socket:
        """A TCP connection from that host to ``address`` as seen there, owned by this process. Raises OSError."""

    def passed(self, name: str) -> tuple[int, int]:
        """Bytes received and sent over the link of that host, or that trunk, headers included."""


def star(hub: EmulatedLink, peers: int, peer: EmulatedLink, congestion: str | None = None) -> EmulatedNetwork:
    """A hub and ``peers`` identical peers: ``hub``, ``p1``, ``p2`` …"""
    return EmulatedNetwork((Host(HUB, hub), *(Host(f"p{n}", peer) for n in range(1, peers + 1))), congestion=congestion)
