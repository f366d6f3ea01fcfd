"""Hosts behind NATs, by this kernel: namespaces on one wide network, some of them behind a router that masquerades
(nftables).

Promises: as in ``netem.emulation.namespaces``. The wide network has documentation addresses (RFC 5737, RFC 3849).
Routers pass all outgoing packets, and incoming packets only as answers (restricted, as home routers). A full cone also
passes packets to one forwarded port of its host.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from netem.emulation.namespaces import COMMAND_S, NEEDED, SWITCH, batch, enter, namespace, write_setting
from p2pcast.ground.errors import LocalError

T = TypeVar("T")

Nat: TypeAlias = Literal["none", "restricted", "full cone"]

INSIDE = "192.168.1.2"
"""Address of every host behind a router: each has its own private network."""
RULES = """
table ip nat {{
  chain pre {{
    type nat hook prerouting priority dstnat
    {inward}
  }}
  chain post {{
    type nat hook postrouting priority srcnat
    oifname "wan" masquerade
  }}
}}
table ip guard {{
  chain forward {{
    type filter hook forward priority filter
    policy drop
    ct state established,related accept
    iifname "lan" accept
    ct status dnat accept
  }}
  chain input {{
    type filter hook input priority filter
    iifname "wan" ct state new drop
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Site:
    """One host. Behind a NAT it has IPv4 alone. ``port``: forwarded by a full cone."""

    name: str
    nat: Nat = "none"
    families: tuple[int, ...] = (4,)
    port: int = 7000


class NatNetwork:
    """Made by ``nat_network``; valid while its block runs."""

    def __init__(self, sites: Sequence[Site], holders: dict[str, int]) -> None:
        self._sites = [site.name for site in sites]
        self._holders = holders

    def inside(self, name: str) -> list[str]:
        """Command prefix that runs a command at that host."""
        return ["nsenter", f"--net=/proc/{self._holders[name]}/ns/net"]

    def at(self, name: str, call: Callable[[], T]) -> T:
        """Run ``call`` at that host and return its result."""
        with ThreadPoolExecutor(1, thread_name_prefix="p2pcast-namespace") as pool:
            return pool.submit(enter, self._holders[name], call).result()

    def public(self, name: str, family: int = 4) -> str:
        """The host's address on the wide network."""
        return _public(self._sites.index(name), family)


def _public(index: int, family: int) -> str:
    return f"203.0.113.{index + 10}" if family == 4 else f"2001:db8:0:1::{index + 10:x}"


@contextmanager
def nat_network(sites: Sequence[Site]) -> Iterator[NatNetwork]:
    """For the length of the block. From the main thread. Raises LocalError if the machine cannot make the network."""
    if missing := [tool for tool in (*NEEDED, "nft") if shutil.which(tool) is None]:
        raise LocalError(
            f"there is no {' and no '.join(missing)} command: apt-get install iproute2 util-linux nftables"
        )
    with ExitStack() as held:
        switch = held.enter_context(namespace())
        batch(
            switch, "ip", ["link set lo up", f"link add name {SWITCH} type bridge stp_state 0", f"link set {SWITCH} up"]
        )
        holders = {site.name: held.enter_context(namespace()) for site in sites}
        for index, site in enumerate(sites):
            outer = holders[site.name]
            if site.nat != "none":
                outer = held.enter_context(namespace())
                _route(site, outer, holders[site.name])
            _connect(switch, outer, index, site)
        yield NatNetwork(sites, holders)


def _connect(switch: int, holder: int, index: int, site: Site) -> None:
    """Connect a host, or its router, to the wide network."""
    batch(
        switch,
        "ip",
        [
            f"link add name port{index} type veth peer name wan netns {holder}",
            f"link set port{index} master {SWITCH} up",
        ],
    )
    families = (4,) if site.nat != "none" else site.families
    prefix = {4: 24, 6: 64}
    lines = [f"addr add {_public(index, f)}/{prefix[f]} dev wan{' nodad' if f == 6 else ''}" for f in families]
    # A default route without a gateway: a host without any default route considers itself offline.
    ways = [f"-{f} route add default dev wan" for f in families]
    batch(holder, "ip", ["link set lo up", *lines, "link set wan up"])
    for way in ways:
        words = ["nsenter", f"--net=/proc/{holder}/ns/net", "ip", *way.split()]
        subprocess.run(words, check=True, capture_output=True, timeout=COMMAND_S)


def _route(site: Site, router: int, host: int) -> None:
    batch(
        router,
        "ip",
        [
            f"link add name lan type veth peer name eth0 netns {host}",
            "addr add 192.168.1.1/24 dev lan",
            "link set lan up",
        ],
    )
    batch(
        host,
        "ip",
        [
            "link set lo up",
            f"addr add {INSIDE}/24 dev eth0",
            "link set eth0 up",
            "route add default via 192.168.1.1 dev eth0",
        ],
    )
    write_setting(router, "/proc/sys/net/ipv4/ip_forward", "1")
    cone = f'iifname "wan" tcp dport {site.port} dnat to {INSIDE}:{site.port}'
    rules = RULES.format(inward=cone if site.nat == "full cone" else "")
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{router}/ns/net", "nft", "-f", "-"],
        input=rules, capture_output=True, text=True, timeout=COMMAND_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise LocalError(f"nft failed: {' '.join(done.stderr.split())}")
