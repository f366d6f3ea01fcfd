"""Measures rate, round trip and loss of each link of a running network, and compares them with the description.

``measure`` sends datagrams between hosts; ``pairs`` chooses the hosts and ``faults`` names deviations (both are pure).
Every link is passed once up and once down as the narrowest of its path. Hosts of one region with identical links
measure from each to the next. The others measure to and from an unlimited host, if necessary one that is added for the
measurement.
"""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from netem.emulation.description import Bursts, EmulatedLink, EmulatedNetwork, EmulatedPath, Host
from netem.emulation.namespaces import Namespaces
from netem.emulation.shaping import FRAME_BYTES

CALIBRATIONS = 5
"""Attempts: a busy machine may spoil the first ones. Only deviating links are measured again."""
TOLERANCE = 0.05
RTT_SLACK_S = 0.001
"""Time that two programs and their kernel take to answer on a busy machine."""
STANDARD_ERRORS = 3.0
"""A measured loss within so many standard errors counts as correct."""
LOSS_SLACK = 0.0005
"""Two packets of all sent packets."""
ECHOES = 7
JITTERED_ECHOES = 15
MEDIAN_ERROR = 1.25
"""Standard error of a median in standard errors of a mean."""
FAR_ECHOES = 3
FAR_S = 0.05
"""Above this round trip, a busy machine adds little in proportion."""
AT_ONCE = 4
AT_ONCE_BPS = 100e6
"""Total rate of pairs measured at once; these have no link in common."""
FLOOD_S = 1.0
FLOOD = 1.15
"""Sending rate as a multiple of the link's rate."""
LOSS_PACKETS = 4000
LOSSLESS_PACKETS = 1000
"""Packets sent over links without loss."""
LOSS_PACKETS_S = 4000.0
LOSS_SHARE = 0.3
"""Largest share of the rate: an overflowing queue would look like loss."""
SMALL_BYTES = 100
HEADER_BYTES = 28
"""IPv4 and UDP."""
SETTLE_S = 0.3
SAMPLE_S = 0.05
BURST_PACKETS = 40
"""Largest burst of a sender that was delayed."""
SMALL_BURST_PACKETS = 8


@dataclass(frozen=True, slots=True)
class MeasuredPath:
    """From ``sender`` to ``receiver``; ``rtt_s`` is the round trip. None: not requested, or no packet arrived."""

    sender: str
    receiver: str
    asked: EmulatedPath
    asked_rtt_s: float
    rate_bps: float | None
    rtt_s: float | None
    loss: float
    loss_error: float
    """Standard error of the share, if the loss is as requested."""
    rtt_error_s: float = 0.0
    """Standard error of the round trip under jitter."""

    def document(self) -> dict[str, Any]:
        return {
            "from": self.sender, "to": self.receiver,
            "rate_bps": None if self.rate_bps is None else round(self.rate_bps), "asked_rate_bps": self.asked.rate_bps,
            "rtt_s": None if self.rtt_s is None else round(self.rtt_s, 5), "asked_rtt_s": self.asked_rtt_s,
            "rtt_error_s": round(self.rtt_error_s, 5),
            "loss": round(self.loss, 5), "asked_loss": self.asked.loss, "loss_error": round(self.loss_error, 5),
            "faults": faults(self),
        }  # fmt: skip


def faults(measured: MeasuredPath) -> list[str]:
    """Deviations of more than TOLERANCE, in words; empty for a link as requested."""
    found = []
    asked = measured.asked
    ways = f"{measured.sender} → {measured.receiver}"
    if asked.rate_bps is not None and (
        measured.rate_bps is None or abs(measured.rate_bps / asked.rate_bps - 1) > TOLERANCE
    ):
        got = "nothing came" if measured.rate_bps is None else f"{measured.rate_bps / 1e6:.1f} Mbit/s"
        found.append(f"{ways}: {got} instead of {asked.rate_bps / 1e6:.1f} Mbit/s")
    if measured.rtt_s is None or abs(measured.rtt_s - measured.asked_rtt_s) > max(
        RTT_SLACK_S, TOLERANCE * measured.asked_rtt_s, STANDARD_ERRORS * measured.rtt_error_s
    ):
        got = "no answer" if measured.rtt_s is None else f"a round trip of {measured.rtt_s * 1e3:.1f} ms"
        found.append(f"{ways}: {got} instead of {measured.asked_rtt_s * 1e3:.1f} ms")
    if abs(measured.loss - asked.loss) > max(TOLERANCE * asked.loss, STANDARD_ERRORS * measured.loss_error, LOSS_SLACK):
        found.append(f"{ways}: {measured.loss:.2%} of packets lost instead of {asked.loss:.2%}")
    return found


