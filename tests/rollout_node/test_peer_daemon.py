"""The peer's process, run as a task: a run without a hub, refused starts, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import aiohttp
import pytest
from starting_peer import Hub, mirror_in, options

from p2pcast.ground.errors import LocalError, RetryableError, UsageError
from p2pcast.store.state_format import state_lock
from rollout_node import peer_daemon
from rollout_node.control import saved_hub_state
from rollout_node.peer import Peer
from rollout_node.peer_daemon import PeerDaemon
from tests.support.nothing_left import NothingLeft, StepError, failing, listening_at
from tests.support.until import until


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(saved_hub_state, "SETTLE_S", 1e-3)


@contextlib.asynccontextmanager
async def running(daemon):
    """The daemon's peer, once it answers HTTP."""
    task = asyncio.create_task(daemon.run())
    address = daemon.config.state / "daemon.json"
    try:
        await until(address.exists, check=lambda: task.done() and task.result())
        yield daemon.peer
    finally:
        task.cancel()
        await asyncio.wait([task])


async def status_of(peer: Peer):
    host, port = peer.http.address
    async with aiohttp.ClientSession() as http, http.get(f"http://{host}:{port}/status") as answer:
        return await answer.json()


def unlocked(config):
    with state_lock(config.state):
        return True


async def test_a_running_peer_holds_its_state_folder_and_answers(tmp_path):
    config = options(tmp_path, hub=None, mirror=mirror_in(tmp_path))
    async with running(PeerDaemon(config)) as peer:
        with pytest.raises(LocalError, match="in use by another p2pcast daemon"):
            unlocked(config)
        assert (await status_of(peer))["node"] == peer.ident.hex()
        assert peer.engine.socket.path.exists()


async def test_a_cancelled_peer_leaves_nothing_open(tmp_path):
    config = options(tmp_path, hub=None, mirror=mirror_in(tmp_path))
    async with running(PeerDaemon(config)):
        pass  # the mirror's client keeps its own threads and sockets
    async with NothingLeft(tmp_path), running(PeerDaemon(config)) as peer:
        pass
    assert unlocked(config)
    assert not listening_at(peer.http.address)
    assert not (config.state / "daemon.json").exists()
    assert not peer.engine.socket.path.exists()


async def test_a_peer_that_has_joined_is_drained(tmp_path):
    async with Hub() as hub:
        daemon = PeerDaemon(options(tmp_path, hub=hub.address))
        async with running(daemon) as peer:
            await daemon.drain()
            assert (await status_of(peer))["state"] == "draining"
            assert not peer.startup.hub_session.connected


async def test_a_drain_before_the_key_is_known_does_nothing(tmp_path):
    daemon = PeerDaemon(options(tmp_path))
    await daemon.drain()
    assert daemon.peer is None


async def test_a_peer_without_a_key_ends_with_the_reason(tmp_path):
    config = options(tmp_path, join_timeout_s=1e-3)
    daemon = PeerDaemon(config)
    async with NothingLeft(tmp_path):
        with pytest.raises(RetryableError):
            await daemon.run()
    assert daemon.peer is None
    assert unlocked(config)


async def test_a_second_peer_of_one_state_folder_is_refused(tmp_path):
    config = options(tmp_path)
    with state_lock(config.state), pytest.raises(LocalError, match="in use by another p2pcast daemon"):
        await PeerDaemon(config).run()


@pytest.mark.parametrize("step", ["start_up", "build_peer"])
async def test_the_lock_is_released_where_a_phase_fails(tmp_path, monkeypatch, step):
    config = options(tmp_path, hub=None, mirror=mirror_in(tmp_path))
    monkeypatch.setattr(peer_daemon, step, failing)
    with pytest.raises(StepError):
        await PeerDaemon(config).run()
    assert unlocked(config)


async def test_an_unknown_target_ends_the_start(tmp_path):
    async with Hub() as hub, NothingLeft(tmp_path):
        config = options(tmp_path, hub=hub.address, targets=("nowhere",))
        with pytest.raises(UsageError, match="is not an install target"):
            await PeerDaemon(config).run()
    assert unlocked(config)
    assert json.loads((config.state / "peer.json").read_text())["key"]


@pytest.mark.parametrize("taken", ["http", "install socket"])
async def test_an_address_in_use_ends_the_start_and_nothing_is_left_open(tmp_path, taken):
    with contextlib.ExitStack() as ends:
        config = options(tmp_path)
        if taken == "http":
            other = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
            config = options(tmp_path, http=other.getsockname())
        else:
            other = ends.enter_context(socket.socket(socket.AF_UNIX))
            other.bind(str(config.state / "install.sock"))
            other.listen()
        async with Hub() as hub, NothingLeft(tmp_path):
            daemon = PeerDaemon(options(tmp_path, hub=hub.address, http=config.http))
            with pytest.raises(LocalError):
                await daemon.run()
        assert unlocked(config)
        assert not (config.state / "daemon.json").exists()
