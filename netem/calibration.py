"""Whether a network that runs is the one that was asked for: rate, round trip and loss of each link, measured before anything is tried on it.

``measure`` sends datagrams from host to host, ``pairs`` says between which, ``faults`` what is off; these two are pure. Every link is passed once up and once down
where it is the narrowest: among hosts of one region with links alike from each to the next, else to and from one that nothing limits, where need be one that
is there for that alone.
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

from netem.description import Bursts, Host, Link, Network, Way
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
JITTERED_ECHOES = 15
MEDIAN_ERROR = 1.25
"""Standard errors of a mean that one of a median is."""
FAR_ECHOES = 3
FAR_S = 0.05
"""A round trip that is so long is not lengthened much by a machine that is busy."""
AT_ONCE = 4
AT_ONCE_BPS = 100e6
"""As much may be sent by pairs that are measured at once, which have no link in common."""
FLOOD_S = 1.0
FLOOD = 1.15
"""Times the rate."""
LOSS_PACKETS = 4000
LOSSLESS_PACKETS = 1000
"""Where none should be lost."""
LOSS_PACKETS_S = 4000.0
LOSS_SHARE = 0.3
"""Of the rate, at most: a queue that overflows would be taken for loss."""
SMALL_BYTES = 100
HEADER_BYTES = 28
"""IPv4 and UDP."""
SETTLE_S = 0.3
SAMPLE_S = 0.05
BURST_PACKETS = 40
"""At once, by one who was held up."""
SMALL_BURST_PACKETS = 8


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
    rtt_error_s: float = 0.0
    """The same of the round trip, where there is jitter."""

    def document(self) -> dict[str, Any]:
        return {
            "from": self.sender, "to": self.receiver,
            "rate_bps": None if self.rate_bps is None else round(self.rate_bps), "asked_rate_bps": self.asked.rate_bps,
            "rtt_s": None if self.rtt_s is None else round(self.rtt_s, 5), "asked_rtt_s": self.asked_rtt_s,
            "rtt_error_s": round(self.rtt_error_s, 5),
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
    if measured.rtt_s is None or abs(measured.rtt_s - measured.asked_rtt_s) > max(
        RTT_SLACK_S, TOLERANCE * measured.asked_rtt_s, STANDARD_ERRORS * measured.rtt_error_s
    ):
        got = "no answer" if measured.rtt_s is None else f"a round trip of {measured.rtt_s * 1e3:.1f} ms"
        found.append(f"{ways}: {got} instead of {measured.asked_rtt_s * 1e3:.1f} ms")
    if abs(measured.loss - asked.loss) > max(TOLERANCE * asked.loss, STANDARD_ERRORS * measured.loss_error, LOSS_SLACK):
        found.append(f"{ways}: {measured.loss:.2%} of packets lost instead of {asked.loss:.2%}")
    return found


def loss_error(links: Sequence[Link], loss: float, packets: int) -> float:
    """Standard error of a share of ``packets`` lost; lost in bursts they say less."""
    rho = max((1 - b.enter - b.leave for b in (link.loss for link in links) if isinstance(b, Bursts)), default=0.0)
    spread = (1 + rho) / (1 - rho) if rho < 1 else math.inf
    return math.sqrt(loss * (1 - loss) * spread / packets)


def rtt_error_s(links: Sequence[Link]) -> float:
    """Standard error of the median of JITTERED_ECHOES that pass each of these links twice. Jitter is even between its bounds."""
    return MEDIAN_ERROR * math.sqrt(sum(2 * link.jitter_s**2 / 3 for link in links) / JITTERED_ECHOES)


Pair = tuple[str, str]


def gauge_of(region: str | None) -> Host:
    """A host that nothing limits. No other has a name with a colon."""
    return Host(f"gauge:{region or ''}", Link(), region)


def with_gauges(network: Network) -> Network:
    return replace(network, hosts=(*network.hosts, *map(gauge_of, (None, *(region.name for region in network.regions)))))


def pairs(network: Network) -> list[Pair]:
    """(sender, receiver) of what is to be measured; some are gauges."""
    alike: dict[tuple[str | None, Link], list[str]] = {}
    free: dict[str | None, str] = {}
    for host in network.hosts:
        if host.link == Link():
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
        if each.link != Link():
            here, middle = (free.get(place, gauge_of(place).name) for place in (each.name, None))
            found += _both(here, middle)
    return found


def _both(one: str, other: str) -> list[Pair]:
    return [(one, other), (other, one)]


def batches(network: Network, wanted: Sequence[Pair]) -> list[list[Pair]]:
    """Pairs that can be measured at once."""
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


def measure(net: Namespaces, wanted: Sequence[Pair] | None = None, packets: int | None = None) -> list[Measured]:
    """All ``pairs`` unless some are named; loss by so many packets. Takes a few seconds for each few hosts. From the main thread."""
    network = with_gauges(net.network)
    found: list[Measured] = []
    wanted = pairs(net.network) if wanted is None else wanted
    gauges = map(gauge_of, (None, *(region.name for region in net.network.regions)))
    with ExitStack() as lent, ThreadPoolExecutor(AT_ONCE, thread_name_prefix="p2pcast-calibration") as pool:
        for gauge in gauges:
            if any(gauge.name in pair for pair in wanted):
                lent.enter_context(net.gauge(gauge.region))
        for batch in batches(net.network, wanted):
            # What answers take is measured while nothing else is.
            rtts = [_rtt(net, network, *pair) for pair in batch]
            found += pool.map(lambda pair, rtt_s: _pair(net, network, pair, rtt_s, packets), batch, rtts)
    return found


def _rtt(net: Namespaces, network: Network, sender: str, receiver: str) -> float | None:
    up, down = network.path(sender, receiver)
    asked_s = network.way(sender, receiver).delay_s + network.way(receiver, sender).delay_s
    jitter = any(link.jitter_s or link.reorder for link in (*up, *down))
    echoes = JITTERED_ECHOES if jitter else FAR_ECHOES if asked_s > FAR_S else ECHOES
    with _sockets(net, sender, receiver) as (one, other):
        times = _round_trips(one, other, asked_s, echoes)
    # A busy machine only ever lengthens one; jitter goes both ways.
    return (median if jitter else min)(times) if times else None


def _pair(net: Namespaces, network: Network, pair: Pair, rtt_s: float | None, packets: int | None) -> Measured:
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
        # A packet of the machine's own (IGMP) may come between.
        loss = max(0.0, 1 - (net.received(receiver) - before) / packets)
        rate_bps = None if there.rate_bps is None else _rate(net, one, receiver, there)
    error = loss_error((*up, *down), there.loss, packets)
    asked_rtt_s = there.delay_s + back.delay_s
    return Measured(sender, receiver, there, asked_rtt_s, rate_bps, rtt_s, loss, error, rtt_error_s((*up, *down)))


def _pace(rate_bps: float | None) -> float:
    """Small packets a second that a link of that rate lets through, but for what it is to lose."""
    if rate_bps is None:
        return LOSS_PACKETS_S
    return min(LOSS_PACKETS_S, LOSS_SHARE * rate_bps / 8 / (SMALL_BYTES + HEADER_BYTES + FRAME_BYTES))


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
        one.bind((net.address(sender), 0))
        other.bind((net.address(receiver), 0))
        one.connect(other.getsockname())
        other.connect(one.getsockname())
        yield one, other


def _round_trips(one: socket.socket, other: socket.socket, asked_s: float, echoes: int) -> list[float]:
    """What is lost does not count."""
    timeout_s = 2 * asked_s + 0.5
    times = []
    for number in range(echoes):
        question = struct.pack("<I", number)
        began = time.perf_counter()
        one.send(question)
        # Question and answer in turns: no thread has to be woken in between.
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
    """Send ``packets`` of ``size`` bytes, ``pace`` a second; nobody reads them, the device at the other end counts."""
    payload, began, sent = bytes(size), time.perf_counter(), 0
    while sent < packets:
        # Whoever was held up does not make up for it at once: that would be more than a queue holds.
        due = min(packets, sent + burst, int((time.perf_counter() - began) * pace) + 1)
        while sent < due:
            one.send(payload)
            sent += 1
        yield
        time.sleep(0.001)