def loss_error(links: Sequence[EmulatedLink], loss: float, packets: int) -> float:
    """Standard error of the share lost of ``packets``; bursts make the estimate less certain."""
    rho = max((1 - b.enter - b.leave for b in (link.loss for link in links) if isinstance(b, Bursts)), default=0.0)
    spread = (1 + rho) / (1 - rho) if rho < 1 else math.inf
    return math.sqrt(loss * (1 - loss) * spread / packets)


def rtt_error_s(links: Sequence[EmulatedLink]) -> float:
    """Standard error of the median of JITTERED_ECHOES that pass each of these links twice. Jitter is uniform within its
    bounds.
    """
    return MEDIAN_ERROR * math.sqrt(sum(2 * link.jitter_s**2 / 3 for link in links) / JITTERED_ECHOES)


Pair = tuple[str, str]


def gauge_of(region: str | None) -> Host:
    """An unlimited host. No other host has a name with a colon."""
    return Host(f"gauge:{region or ''}", EmulatedLink(), region)


def with_gauges(network: EmulatedNetwork) -> EmulatedNetwork:
    return replace(
        network, hosts=(*network.hosts, *map(gauge_of, (None, *(region.name for region in network.regions))))
    )


def pairs(network: EmulatedNetwork) -> list[Pair]:
    """(sender, receiver) pairs to measure; some are unlimited hosts."""
    alike: dict[tuple[str | None, EmulatedLink], list[str]] = {}
    free: dict[str | None, str] = {}
    for host in network.hosts:
        if host.link == EmulatedLink():
            free.setdefault(host.region, host.name)
        else:
            alike.setdefault((host.region, host.link), []).append(host.name)
    found: list[Pair] = []
    for (region, link), names in alike.items():
        if len(names) > 1 and link.up_bps == link.down_bps:
            found += [(here, there) for here, there in zip(names, (*names[1:], names[0]), strict=True)]
        else:
            found += [pair for name in names for pair in _both(name, free.get(region, gauge_of(region).name))]
    for each in network.regions:
        if each.link != EmulatedLink():
            here, middle = (free.get(place, gauge_of(place).name) for place in (each.name, None))
            found += _both(here, middle)
    return found


def _both(one: str, other: str) -> list[Pair]:
    return [(one, other), (other, one)]


def batches(network: EmulatedNetwork, wanted: Sequence[Pair]) -> list[list[Pair]]:
    """Groups of pairs that can be measured at once."""
    whole = with_gauges(network)
    made: list[list[Pair]] = []
    regions = {host.name: host.region for host in whole.hosts}
    left = list(wanted)
    while left:
        batch: list[Pair] = []
        names, sum_bps = set[str](), 0.0
        for pair in list(left):
            rate_bps = whole.way(*pair).rate_bps or 0.0
            apart = regions[pair[0]] != regions[pair[1]]
            if batch and (names & set(pair) or apart or len(batch) == AT_ONCE or sum_bps + rate_bps > AT_ONCE_BPS):
                continue
            batch.append(pair)
            left.remove(pair)
            names |= set(pair)
            sum_bps += rate_bps
            if apart:
                break
        made.append(batch)
    return made


def measure(net: Namespaces, wanted: Sequence[Pair] | None = None, packets: int | None = None) -> list[MeasuredPath]:
    """Measures all ``pairs``, or the given ones; loss over ``packets`` packets. Takes a few seconds for every few
    hosts. From the main thread.
    """
    network = with_gauges(net.network)
    found: list[MeasuredPath] = []
    wanted = pairs(net.network) if wanted is None else wanted
    gauges = map(gauge_of, (None, *(region.name for region in net.network.regions)))
    with ExitStack() as lent, ThreadPoolExecutor(AT_ONCE, thread_name_prefix="p2pcast-calibration") as pool:
        for gauge in gauges:
            if any(gauge.name in pair for pair in wanted):
                lent.enter_context(net.gauge(gauge.region))
        for batch in batches(net.network, wanted):
            # Measure round trips while no other measurement runs.
            rtts = [_rtt(net, network, *pair) for pair in batch]
            found += pool.map(lambda pair, rtt_s: _pair(net, network, pair, rtt_s, packets), batch, rtts)
    return found


def calibrated(net: Namespaces) -> dict[str, Any]:
    """``off``: deviations from the request that remain after several attempts."""
    found = {(m.sender, m.receiver): m.document() for m in measure(net)}
    tries = 1
    while (off := [pair for pair, m in found.items() if m["faults"]]) and tries < CALIBRATIONS:
        found |= {(m.sender, m.receiver): m.document() for m in measure(net, off)}
        tries += 1
    return {
        "calibration": list(found.values()),
        "tries": tries,
        "off": [fault for m in found.values() for fault in m["faults"]],
    }


