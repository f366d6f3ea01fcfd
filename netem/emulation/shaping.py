"""Links as `tc` commands. Pure.

A device with only a rate gets a token bucket. A device with delay or loss gets netem, followed by the bucket. So the
queue is counted in bytes and holds only packets that wait for the rate. The rate of netem itself would have one queue,
counted in packets, for delayed and waiting packets. Acknowledgements on a long path fill that queue, and the sender
learns of drops as from no real router. Packets leave netem in slots of half a millisecond, since one timer a packet
would overload a kernel in user space. Lost packets do not count against the rate.
"""

from __future__ import annotations

from netem.emulation.description import Bursts, EmulatedLink

BUCKET_S = 0.004
"""Burst that a link may send after a late timer: 50 kB at 100 Mbit/s."""
MIN_BUCKET_BYTES = 16_000
"""Ten packets."""
MIN_QUEUE_BYTES = 64_000
FRAME_BYTES = 14
"""Ethernet header, which `tc` counts too."""
SLOT_S = 0.0005
SLOTTED_S = 0.004
"""Least delay for which slots are used. A packet that finds a slot open would lose a delay of half a millisecond
altogether.
"""
MOST_PACKETS = 1_000_000
"""Limit of packets in flight, effectively unlimited."""


def shaping(device: str, rate_bps: float | None, link: EmulatedLink, queue_s: float) -> list[str]:
    """Lines for `tc -batch` that shape a device without qdisc like ``link``; ``rate_bps`` is the link's rate in that
    direction.
    """
    rate = [] if rate_bps is None else [bucket(rate_bps, queue_s)]
    if link.only_rates:
        return [f"qdisc add dev {device} root {each}" for each in rate]
    first = f"qdisc add dev {device} root handle 1: {impairment(link)}"
    return [first, *(f"qdisc add dev {device} parent 1:1 handle 2: {each}" for each in rate)]


def bucket(rate_bps: float, queue_s: float) -> str:
    burst = max(MIN_BUCKET_BYTES, int(rate_bps * BUCKET_S / 8))
    queue = max(MIN_QUEUE_BYTES, int(rate_bps * queue_s / 8))
    return f"tbf rate {rate_bps:.0f}bit burst {burst} limit {burst + queue}"


def impairment(link: EmulatedLink) -> str:
    words = [f"netem limit {MOST_PACKETS}"]
    slotted = link.delay_s >= SLOTTED_S
    if link.delay_s:
        # A single packet waits for its own slot.
        delay_s = link.delay_s - (SLOT_S if slotted else 0)
        jitter = f" {link.jitter_s * 1e6:.0f}us" if link.jitter_s else ""
        words.append(f"delay {delay_s * 1e6:.0f}us{jitter}")
    if isinstance(link.loss, Bursts):
        words.append(
            f"loss gemodel {' '.join(map(_percent, (link.loss.enter, link.loss.leave, link.loss.bad, link.loss.good)))}"
        )
    elif link.loss:
        words.append(f"loss {_percent(link.loss)}")
    if link.reorder:
        words.append(f"reorder {_percent(link.reorder)}")
    if slotted:
        words.append(f"slot {SLOT_S * 1e6:.0f}us {SLOT_S * 1e6:.0f}us")
    return " ".join(words)


def _percent(share: float) -> str:
    return f"{share * 100:.6f}%"
