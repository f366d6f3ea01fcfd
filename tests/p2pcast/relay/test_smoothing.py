"""A relay sends to those below it not much faster than things come in to it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from p2pcast.relay.downstream import Downstream
from p2pcast.relay.node import Node
from p2pcast.relay.smoothing import FAR_BEHIND_S, HEADROOM, KEPT, UNHELD_BYTES_S, Inflow
from p2pcast.transport.link import Link
from p2pcast.wire.connection import Message
from p2pcast.wire.messages import Type


def test_nothing_is_held_before_anything_is_known() -> None:
    inflow = Inflow()
    assert inflow.most_bytes_s(0) is None
    inflow.came(10_000, 0.01)
    assert inflow.most_bytes_s(0) is None, "so short a time says nothing of rates"


def test_the_fastest_of_the_newest_counts_and_who_is_far_behind_is_not_held() -> None:
    inflow = Inflow()
    for bytes_s in (1e6, 3e6, 2e6):
        inflow.came(int(2 * bytes_s), 2.0)
    assert inflow.most_bytes_s(0) == int(HEADROOM * 3e6)
    assert inflow.most_bytes_s(int(FAR_BEHIND_S * 3e6)) == int(HEADROOM * 3e6)
    assert inflow.most_bytes_s(int(FAR_BEHIND_S * 3e6) + 1) == UNHELD_BYTES_S
    for _ in range(KEPT):
        inflow.came(2_000_000, 2.0)
    assert inflow.most_bytes_s(0) == int(HEADROOM * 1e6)


class Paced:
    """A stripe that takes nothing, and remembers how fast it may send."""

    writable = False
    socket = None
    acked_bytes = 0

    def __init__(self) -> None:
        self.rate: int | None = None
        self.told = asyncio.Event()

    def pace(self, rate: int | None) -> None:
        self.rate = rate
        self.told.set()


class Silent(Link):
    def send(self, kind, body, handle=0) -> None: ...


class Owner:
    def make_log(self, open_, layout):
        return None

    def on_opened(self, holding): ...


def attached(downstream: Downstream, name: bytes, *, live: bool) -> Silent:
    link = Silent(downstream, name * 16, "remote", 2)
    link.stripes = {n: Paced() for n in range(2)}
    downstream.accept(link)
    downstream.on_link_event(link, None, Message(Type.ATTACH, {"live": live, "layouts": [], "want": []}))
    return link


async def test_children_by_plan_are_held_to_what_comes_in_and_nobody_to_what_is_made_here(maker) -> None:
    node = Node(Owner(), b"c" * 16, maker.key.public)
    node.add_layout(maker.layout)
    downstream = Downstream(node)
    planned, pulling = attached(downstream, b"r", live=True), attached(downstream, b"s", live=False)
    node.open(maker.make([5000] * 3, piece=1024).open, None)
    whole = {"assembly": SimpleNamespace(pieces=1000), "open": SimpleNamespace(piece=1024), "opened_at": 1.0}
    downstream.sealed(SimpleNamespace(made=True, completed_at=1.5, **whole))
    downstream.sealed(SimpleNamespace(made=False, completed_at=3.0, **whole))
    running = asyncio.create_task(downstream.run())
    try:
        async with asyncio.timeout(30):
            await planned.stripes[1].told.wait()
        assert [stripe.rate for stripe in planned.stripes.values()] == [int(HEADROOM * 512_000)] * 2
        assert [stripe.rate for stripe in pulling.stripes.values()] == [None] * 2
    finally:
        running.cancel()
        node.disk.shutdown()