def _rtt(net: Namespaces, network: EmulatedNetwork, sender: str, receiver: str) -> float | None:
    up, down = network.path(sender, receiver)
    asked_s = network.way(sender, receiver).delay_s + network.way(receiver, sender).delay_s
    jitter = any(link.jitter_s or link.reorder for link in (*up, *down))
    echoes = JITTERED_ECHOES if jitter else FAR_ECHOES if asked_s > FAR_S else ECHOES
    with _sockets(net, sender, receiver) as (one, other):
        times = _round_trips(one, other, asked_s, echoes)
    # A busy machine can only lengthen round trips, so take the least; jitter has both signs.
    return (median if jitter else min)(times) if times else None


def _pair(
    net: Namespaces, network: EmulatedNetwork, pair: Pair, rtt_s: float | None, packets: int | None
) -> MeasuredPath:
    sender, receiver = pair
    there, back = network.way(sender, receiver), network.way(receiver, sender)
    packets = packets or (LOSS_PACKETS if there.loss else LOSSLESS_PACKETS)
    up, down = network.path(sender, receiver)
    with _sockets(net, sender, receiver) as (one, _):
        sides = [*((link, link.up_bps) for link in up), *((link, link.down_bps) for link in down)]
        pace = min(_pace(rate_bps) for _, rate_bps in sides)
        before = net.received(receiver)
        for _sent in _sending(one, SMALL_BYTES, pace, packets, SMALL_BURST_PACKETS):
            pass
        time.sleep(there.delay_s + SETTLE_S)
        # Ignore packets of the machine's own protocols (IGMP) in between.
        loss = max(0.0, 1 - (net.received(receiver) - before) / packets)
        rate_bps = None if there.rate_bps is None else _rate(net, one, receiver, there)
    error = loss_error((*up, *down), there.loss, packets)
    asked_rtt_s = there.delay_s + back.delay_s
    return MeasuredPath(sender, receiver, there, asked_rtt_s, rate_bps, rtt_s, loss, error, rtt_error_s((*up, *down)))


def _pace(rate_bps: float | None) -> float:
    """Small packets a second that a link of that rate carries, apart from requested losses."""
    if rate_bps is None:
        return LOSS_PACKETS_S
    return min(LOSS_PACKETS_S, LOSS_SHARE * rate_bps / 8 / (SMALL_BYTES + HEADER_BYTES + FRAME_BYTES))


def _rate(net: Namespaces, one: socket.socket, receiver: str, asked: EmulatedPath) -> float | None:
    """The rate of arrival after the queue is full, which is the bucket's rate."""
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
    """Two sockets connected with each other."""
    one, other = (net.at(name, lambda: socket.socket(type=socket.SOCK_DGRAM)) for name in (sender, receiver))
    with one, other:
        one.bind((net.address(sender), 0))
        other.bind((net.address(receiver), 0))
        one.connect(other.getsockname())
        other.connect(one.getsockname())
        yield one, other


def _round_trips(one: socket.socket, other: socket.socket, asked_s: float, echoes: int) -> list[float]:
    """Lost echoes are left out."""
    timeout_s = 2 * asked_s + 0.5
    times = []
    for number in range(echoes):
        question = struct.pack("<I", number)
        began = time.perf_counter()
        one.send(question)
        # Use one thread for question and answer, so no wake-up of a thread is measured.
        if _answer(other, question, timeout_s):
            other.send(question)
            if _answer(one, question, timeout_s):
                times.append(time.perf_counter() - began)
    return times


def _answer(sock: socket.socket, expected: bytes, timeout_s: float) -> bool:
    sock.settimeout(timeout_s)
    try:
        while sock.recv(64) != expected:
            pass
    except TimeoutError:
        return False
    return True


def _sending(one: socket.socket, size: int, pace: float, packets: int, burst: int = BURST_PACKETS) -> Iterator[None]:
    """Send ``packets`` of ``size`` bytes, ``pace`` a second. No program reads them; the device at the other
    end counts.
    """
    payload, began, sent = bytes(size), time.perf_counter(), 0
    while sent < packets:
        # A delayed sender does not catch up at once, which would overflow a queue.
        due = min(packets, sent + burst, int((time.perf_counter() - began) * pace) + 1)
        while sent < due:
            one.send(payload)
            sent += 1
        yield
        time.sleep(0.001)
