"""A relay sends to live children not much faster than data comes in."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from p2pcast.relay.downstream import Downstream
from p2pcast.relay.node import Node
from p2pcast.relay.pacing import InboundRate
from p2pcast.relay.tuning import FAR_BEHIND_S, INBOUND_ARTIFACTS, PACED_RTT_S, PACING_HEADROOM, UNPACED_BYTES_S
from p2pcast.transport.link import Link
from p2pcast.wire import messages
from p2pcast.wire.connection import Message
from p2pcast.wire.messages import Type


def test_nothing_is_paced_before_an_inbound_rate_is_known() -> None:
    inbound = InboundRate()
    assert inbound.most_bytes_s(0, PACED_RTT_S) is None
    inbound.add(10_000, 0.01)
    assert inbound.most_bytes_s(0, PACED_RTT_S) is None, "so short a transfer shows no rate"


def test_the_fastest_recent_rate_counts_and_a_child_far_behind_is_not_paced() -> None:
    inbound = InboundRate()
    for bytes_s in (1e6, 3e6, 2e6):
        inbound.add(int(2 * bytes_s), 2.0)
    assert inbound.most_bytes_s(0, PACED_RTT_S) == int(PACING_HEADROOM * 3e6)
    assert inbound.most_bytes_s(int(FAR_BEHIND_S * 3e6), PACED_RTT_S) == int(PACING_HEADROOM * 3e6)
    assert inbound.most_bytes_s(int(FAR_BEHIND_S * 3e6) + 1, PACED_RTT_S) == UNPACED_BYTES_S
    for _ in range(INBOUND_ARTIFACTS):
        inbound.add(2_000_000, 2.0)
    assert inbound.most_bytes_s(0, PACED_RTT_S) == int(PACING_HEADROOM * 1e6)


def test_a_near_child_is_not_paced() -> None:
    inbound = InboundRate()
    inbound.add(2_000_000, 2.0)
    assert inbound.most_bytes_s(0, 0.9 * PACED_RTT_S) == UNPACED_BYTES_S


class Paced:
    """A stripe that takes no data and records its rate limit."""

    writable = False
    socket = None
    acked_bytes = 0

    def __init__(self) -> None:
        self.rate: int | None = None
        self.told = asyncio.Event()

    def info(self) -> SimpleNamespace:
        return SimpleNamespace(rtt_s=PACED_RTT_S, min_rtt_s=PACED_RTT_S)

    def pace(self, rate: int | None) -> None:
        self.rate = rate
        if rate != UNPACED_BYTES_S:
            self.told.set()


class Silent(Link):
    stripes: dict[int, Any]

    def send(self, record, handle=0) -> None: ...


class Owner:
    def make_log(self, open_, layout, *, excerpt):
        return None

    def on_opened(self, holding): ...


def attached(downstream: Downstream, name: bytes, *, live: bool) -> Silent:
    link = Silent(downstream, name * 16, "remote", 2)
    link.stripes = {n: Paced() for n in range(2)}
    downstream.accept(link)
    downstream.on_link_event(link, None, Message(Type.ATTACH, messages.Attach(live=live, layouts=[], want=[])))
    return link


async def test_live_children_are_paced_by_received_artifacts_alone(maker) -> None:
    node = Node(Owner(), b"c" * 16, maker.key.public)
    node.add_layout(maker.layout)
    downstream = node.downstream
    planned, pulling = attached(downstream, b"r", live=True), attached(downstream, b"s", live=False)
    node.open(maker.make([5000] * 3, piece=1024).open, None)
    whole = {"assembly": SimpleNamespace(pieces=1000), "open": SimpleNamespace(piece=1024)}
    downstream.sealed(SimpleNamespace(made=True, took_s=0.5, **whole))
    downstream.sealed(SimpleNamespace(made=False, took_s=2.0, **whole))
    running = asyncio.create_task(downstream.run())
    try:
        async with asyncio.timeout(600):
            await planned.stripes[1].told.wait()
        assert [stripe.rate for stripe in planned.stripes.values()] == [int(PACING_HEADROOM * 512_000)] * 2
        assert [stripe.rate for stripe in pulling.stripes.values()] == [None] * 2
    finally:
        running.cancel()
        node.disk.shutdown()
