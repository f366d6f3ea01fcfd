"""A mirror in a real S3 server (OpenStack Swift's), with a proxy before it that fails as networks and stores do. A peer
without a hub ends up bit for bit equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from p2pcast.mirror.object_names import run_folder
from p2pcast.mirror.object_store import Objects

BUCKET = "bucket"
BIG = {"model.weight": ("bfloat16", (17, 1_000_000))}
"""34 MB: five slices."""


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """A place of its own for each test."""
    return f"s3://{BUCKET}/{request.node.name}"


async def test_a_follower_of_a_faulty_store_is_bit_exact(swarm: Any, states: Any, network: Any, url: str) -> None:
    state = states.first(shapes=states.shapes | BIG)
    swarm.publish(0, state)
    hub = await swarm.hub_up(mirror=url)
    network.faults = {"500": 0.06, "503": 0.06, "cut": 0.06, "corrupt": 0.06, "reset": 0.04, "slow": 0.05, "stale": 0.1}
    await swarm.mirrored("0.0")
    peer = await swarm.peer_up("far", hub=None, mirror=url)
    for step in range(1, 6):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.published(f"0.{step}")
    await swarm.live("0.5")
    assert {"500", "503", "cut", "corrupt"} <= network.failed.keys()
    assert peer.node.bytes_duplicate == 0
    assert hub.publishing.mirror_uploader.errors > 0
    assert peer.sync.mirror_source.errors.count > 0


async def test_a_hub_that_is_killed_in_mid_upload_sends_no_slice_twice(
    swarm: Any, states: Any, network: Any, url: str, tmpfs: Path
) -> None:
    state = states.first(shapes=states.shapes | BIG)
    swarm.publish(0, state)
    words = [
        swarm.checkpoints,
        "--state",
        swarm.folder / "hub",
        "--shadow",
        tmpfs / "hub",
        "--token-file",
        swarm.folder / "token",
    ]
    here = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--plaintext", "--mirror", url]
    network.most_bytes_s = 20e6

    @contextlib.asynccontextmanager
    async def hub() -> AsyncIterator[None]:
        """Until it is killed."""
        with (swarm.folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "p2pcast.cli", "seed", *map(str, [*words, *here])]
            process = await asyncio.create_subprocess_exec(*command, stderr=log)
            try:
                yield
            finally:
                process.kill()
                await process.wait()

    def slices() -> list[str]:
        return [path for path in network.puts if "/log/" in path]

    async with hub():
        await swarm.until(lambda: len(slices()) >= 2, "two slices are there")
    before = set(slices())
    assert not any("/ready/" in path for path in network.puts)
    network.most_bytes_s = None
    async with hub():
        await swarm.until(lambda: any("/ready/" in path for path in network.puts), "it is ready")
    # A slice in flight when the hub died may have arrived unnoticed.
    assert before <= set(slices())
    assert len(slices()) == len(set(slices())) >= 4
    assert "/ready/" in network.puts[-1]
    await swarm.peer_up("far", hub=None, mirror=url)
    await swarm.live("0.0")


async def test_a_peer_that_ends_in_the_middle_goes_on_by_piece(swarm: Any, states: Any, network: Any, url: str) -> None:
    swarm.publish(0, states.first(shapes=states.shapes | BIG))
    hub = await swarm.hub_up(mirror=url)
    await swarm.mirrored("0.0")
    [anchor] = hub.state.store.artifacts.values()
    network.most_bytes_s = 10e6
    peer = await swarm.peer_up("far", hub=None, mirror=url)
    await swarm.until(
        lambda: sum(h.stored.count for h in peer.node.holdings.values()) >= 4, "a few pieces are on its disk"
    )
    await swarm.down(peer)
    network.most_bytes_s = None
    held = sum(h.stored.count for h in peer.node.holdings.values()) * anchor.assembly.open.piece
    peer = await swarm.peer_up("far", hub=None, mirror=url)
    await swarm.live("0.0")
    assert 0 < peer.sync.mirror_source.bytes_received <= anchor.manifest.log - held


async def test_a_follower_stops_downloading_when_the_hub_returns(
    swarm: Any, states: Any, network: Any, url: str
) -> None:
    state = states.first(shapes=states.shapes | BIG)
    swarm.publish(0, state)
    hub = await swarm.hub_up(mirror=url)
    peer = await swarm.peer_up("one", mirror=url)
    await swarm.live("0.0")
    address = swarm.address
    network.reads_left, before = 3, peer.node.bytes_received
    await swarm.down(hub)
    swarm.address = ("127.0.0.1", 0)
    hub = await swarm.hub_up(mirror=url)
    swarm.publish(1, states.trained(state, 1, share=1.0))
    await swarm.mirrored("0.1")
    await swarm.down(hub)
    await swarm.until(lambda: peer.sync.mirror_source.bytes_received >= 2_000_000, "it comes from the mirror")
    swarm.address = address
    await swarm.hub_up(mirror=url)
    await swarm.live("0.1")
    [delta] = [s for s in swarm.hub.state.store.artifacts.values() if s.base is not None]
    assert peer.sync.mirror_source.bytes_received < delta.manifest.log
    assert peer.node.bytes_received - before == delta.manifest.log
    assert peer.node.bytes_duplicate == 0


async def test_changes_to_the_bucket_are_undone(swarm: Any, states: Any, network: Any, url: str) -> None:
    swarm.publish(0, states.first(shapes=states.shapes | BIG))
    hub = await swarm.hub_up(mirror=url)
    await swarm.mirrored("0.0")
    await swarm.down(hub)
    objects = Objects(url, run_folder(hub.token.run))
    before = {f.name: await objects.get(f.name, f.size) for f in await objects.list()}
    slices = sorted(name for name in before if name.startswith("log/"))
    assert len(slices) == 5
    altered = bytearray(before[slices[0]])
    altered[1_000_000] ^= 1
    await objects.put(slices[0], bytes(altered))
    await objects.put(slices[1], before[slices[1]][:-1])
    await objects.remove([slices[2]])
    await objects.put("key", bytes(32))
    network.puts.clear()
    network.reads.clear()
    hub = await swarm.hub_up(mirror=url)
    await swarm.until(
        lambda: len(network.puts) == 4 and hub.publishing.mirror_uploader.repaired == 2, "four objects are written"
    )
    assert {f.name: await objects.get(f.name, f.size) for f in await objects.list()} == before
    # This store's tags are MD5s: objects with the right tag were not read back.
    read = [path.partition(hub.token.run.hex())[2][1:] for path in network.reads[: -len(before)]]
    assert sorted(path for path in read if path) == sorted(["key", slices[0]])
    assert hub.publishing.mirror_uploader.errors == 0


async def test_store_errors_are_one_line(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = Objects(f"s3://{BUCKET}/lines", "p2pcast-1/00/")
    with pytest.raises(
        Exception, match=r"^mirror: cannot read s3://bucket/lines/p2pcast-1/00/key: there is no such object$"
    ):
        await objects.get("key", 32)
    with pytest.raises(
        Exception, match=r"^mirror: cannot write s3://nowhere/p2pcast-1/00/key: there is no such bucket$"
    ):
        await Objects("s3://nowhere", "p2pcast-1/00/").put("key", b"1")
    network.faults = {"503": 1.0}
    with pytest.raises(Exception, match=r"^mirror: cannot write .*/key: 503 Service Unavailable: Please try again\.$"):
        await objects.put("key", b"1")
    network.faults = {"cut": 1.0}
    with pytest.raises(Exception, match=r"^mirror: cannot list [^\n]*$"):
        await objects.list()
    network.faults = {}
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(
        Exception, match=r"^mirror: cannot write .*/key: access denied; check the credentials and the bucket's policy$"
    ):
        await Objects(f"s3://{BUCKET}/lines", "p2pcast-1/00/").put("key", b"1")


async def test_only_removed_objects_are_gone(network: Any) -> None:
    objects = Objects(f"s3://{BUCKET}/removed", "p2pcast-1/00/")
    for name in ("log/a/1", "log/a/2", "log/ab/1"):
        await objects.put(name, b"12345")
    await objects.remove(["log/a/1", "log/nothing"])
    assert [(f.name, f.size) for f in sorted(await objects.list("log/"), key=lambda f: f.name)] == [
        ("log/a/2", 5),
        ("log/ab/1", 5),
    ]
    assert bytes(await objects.get_range("log/a/2", 1, 3)) == b"234"
