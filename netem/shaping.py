"""Links in the words of `tc`. Pure.

A device that only sends at a rate gets a token bucket. One that also delays or loses gets netem, and the bucket behind it, so that the queue is counted in bytes and holds what waits
for the rate alone. (netem's own rate has one queue for what is on the way and what waits, counted in packets: acknowledgements on a long way fill it, and who sends is told of what was
dropped, as no router would.) Packets leave netem in slots of half a millisecond: one timer for each would take a kernel in user space more time than it has.
What is lost does not count against the rate.
"""

from __future__ import annotations

from netem.description import Bursts, Link

BUCKET_S = 0.004
"""What a link may catch up at once after its timer came late: 50 kB at 100 Mbit/s."""
MIN_BUCKET_BYTES = 16_000
"""Ten packets."""
MIN_QUEUE_BYTES = 64_000
FRAME_BYTES = 14
"""Ethernet, which `tc` counts too."""
SLOT_S = 0.0005
SLOTTED_S = 0.004
"""Delay from which on there are slots: one of half a millisecond that makes up for a slot is no delay at all, if the packet finds one open."""
MOST_PACKETS = 1_000_000
"""On the way at once: any number."""


def shaping(device: str, rate_bps: float | None, link: Link, queue_s: float) -> list[str]:
    """Lines for `tc -batch` that make a device without qdisc send as ``link`` would; ``rate_bps`` is the link's in that direction."""
    rate = [] if rate_bps is None else [bucket(rate_bps, queue_s)]
    if link.only_rates:
        return [f"qdisc add dev {device} root {each}" for each in rate]
    first = f"qdisc add dev {device} root handle 1: {impairment(link)}"
    return [first, *(f"qdisc add dev {device} parent 1:1 handle 2: {each}" for each in rate)]


def bucket(rate_bps: float, queue_s: float) -> str:
    burst = max(MIN_BUCKET_BYTES, int(rate_bps * BUCKET_S / 8))
    queue = max(MIN_QUEUE_BYTES, int(rate_bps * queue_s / 8))
    return f"tbf rate {rate_bps:.0f}bit burst {burst} limit {burst + queue}"


def impairment(link: Link) -> str:
    words = [f"netem limit {MOST_PACKETS}"]
    slotted = link.delay_s >= SLOTTED_S
    if link.delay_s:
        # A packet that comes alone waits for a slot of its own.
        delay_s = link.delay_s - (SLOT_S if slotted else 0)
        jitter = f" {link.jitter_s * 1e6:.0f}us" if link.jitter_s else ""
        words.append(f"delay {delay_s * 1e6:.0f}us{jitter}")
    if isinstance(link.loss, Bursts):
        words.append(f"loss gemodel {' '.join(map(_percent, (link.loss.enter, link.loss.leave, link.loss.bad, link.loss.good)))}")
    elif link.loss:
        words.append(f"loss {_percent(link.loss)}")
    if link.reorder:
        words.append(f"reorder {_percent(link.reorder)}")
    if slotted:
        words.append(f"slot {SLOT_S * 1e6:.0f}us {SLOT_S * 1e6:.0f}us")
    return " ".join(words)


def _percent(share: float) -> str:
    return f"{share * 100:.6f}%"
