"""Whom a peer tries next, and how often, when nobody answers."""

from __future__ import annotations

import asyncio
import socket

from p2pcast.relay.node import Node
from p2pcast.wire.connection import Identity
from p2pcast.wire.token import Token
from rollout_node import attachment
from rollout_node.attachment import Attachment

HUB, PARENT, BACKUP = (bytes([n]) * 16 for n in (1, 2, 3))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Tried(Attachment):
    """Writes down whom it tries, and how long it waits after."""

    def __init__(self, port: int) -> None:
        me = Identity(bytes(16), "me", Token(bytes(16), bytes(20)))
        node = Node(None, me.node, bytes(32))  # type: ignore[arg-type]
        super().__init__(node, me, lambda: (HUB, "127.0.0.1", port), 1, lambda: None, None)
        self.tried: list[bytes | float] = []

    async def _attach(self, place, *, live):
        self.tried.append(place[0])
        return await super()._attach(place, live=live)


async def tries(monkeypatch, attach: Tried, until: int) -> list[bytes | float]:
    """Real connections to a port where nobody listens; waiting is written down instead of done."""
    enough = asyncio.Event()
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        attach.tried.append(seconds)
        if len(attach.tried) >= until:
            enough.set()
        await real_sleep(0)

    monkeypatch.setattr(attachment.asyncio, "sleep", sleep)
    task = asyncio.create_task(attach._follow_plan())
    async with asyncio.timeout(30):
        await enough.wait()
    task.cancel()
    await asyncio.wait([task])
    attach._node.close()
    return attach.tried


async def test_a_hub_that_is_gone_is_tried_ever_less_often(monkeypatch):
    attach = Tried(free_port())
    attach.order((1, 1), None, [])
    tried = await tries(monkeypatch, attach, 16)
    assert tried[0::2] == [HUB] * (len(tried) // 2)
    waits = [w for w in tried[1::2] if isinstance(w, float)]
    assert len(waits) == len(tried) // 2
    assert waits[0] <= 1.5 * attachment.RETRY_MIN_S
    assert waits[-1] >= 0.5 * attachment.RETRY_MAX_S


async def test_everybody_is_tried_before_the_first_wait(monkeypatch):
    port = free_port()
    attach = Tried(port)
    attach.order((1, 1), (PARENT, "127.0.0.1", port), [(BACKUP, "127.0.0.1", port)])
    tried = await tries(monkeypatch, attach, 5)
    assert tried[:3] == [PARENT, BACKUP, HUB]
    assert isinstance(tried[3], float)
