"""Cancelling a dial gives a cancelled task, even if the connection is refused at the same moment."""

from __future__ import annotations

import asyncio
import socket

from p2pcast.ground.errors import RetryableError
from p2pcast.transport.dial import dial
from p2pcast.transport.link import QuietOwner
from p2pcast.trust.join_token import SECRET_BYTES, JoinToken
from p2pcast.wire.connection import Identity

STEPS = 40
"""Turns of the loop: more than a refused dial takes."""


async def test_a_cancelled_dial_stays_cancelled() -> None:
    identity = Identity(bytes(16), "p1", JoinToken(bytes(32), bytes(SECRET_BYTES)))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        ends = set()
        for turns in range(STEPS):
            task = asyncio.create_task(
                dial(QuietOwner(), "127.0.0.1", port, identity, purpose="data", role="child", stripes=4)
            )
            for _ in range(turns):
                await asyncio.sleep(0)
            told = task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() == told, f"cancelled after {turns} turns"
            ends.add(told)
            if not told:
                assert isinstance(task.exception(), RetryableError)
        assert ends == {True, False}, "the dial has to be met before and after its end"
