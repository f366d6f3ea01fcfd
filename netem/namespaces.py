"""Emulated networks by this kernel: a network namespace a host, joined by a bridge in one more, each link shaped on both of its sides.

Promises: nothing outside these namespaces is touched, and none of them has a name that could stay behind: each lives as long as a process that holds it,
which the kernel kills with the process that made the network, however that ends. What still runs inside keeps its namespace, cut off.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from netem.description import SUBNET, Host, Link, Network
from netem.shaping import shaping
from p2pcast.errors import LocalError, UsageError

T = TypeVar("T")

COMMAND_S = 30.0
CLONE_NEWNET = 0x40000000
DEVICE = "eth0"
SWITCH = "switch"
BUNDLE = 8
"""Segments that leave at once where links have rates alone (1 ms at 100 Mbit/s), which a bucket counts as what a wire would carry, headers of each included:
one by one they cost the machine half as much again as the programs that are tried. Where links lose packets each segment leaves by itself."""
BRIDGE_FILTER = "/proc/sys/net/bridge/bridge-nf-call-iptables"
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
NEEDED = ("ip", "tc", "nsenter", "unshare", "setpriv")


class Namespaces:
    """See ``netem.description.Emulated``. Made by ``namespaces``; to be used while its block runs."""

    def __init__(self, network: Network, switch: int, holders: dict[str, int]) -> None:
        self.network = network
        self._switch = switch
        self._holders = holders

    def inside(self, name: str) -> Sequence[str]:
        return ["nsenter", f"--net={self.space(name)}"]

    def space(self, name: str) -> str:
        return f"/proc/{self._holders[name]}/ns/net"

    def connect(self, name: str, address: tuple[str, int], timeout_s: float) -> socket.socket:
        return self.at(name, lambda: socket.create_connection(address, timeout_s))

    def at(self, name: str, call: Callable[[], T]) -> T:
        """What ``call`` returns at that host: a socket that it makes is that host's from then on."""
        # A socket belongs to the namespace in which it was made; a thread has one of its own, which ends with it.
        with ThreadPoolExecutor(1, thread_name_prefix="p2pcast-namespace") as pool:
            return pool.submit(enter, self._holders[name], call).result()

    def received(self, name: str) -> int:
        """IPv4 packets that have come to that host."""
        counters = Path(f"/proc/{self._holders[name]}/net/snmp").read_text().splitlines()
        names, values = (line.split() for line in counters if line.startswith("Ip:"))
        return int(values[names.index("InReceives")])

    def reshape(self, name: str, link: Link) -> None:
        """From now on that host is behind another link. What waits in the old one is lost. Raises UsageError, LocalError."""
        index = next(i for i, host in enumerate(self.network.hosts) if host.name == name)
        hosts = (*self.network.hosts[:index], Host(name, link), *self.network.hosts[index + 1 :])
        network = replace(self.network, hosts=hosts)
        before, after = (_sides(n, index, self._switch, self._holders[name]) for n in (self.network, network))
        for (holder, device, old), (_, _, new) in zip(before, after, strict=True):
            batch(holder, "tc", [*([f"qdisc del dev {device} root"] if old else []), *new])
        self.network = network


def enter(holder: int, call: Callable[[], T]) -> T:
    with Path(f"/proc/{holder}/ns/net").open("rb") as space:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
    return call()


@contextmanager
def namespaces(network: Network) -> Iterator[Namespaces]:
    """The network, for as long as the block runs. From the main thread (the holders end with the thread that started them).

    Raises LocalError when the machine will not, UsageError for a congestion control that it has not.
    """
    if missing := [tool for tool in NEEDED if shutil.which(tool) is None]:
        raise LocalError(f"there is no {' and no '.join(missing)} command: apt-get install iproute2 util-linux")
    if network.regions:
        raise UsageError("regions can't be made yet")
    with ExitStack() as held:
        switch = held.enter_context(namespace())
        holders = {host.name: held.enter_context(namespace()) for host in network.hosts}
        _build(network, switch, holders)
        yield Namespaces(network, switch, holders)


@contextmanager
def namespace() -> Iterator[int]:
    """The process that holds a new one."""
    # In a session of its own: Ctrl-C is for whoever made the network, who ends what runs inside first.
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
    holder = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        ours, path = os.readlink("/proc/self/ns/net"), Path(f"/proc/{holder.pid}/ns/net")
        deadline = time.monotonic() + COMMAND_S
        while holder.poll() is None and path.readlink() == Path(ours) and time.monotonic() < deadline:
            time.sleep(0.002)
        if holder.poll() is not None:
            assert holder.stderr is not None
            raise LocalError(f"no network namespace can be made here: {holder.stderr.read().strip()} (only root may)")
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()
        assert holder.stderr is not None
        holder.stderr.close()


def _build(network: Network, switch: int, holders: dict[str, int]) -> None:
    lines = ["link set lo up", f"link add name {SWITCH} mtu {network.mtu} type bridge stp_state 0", f"link set {SWITCH} up"]
    segments = BUNDLE if network.only_rates else 1
    for index, host in enumerate(network.hosts):
        pair = f"mtu {network.mtu} gso_max_segs {segments}"
        lines += [
            f"link add name port{index} {pair} type veth peer name {DEVICE} {pair} netns {holders[host.name]}",
            f"link set port{index} master {SWITCH} up",
        ]
    batch(switch, "ip", lines)
    # Packets of a bridge pass the firewall's hooks where that module is loaded, for nothing.
    write_setting(switch, BRIDGE_FILTER, "0")
    for index, host in enumerate(network.hosts):
        holder = holders[host.name]
        address = f"{network.address(host.name)}/{SUBNET.prefixlen}"
        batch(holder, "ip", ["link set lo up", f"addr add {address} dev {DEVICE}", f"link set {DEVICE} up"])
        for side, _, words in _sides(network, index, switch, holder):
            batch(side, "tc", words)
        if network.congestion is not None:
            _congestion(holder, network.congestion)


def _sides(network: Network, index: int, switch: int, holder: int) -> list[tuple[int, str, list[str]]]:
    """The two devices that send onto a host's link: (whose namespace, device, what shapes it)."""
    link = network.hosts[index].link
    queue_s = link.queue_s or network.queue_s
    port = f"port{index}"
    return [
        (holder, DEVICE, shaping(DEVICE, link.up_bps, link, queue_s, network.mtu)),
        (switch, port, shaping(port, link.down_bps, link, queue_s, network.mtu)),
    ]


def write_setting(holder: int, setting: str, value: str) -> bool:
    """A setting of a namespace; false where it does not exist or may not be."""
    words = ["nsenter", f"--net=/proc/{holder}/ns/net", "sh", "-c", 'echo "$1" >"$0"', setting, value]
    return not subprocess.run(words, capture_output=True, timeout=COMMAND_S, check=False).returncode


def _congestion(holder: int, name: str) -> None:
    """A namespace may have only what the machine lets ordinary users choose (tcp_allowed_congestion_control)."""
    if not write_setting(holder, CONGESTION, name):
        allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
        raise UsageError(f"congestion control {name!r} cannot be had in a namespace here; these can: {', '.join(allowed)}")


def batch(holder: int, tool: str, lines: list[str]) -> None:
    if not lines:
        return
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{holder}/ns/net", tool, "-batch", "-"],
        input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=COMMAND_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise LocalError(f"{tool} failed: {' '.join(done.stderr.split())}")
