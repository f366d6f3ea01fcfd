"""Loss of a worker ends vLLM's server; the peer notices, and a later server gets the version.

These tests run after all others of this folder: they lose the shared server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from real_server import Server, load, one_off_connections
from shared_engine import FIRST, Peer, advance, installs

from p2pcast.ground.errors import RetryableError
from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.vllm_server import VllmServer

pytestmark = pytest.mark.vllm


@pytest.fixture
async def peer(server: Server, run: Any) -> AsyncIterator[Peer]:
    """A peer with 0.0 installed, beside a server that is started again if an earlier test lost the last one."""
    if server.process.poll() is not None:
        server.restart()
        await asyncio.to_thread(server.wait)
    found = Peer(server, run)
    await found.start()
    await found.install()
    yield found
    await found.vanish()


async def lose_worker(server: Server, peer: Peer) -> None:
    """Kill a worker; ``check`` alone detects that the server is gone."""
    await peer.installer.check()
    assert peer.installer.ready
    await asyncio.to_thread(server.lose_worker)
    with pytest.raises(RetryableError, match="is the server up"):
        await peer.installer.check()
    assert (peer.installer.ready, peer.installer.committed) == (False, None)


async def test_dead_worker_makes_the_engine_unready(server: Server, run: Any, peer: Peer) -> None:
    await lose_worker(server, peer)
    advance(run)
    with pytest.raises(RetryableError):
        await peer.install()
    assert not peer.installer.ready


@pytest.mark.prove
async def test_dead_worker_and_a_different_server_later(server: Server, run: Any, peer: Peer) -> None:
    """The later server has two data parallel ranks, each with the whole model; ``check`` alone detects that it holds
    no version.
    """
    installer = peer.installer
    await lose_worker(server, peer)
    server.restart("--data-parallel-size", "2")
    with pytest.raises(RetryableError):
        await installer.stage(run.version, run.shadow.path)
    late = EngineInstaller(VllmServer(server.url), peer.socket, run=str(run.folder))
    with pytest.raises(RetryableError):  # the peer starts before its server
        await late.start()
    await late.close()
    await asyncio.to_thread(server.wait)
    await installer.check()
    assert (installer.ready, installer.committed) == (False, None)
    await peer.install()
    assert installer.ready
    assert await peer.holds(FIRST, run.digests)
    began, enough = [asyncio.Event() for _ in range(2)], asyncio.Event()
    async with one_off_connections() as http, asyncio.TaskGroup() as group:
        for number, event in enumerate(began):
            group.create_task(load(http, server.url, f"w{10 + number}", event, enough))
        await asyncio.gather(*(event.wait() for event in began))
        for _ in range(3):
            advance(run)
            await peer.install()
            assert await peer.holds(run.version, run.digests)
        enough.set()
    assert installs(run)[-6:] == ["sparse"] * 6
    assert {r["rank"] for r in run.reports[-2:]} == {0, 1}
    await installer.check()
    assert installer.ready
