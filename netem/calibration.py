"""Whether a network that runs is the one that was asked for: rate, round trip and loss of each link, measured before anything is tried on it.

``measure`` sends datagrams from host to host; ``faults`` is pure. A ring of all hosts is measured, so each link is passed once up and once down.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from netem.description import Bursts, Link, Way
from netem.namespaces import Namespaces
from netem.shaping import FRAME_BYTES

TOLERANCE = 0.05
RTT_SLACK_S = 0.001
"""What two programs and their kernel take to answer, on a busy machine."""
STANDARD_ERRORS = 3.0
"""A share of lost packets that lies within so many is no proof of another share."""
LOSS_SLACK = 0.0005
"""Two packets of all that are sent."""
ECHOES = 7
FLOOD_S = 1.0
FLOOD = 1.15
"""Times the rate."""
LOSS_PACKETS = 4000
LOSS_PACKETS_S = 4000.0
LOSS_SHARE = 0.3
"""Of the rate, at most: a queue that overflows would be taken for loss."""
SMALL_BYTES = 100
HEADER_BYTES = 28
"""IPv4 and UDP."""
SETTLE_S = 0.3
SAMPLE_S = 0.05
BURST_PACKETS = 40


@dataclass(frozen=True, slots=True)
class Measured:
    """From ``sender`` to ``receiver``; ``rtt_s`` there and back. None: not asked for, or nothing came."""

    sender: str
    receiver: str
    asked: Way
    asked_rtt_s: float
    rate_bps: float | None
    rtt_s: float | None
    loss: float
    loss_error: float
    """Its standard error, had the loss been as asked."""

    def document(self) -> dict[str, Any]:
        return {
            "from": self.sender, "to": self.receiver,
            "rate_bps": None if self.rate_bps is None else round(self.rate_bps), "asked_rate_bps": self.asked.rate_bps,
            "rtt_s": None if self.rtt_s is None else round(self.rtt_s, 5), "asked_rtt_s": self.asked_rtt_s,
            "loss": round(self.loss, 5), "asked_loss": self.asked.loss, "loss_error": round(self.loss_error, 5),
            "faults": faults(self),
        }  # fmt: skip


def faults(measured: Measured) -> list[str]:
    """What is off by more than TOLERANCE, in words; empty for a link as it was asked for."""
    found = []
    asked = measured.asked
    ways = f"{measured.sender} → {measured.receiver}"
    if asked.rate_bps is not None and (measured.rate_bps is None or abs(measured.rate_bps / asked.rate_bps - 1) > TOLERANCE):
        got = "nothing came" if measured.rate_bps is None else f"{measured.rate_bps / 1e6:.1f} Mbit/s"
        found.append(f"{ways}: {got} instead of {asked.rate_bps / 1e6:.1f} Mbit/s")
    if measured.rtt_s is None or abs(measured.rtt_s - measured.asked_rtt_s) > max(RTT_SLACK_S, TOLERANCE * measured.asked_rtt_s):
        got = "no answer" if measured.rtt_s is None else f"a round trip of {measured.rtt_s * 1e3:.1f} ms"
        found.append(f"{ways}: {got} instead of {measured.asked_rtt_s * 1e3:.1f} ms")
    if abs(measured.loss - asked.loss) > max(TOLERANCE * asked.loss, STANDARD_ERRORS * measured.loss_error, LOSS_SLACK):
        found.append(f"{ways}: {measured.loss:.2%} of packets lost instead of {asked.loss:.2%}")
    return found


def loss_error(links: tuple[Link, Link], loss: float, packets: int) -> float:
    """Standard error of a share of ``packets`` lost; lost in bursts they say less."""
    rho = max((1 - b.enter - b.leave for b in (link.loss for link in links) if isinstance(b, Bursts)), default=0.0)
    spread = (1 + rho) / (1 - rho) if rho < 1 else math.inf
    return math.sqrt(loss * (1 - loss) * spread / packets)


def measure(net: Namespaces, packets: int = LOSS_PACKETS) -> list[Measured]:
    """Each host to the next, the last to the first; loss by so many packets. Takes a few seconds a host."""
    hosts = net.network.hosts
    return [_pair(net, here.name, there.name, packets) for here, there in zip(hosts, (*hosts[1:], hosts[0]), strict=True)]


def _pair(net: Namespaces, sender: str, receiver: str, packets: int) -> Measured:
    links = {host.name: host.link for host in net.network.hosts}
    there, back = net.network.way(sender, receiver), net.network.way(receiver, sender)
    asked_rtt_s = there.delay_s + back.delay_s
    with _sockets(net, sender, receiver) as (one, other):
        rtt_s = _round_trip(one, other, asked_rtt_s)
        pace = LOSS_PACKETS_S
        if there.rate_bps is not None:
            pace = min(pace, LOSS_SHARE * there.rate_bps / 8 / (SMALL_BYTES + HEADER_BYTES + FRAME_BYTES))
        before = net.received(receiver)
        for _ in _sending(one, SMALL_BYTES, pace, packets):
            pass
        time.sleep(there.delay_s + SETTLE_S)
        # A packet of the machine's own (IGMP) may come between.
        loss = max(0.0, 1 - (net.received(receiver) - before) / packets)
        rate_bps = None if there.rate_bps is None else _rate(net, one, receiver, there)
    error = loss_error((links[sender], links[receiver]), there.loss, packets)
    return Measured(sender, receiver, there, asked_rtt_s, rate_bps, rtt_s, loss, error)


def _rate(net: Namespaces, one: socket.socket, receiver: str, asked: Way) -> float | None:
    """What arrives once the queue is full: then the bucket is what is seen."""
    assert asked.rate_bps is not None
    frame_bits = 8 * (net.network.mtu + FRAME_BYTES)
    pace = FLOOD * asked.rate_bps / frame_bits
    seen: list[tuple[float, int]] = []
    settled = time.perf_counter() + asked.delay_s + SETTLE_S
    for _ in _sending(one, net.network.mtu - HEADER_BYTES, pace, int(pace * (FLOOD_S + asked.delay_s + SETTLE_S))):
        now = time.perf_counter()
        if now >= settled:
            seen.append((now, net.received(receiver)))
            settled = now + SAMPLE_S
    if len(seen) < 2 or seen[-1][1] == seen[0][1]:
        return None
    return (seen[-1][1] - seen[0][1]) * frame_bits / (seen[-1][0] - seen[0][0])


@contextmanager
def _sockets(net: Namespaces, sender: str, receiver: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two that are connected with each other."""
    one, other = (net.at(name, lambda: socket.socket(type=socket.SOCK_DGRAM)) for name in (sender, receiver))
    with one, other:
        one.bind((net.network.address(sender), 0))
        other.bind((net.network.address(receiver), 0))
        one.connect(other.getsockname())
        other.connect(one.getsockname())
        yield one, other


