"""Emulated networks by this kernel. Each host is a network namespace; one more namespace holds the bridges, a central
one and one a region, which its trunk links to the central one. Each link is shaped on both sides.

Promises: nothing outside these namespaces is touched, and none has a name that could remain. Each namespace lives as
long as its holder process, which the kernel kills with the process that made the network. Processes that still run
inside keep their namespace, disconnected.
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
from itertools import count
from pathlib import Path
from typing import TypeVar

from netem.emulation.description import SUBNET, EmulatedLink, EmulatedNetwork
from netem.emulation.shaping import shaping
from p2pcast.ground.errors import LocalError, UsageError

T = TypeVar("T")

COMMAND_S = 30.0
CLONE_NEWNET = 0x40000000
DEVICE = "eth0"
SWITCH = "switch"
BUNDLE = 8
"""Segments sent at once over links with rates alone (1 ms at 100 Mbit/s). The bucket counts them as on a wire, with
each segment's headers. Single segments cost the machine half as much again as the tested programs. Over links with loss
each segment is sent by itself.
"""
DISABLED, FORWARDING = 0, 3
"""States of a bridge port; a disabled port drops all packets in both directions."""
BRIDGE_FILTER = "/proc/sys/net/bridge/bridge-nf-call-iptables"
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
NEEDED = ("ip", "tc", "bridge", "nsenter", "unshare", "setpriv")


class Namespaces:
    """See ``netem.emulation.description.Emulated``. Made by ``namespaces``; valid while its block runs."""

    def __init__(self, network: EmulatedNetwork, switch: int, holders: dict[str, int], segments: int) -> None:
        self.network = network
        self._switch = switch
        self._holders = holders
        self._segments = segments
        self._lent: dict[str, str] = {}
        self._gauges = count()

    def inside(self, name: str) -> Sequence[str]:
        return ["nsenter", f"--net={self.space(name)}"]

    def space(self, name: str) -> str:
        return f"/proc/{self._holders[name]}/ns/net"

    def connect(self, name: str, address: tuple[str, int], timeout_s: float) -> socket.socket:
        return self.at(name, lambda: socket.create_connection(address, timeout_s))

    def at(self, name: str, call: Callable[[], T]) -> T:
        """Run ``call`` at that host; a socket made by it belongs to that host from then on."""
        # A socket belongs to the namespace in which it was made; a new thread can enter a namespace and then ends with
        # it.
        with ThreadPoolExecutor(1, thread_name_prefix="p2pcast-namespace") as pool:
            return pool.submit(enter, self._holders[name], call).result()

    def received(self, name: str) -> int:
        """IPv4 packets received by that host."""
        counters = Path(f"/proc/{self._holders[name]}/net/snmp").read_text().splitlines()
        names, values = (line.split() for line in counters if line.startswith("Ip:"))
        return int(values[names.index("InReceives")])

    def passed(self, name: str) -> tuple[int, int]:
        port = f"{_port(self.network, name)}:"
        counted = Path(f"/proc/{self._switch}/net/dev").read_text().splitlines()
        words = next(line.split() for line in counted if line.split()[0] == port)
        return int(words[9]), int(words[1])

    def address(self, name: str) -> str:
        """IPv4 of a host, also of one lent by ``gauge``."""
        return self._lent.get(name) or self.network.address(name)

    def reshape(self, name: str, link: EmulatedLink) -> None:
        """Give that host or region another link. Packets waiting in the old one are lost. Raises UsageError,
        LocalError.
        """
        network = self.network.behind(name, link)
        before, after = (_sides(n, name, self._switch, self._holders) for n in (self.network, network))
        for (holder, device, old), (_, _, new) in zip(before, after, strict=True):
            batch(holder, "tc", [*([f"qdisc del dev {device} root"] if old else []), *new])
        self.network = network

    def cut(self, name: str) -> None:
        """Stop all traffic over the link of that host or trunk, in both directions, without closing connections."""
        self._port(name, DISABLED)

    def heal(self, name: str) -> None:
        """Restore a cut link."""
        self._port(name, FORWARDING)

    def _port(self, name: str, state: int) -> None:
        batch(self._switch, "bridge", [f"link set dev {_port(self.network, name)} state {state}"])

    @contextmanager
    def gauge(self, region: str | None) -> Iterator[str]:
        """The name of an additional unlimited host while the block runs, at that region's switch or the central one.
        From the main thread.
        """
        with namespace() as holder:
            # Each gets a new address: other hosts cache the address of the previous one for a while.
            name, number = f"gauge:{region or ''}", next(self._gauges)
            address, device = str(SUBNET[-2 - number]), f"gauge{number}"
            pair = _pair(self.network.mtu, self._segments)
            bridge = SWITCH if region is None else f"region{_region(self.network, region)}"
            batch(self._switch, "ip", [*_joined(device, bridge, pair, f"{DEVICE} {pair} netns {holder}")])
            batch(holder, "ip", _addressed(address))
            self._holders[name], self._lent[name] = holder, address
            try:
                yield name
            finally:
                del self._holders[name], self._lent[name]
                # Delete the device now; the kernel would remove it with the namespace only later.
                batch(self._switch, "ip", [f"link del dev {device}"])


def enter(holder: int, call: Callable[[], T]) -> T:
    with Path(f"/proc/{holder}/ns/net").open("rb") as space:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
    return call()


@contextmanager
def namespaces(network: EmulatedNetwork, *, only_rates: bool = True) -> Iterator[Namespaces]:
    """The network, for the length of the block. From the main thread (the holders end with the thread that started
    them). ``only_rates``: false if links may get delay or loss later.

    Raises LocalError if the machine cannot make the network, UsageError for an unavailable congestion control.
    """
    if missing := [tool for tool in NEEDED if shutil.which(tool) is None]:
        raise LocalError(f"there is no {' and no '.join(missing)} command: apt-get install iproute2 util-linux")
    with ExitStack() as held:
        switch = held.enter_context(namespace())
        holders = {host.name: held.enter_context(namespace()) for host in network.hosts}
        segments = BUNDLE if only_rates and network.only_rates else 1
        _build(network, switch, holders, segments)
        yield Namespaces(network, switch, holders, segments)


@contextmanager
def namespace() -> Iterator[int]:
    """The process that holds a new network namespace. Raises LocalError if none can be made, and never yields this
    machine's own namespace.
    """
    # In its own session: Ctrl-C reaches only the process that made the network, which first ends the processes inside.
    # The holder also ends with its input, as its parent may be killed before setpriv has requested the signal.
    words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "cat"]
    holder = subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert holder.stdin is not None
    try:
        deadline = time.monotonic() + COMMAND_S
        while holder.poll() is None and not (apart := _apart(holder.pid)) and time.monotonic() < deadline:
            time.sleep(0.002)
        if holder.poll() is not None:
            assert holder.stderr is not None
            raise LocalError(f"no network namespace can be made here: {holder.stderr.read().strip()} (only root may)")
        if not apart:
            raise LocalError(
                f"the holder of a new network namespace is still in this machine's namespace after {COMMAND_S:g} s"
            )
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()
        assert holder.stderr is not None
        holder.stderr.close()
        holder.stdin.close()


def _apart(pid: int) -> bool:
    """Whether that process is in another network namespace than this one; false for a process that has just ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")
    except OSError:
        return False


