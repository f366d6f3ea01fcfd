"""A listener with mutual TLS."""

from __future__ import annotations

import asyncio

import pytest

from p2pcast.process import event_loop
from tests.p2pcast.transport.tls_place import LIMIT_S, Place


@pytest.fixture
def place(papers):
    def run(play, *, loop=event_loop.new_event_loop, **options) -> None:
        async def body() -> None:
            here, broken = Place(papers, **options), []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: broken.append(context))
            await here.listener.start("127.0.0.1", 0)
            try:
                async with asyncio.timeout(LIMIT_S):
                    await play(here)
            finally:
                await here.listener.stop()
                await asyncio.sleep(0)
            assert broken == []

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(body())

    return run