def _round_trip(one: socket.socket, other: socket.socket, asked_s: float) -> float | None:
    """The median; what is lost does not count."""
    timeout_s = 2 * asked_s + 0.5
    times = []
    for number in range(ECHOES):
        question = struct.pack("<I", number)
        began = time.perf_counter()
        one.send(question)
        # Question and answer in turns: no thread has to be woken in between.
        if _answer(other, question, timeout_s):
            other.send(question)
            if _answer(one, question, timeout_s):
                times.append(time.perf_counter() - began)
    return median(times) if times else None


def _answer(sock: socket.socket, expected: bytes, timeout_s: float) -> bool:
    sock.settimeout(timeout_s)
    try:
        while sock.recv(64) != expected:
            pass
    except TimeoutError:
        return False
    return True


def _sending(one: socket.socket, size: int, pace: float, packets: int) -> Iterator[None]:
    """Send ``packets`` of ``size`` bytes, ``pace`` a second; nobody reads them, the device at the other end counts."""
    payload, began, sent = bytes(size), time.perf_counter(), 0
    while sent < packets:
        # Whoever was held up does not make up for it at once: that would be more than a queue holds.
        due = min(packets, sent + BURST_PACKETS, int((time.perf_counter() - began) * pace) + 1)
        while sent < due:
            one.send(payload)
            sent += 1
        yield
        time.sleep(0.001)