def _build(network: EmulatedNetwork, switch: int, holders: dict[str, int], segments: int) -> None:
    pair = _pair(network.mtu, segments)
    lines = ["link set lo up", *_bridge(SWITCH, network.mtu)]
    for index in range(len(network.regions)):
        lines += _bridge(f"region{index}", network.mtu)
        lines += _joined(f"core{index}", SWITCH, pair, f"trunk{index} {pair}")
        lines.append(f"link set trunk{index} master region{index} up")
    for index, host in enumerate(network.hosts):
        bridge = SWITCH if host.region is None else f"region{_region(network, host.region)}"
        lines += _joined(f"port{index}", bridge, pair, f"{DEVICE} {pair} netns {holders[host.name]}")
    batch(switch, "ip", lines)
    # Where the br_netfilter module is loaded, a bridge's packets pass the firewall hooks, which only costs time.
    write_setting(switch, BRIDGE_FILTER, "0")
    for host in network.hosts:
        batch(holders[host.name], "ip", _addressed(network.address(host.name)))
        if network.congestion is not None:
            _congestion(holders[host.name], network.congestion)
    for place in network.places:
        for side, _, words in _sides(network, place.name, switch, holders):
            batch(side, "tc", words)


def _pair(mtu: int, segments: int) -> str:
    return f"mtu {mtu} gso_max_segs {segments}"


def _bridge(name: str, mtu: int) -> list[str]:
    return [f"link add name {name} mtu {mtu} type bridge stp_state 0", f"link set {name} up"]


def _joined(port: str, bridge: str, pair: str, peer: str) -> list[str]:
    """A port of that bridge, linked with another device."""
    return [f"link add name {port} {pair} type veth peer name {peer}", f"link set {port} master {bridge} up"]


def _addressed(address: str) -> list[str]:
    return ["link set lo up", f"addr add {address}/{SUBNET.prefixlen} dev {DEVICE}", f"link set {DEVICE} up"]


def _region(network: EmulatedNetwork, name: str) -> int:
    return [region.name for region in network.regions].index(name)


def _port(network: EmulatedNetwork, name: str) -> str:
    """The bridge's end of that host's link, or of that trunk."""
    hosts = [host.name for host in network.hosts]
    return f"port{hosts.index(name)}" if name in hosts else f"core{_region(network, name)}"


def _sides(
    network: EmulatedNetwork, name: str, switch: int, holders: dict[str, int]
) -> list[tuple[int, str, list[str]]]:
    """The two devices that send onto a host's link or a trunk, up and down: (its namespace, device, its shaping)."""
    link = network.link(name)
    queue_s = link.queue_s or network.queue_s
    far = (holders[name], DEVICE) if name in holders else (switch, f"trunk{_region(network, name)}")
    near = (switch, _port(network, name))
    rates = (link.up_bps, link.down_bps)
    return [
        (holder, device, shaping(device, rate_bps, link, queue_s))
        for (holder, device), rate_bps in zip((far, near), rates, strict=True)
    ]


def write_setting(holder: int, setting: str, value: str) -> bool:
    """Write a setting of a namespace; returns false if it does not exist or is not writable."""
    words = ["nsenter", f"--net=/proc/{holder}/ns/net", "sh", "-c", 'echo "$1" >"$0"', setting, value]
    return not subprocess.run(words, capture_output=True, timeout=COMMAND_S, check=False).returncode


def _congestion(holder: int, name: str) -> None:
    """A namespace may use only the algorithms that ordinary users may choose (tcp_allowed_congestion_control)."""
    if not write_setting(holder, CONGESTION, name):
        allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
        raise UsageError(
            f"congestion control {name!r} is not available in a namespace here; available: {', '.join(allowed)}"
        )


def batch(holder: int, tool: str, lines: list[str]) -> None:
    if not lines:
        return
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{holder}/ns/net", tool, "-batch", "-"],
        input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=COMMAND_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise LocalError(f"{tool} failed: {' '.join(done.stderr.split())}")
