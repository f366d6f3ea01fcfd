"""``swarm(play)``: a swarm for one coroutine, on an event loop of its own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from p2pcast.process import event_loop

sys.path.append(str(Path(__file__).parent))  # chain_members

from chain_members import Play, Swarm


@pytest.fixture
def swarm(maker, tmp_path):
    def run(play: Play, *, loop=event_loop.new_event_loop, **options) -> None:
        async def body() -> None:
            swarm = Swarm(maker, tmp_path, **options)
            try:
                await play(swarm)
            finally:
                await swarm.close()
                await asyncio.sleep(0)

        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(body())

    return run
