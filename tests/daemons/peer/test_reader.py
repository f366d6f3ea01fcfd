"""A program reads a peer's shadow: one whole version, while later versions wait, or an error."""

from __future__ import annotations

import asyncio
import os

import pytest
import torch
from safetensors.torch import load_file

from p2pcast import Reader
from p2pcast.ground.errors import LocalError, RefusedError, RetryableError, UsageError
from rollout_node.peer import Peer

SHAPES = {"w": ("bfloat16", (30_000, 3)), "norm": ("float32", (53,))}


def differing(found: dict[str, torch.Tensor], state: dict[str, tuple[str, tuple[int, ...], bytes]]) -> list[str]:
    """Names whose tensor has another dtype, shape or bytes."""
    read = {
        name: (str(t.dtype).removeprefix("torch."), tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in found.items()
    }
    return sorted(name for name in read.keys() | state.keys() if read.get(name) != state.get(name))


def shown(peer: Peer) -> list[str]:
    """Versions of the leases in force, by /status."""
    return [row["version"] for row in peer.view.status()["leases"]]


@pytest.fixture
async def peer(swarm, states):
    """A peer with version 0.1."""
    swarm.publish(1, states.first(shapes=SHAPES))
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    return peer


async def test_a_version_is_read_whole_while_later_versions_wait(swarm, states, peer):
    state = states.first(shapes=SHAPES)
    held = await asyncio.to_thread(Reader(peer.config.state).__enter__)
    assert str(held.version) == "0.1"
    found = dict(held.tensors())
    later = states.trained(state, 1, share=0.3)
    swarm.publish(2, later)
    await swarm.published("0.2")
    await swarm.until(lambda: shown(peer) == ["0.1"], "the lease is shown")
    await swarm.until(lambda: any(h.open.version.step == 2 and h.durable for h in peer.node.holdings.values()), "0.2")
    assert str(peer.view.state.staged) == "0.1"
    assert differing(found, state) == []
    assert differing({n: held.tensor(n) for n in held.names()}, state) == []
    await asyncio.to_thread(held.__exit__, None, None, None)
    assert shown(peer) == []
    await swarm.live("0.2")
    assert differing(found, later) == [], "the views show the shadow's memory: nothing was copied"


async def test_a_reader_that_is_too_slow_is_told(swarm, states, peer):
    reader = Reader(peer.config.state, hold_s=0.05)
    held = await asyncio.to_thread(reader.__enter__)
    swarm.publish(2, states.trained(states.first(shapes=SHAPES), 1, share=0.3))
    await swarm.live("0.2")
    with pytest.raises(RefusedError, match="lease"):
        await asyncio.to_thread(held.prolong)
    with pytest.raises(RetryableError, match=r"the lease of version 0\.1 ended before"):
        await asyncio.to_thread(held.__exit__, None, None, None)


async def test_an_error_in_the_block_releases_the_lease(swarm, states, peer):
    def fails() -> None:
        with Reader(peer.config.state, hold_s=3000):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(fails)
    assert shown(peer) == []


async def test_a_shadow_that_cannot_be_opened_releases_the_lease(swarm, states, peer, monkeypatch):
    monkeypatch.setattr("safetensors.safe_open", lambda *_, **__: os.open("/nowhere", os.O_RDONLY))
    with pytest.raises(LocalError, match="the peer's shadow cannot be read"):
        await asyncio.to_thread(Reader(peer.config.state).__enter__)
    assert shown(peer) == []


async def test_a_malformed_time_leaves_no_lease(swarm, states, peer):
    with pytest.raises(UsageError, match="hold_s"):
        await asyncio.to_thread(Reader(peer.config.state, hold_s=1e9).__enter__)
    assert shown(peer) == []


async def test_no_proxy_sees_the_bearer(swarm, states, peer, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    held = await asyncio.to_thread(Reader(peer.config.state).__enter__)
    await asyncio.to_thread(held.__exit__, None, None, None)


async def test_there_is_nothing_to_read_before_the_first_version(swarm, states, tmp_path):
    await swarm.hub_up()
    peer = await swarm.peer_up("a")
    with pytest.raises(RefusedError, match="no version is staged here yet"):
        await asyncio.to_thread(Reader(peer.config.state).__enter__)
    with pytest.raises(UsageError, match="wait_s"):
        await asyncio.to_thread(Reader(peer.config.state, wait_s=1e9).__enter__)
    with pytest.raises(RetryableError, match="no daemon runs on the state folder"):
        await asyncio.to_thread(Reader(tmp_path).__enter__)


async def test_the_file_of_the_shadow_is_an_ordinary_one(swarm, states, peer):
    def copied() -> dict[str, torch.Tensor]:
        with Reader(peer.config.state) as held:
            return {name: tensor.clone() for name, tensor in held.tensors()}

    read, loaded = await asyncio.to_thread(copied), load_file(peer.view.state.shadow.path)
    assert read.keys() == loaded.keys()
    assert all(torch.equal(read[name].view(torch.uint8), loaded[name].view(torch.uint8)) for name in loaded)
