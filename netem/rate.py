"""Emulated networks with rates alone, by this kernel: a network namespace a host, joined by a bridge in one more, token buckets on both sides of each link.

Promises: nothing outside these namespaces is touched, and none of them has a name that could stay behind: each lives as long as a process that holds it,
which the kernel kills with the process that made the network, however that ends. What still runs inside keeps its namespace, cut off.

Segments leave in bundles of at most eight (1 ms at 100 Mbit/s), which a bucket counts as what a wire would carry, headers of each included: one by one they cost
the machine half as much again as the programs that are tried.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from netem.description import SUBNET, Network
from p2pcast.errors import LocalError, UsageError

COMMAND_S = 30.0
CLONE_NEWNET = 0x40000000
DEVICE = "eth0"
BUCKET_S = 0.004
"""What a link may catch up at once after its timer came late: 50 kB at 100 Mbit/s."""
MIN_BUCKET_BYTES = 16_000
"""Ten packets."""
MIN_QUEUE_BYTES = 64_000
SWITCH = "switch"
BUNDLE = 8
"""Segments."""
BRIDGE_FILTER = "/proc/sys/net/bridge/bridge-nf-call-iptables"
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
NEEDED = ("ip", "tc", "nsenter", "unshare", "setpriv")


class RateNetwork:
    """See ``netem.description.Emulated``. Made by ``rate_network``; to be used while its block runs."""

    def __init__(self, network: Network, holders: dict[str, int]) -> None:
        self.network = network
        self._holders = holders

    def inside(self, name: str) -> Sequence[str]:
        return ["nsenter", f"--net=/proc/{self._holders[name]}/ns/net"]

    def connect(self, name: str, address: tuple[str, int], timeout_s: float) -> socket.socket:
        # A socket belongs to the namespace in which it was made; a thread has one of its own, which ends with it.
        with ThreadPoolExecutor(1, thread_name_prefix="p2pcast-namespace") as pool:
            return pool.submit(self._connect, self._holders[name], address, timeout_s).result()

    @staticmethod
    def _connect(holder: int, address: tuple[str, int], timeout_s: float) -> socket.socket:
        with Path(f"/proc/{holder}/ns/net").open("rb") as space:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
            return socket.create_connection(address, timeout_s)


@contextmanager
def rate_network(network: Network) -> Iterator[RateNetwork]:
    """The network, for as long as the block runs. From the main thread (the holders end with the thread that started them).

    Raises UsageError for what this backend has not (delay, loss), LocalError when the machine will not.
    """
    if any(host.link.delay_s or host.link.loss for host in network.hosts):
        raise UsageError("the rate backend has neither delay nor loss: that takes netem, by this kernel or by user-mode Linux")
    if missing := [tool for tool in NEEDED if shutil.which(tool) is None]:
        raise LocalError(f"there is no {' and no '.join(missing)} command: apt-get install iproute2 util-linux")
    with ExitStack() as held:
        switch = held.enter_context(_namespace())
        holders = {host.name: held.enter_context(_namespace()) for host in network.hosts}
        _build(network, switch, holders)
        yield RateNetwork(network, holders)


@contextmanager
def _namespace() -> Iterator[int]:
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
    for index, host in enumerate(network.hosts):
        pair = f"mtu {network.mtu} gso_max_segs {BUNDLE}"
        lines += [
            f"link add name port{index} {pair} type veth peer name {DEVICE} {pair} netns {holders[host.name]}",
            f"link set port{index} master {SWITCH} up",
        ]
    _batch(switch, "ip", lines)
    # Packets of a bridge pass the firewall's hooks where that module is loaded, for nothing.
    _write(switch, BRIDGE_FILTER, "0")
    _batch(switch, "tc", [w for i, h in enumerate(network.hosts) for w in shaping(f"port{i}", h.link.down_bps, network.queue_s)])
    for host in network.hosts:
        holder = holders[host.name]
        address = f"{network.address(host.name)}/{SUBNET.prefixlen}"
        _batch(holder, "ip", ["link set lo up", f"addr add {address} dev {DEVICE}", f"link set {DEVICE} up"])
        _batch(holder, "tc", shaping(DEVICE, host.link.up_bps, network.queue_s))
        if network.congestion is not None:
            _congestion(holder, network.congestion)


def _write(holder: int, setting: str, value: str) -> bool:
    """A setting of a namespace; false where it does not exist or may not be."""
    words = ["nsenter", f"--net=/proc/{holder}/ns/net", "sh", "-c", 'echo "$1" >"$0"', setting, value]
    return not subprocess.run(words, capture_output=True, timeout=COMMAND_S, check=False).returncode


def _congestion(holder: int, name: str) -> None:
    """A namespace may have only what the machine lets ordinary users choose (tcp_allowed_congestion_control)."""
    if not _write(holder, CONGESTION, name):
        allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
        raise UsageError(f"congestion control {name!r} cannot be had in a namespace here; these can: {', '.join(allowed)}")


def shaping(device: str, rate_bps: float | None, queue_s: float) -> list[str]:
    """What makes a device send no faster, in `tc`'s words."""
    if rate_bps is None:
        return []
    bucket = max(MIN_BUCKET_BYTES, int(rate_bps * BUCKET_S / 8))
    queue = max(MIN_QUEUE_BYTES, int(rate_bps * queue_s / 8))
    return [f"qdisc add dev {device} root tbf rate {rate_bps:.0f}bit burst {bucket} limit {bucket + queue}"]


def _batch(holder: int, tool: str, lines: list[str]) -> None:
    if not lines:
        return
    done = subprocess.run(
        ["nsenter", f"--net=/proc/{holder}/ns/net", tool, "-batch", "-"],
        input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=COMMAND_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise LocalError(f"{tool} failed: {' '.join(done.stderr.split())}")
