"""A run's copy in an object store: a hub that writes it, and peers that follow it without a hub. The store is a folder
here; test_mirror_s3 has a real server.
"""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from p2pcast.artifact.run_key import RunKey
from p2pcast.cli.status import table
from p2pcast.ground.errors import RefusedError, RetryableError
from p2pcast.ground.wakeup import Wakeup
from p2pcast.mirror.object_names import run_folder
from p2pcast.mirror.object_store import Objects
from p2pcast.store.artifact_store import ArtifactStore
from trainer_node.background.mirror_uploader import MirrorUploader


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'mirror'}"


async def test_a_peer_without_a_hub_follows_the_run(swarm: Any, states: Any, url: str) -> None:
    state = states.first()
    swarm.publish(0, state)
    await swarm.hub_up(mirror=url)
    await swarm.mirrored("0.0")
    peer = await swarm.peer_up("far", hub=None, mirror=url)
    await swarm.live("0.0")
    for step in (1, 2, 3):
        state = states.trained(state, step)
        swarm.publish(step, state)
        await swarm.live(f"0.{step}")
    assert peer.sync.mirror_source.in_use
    assert not swarm.hub.state.sessions
    swarm.publish(4, states.trained(state, 4))
    code, answer = await swarm.get(peer, "/wait?version=0.4&what=published&timeout_s=600")
    assert (code, json.loads(answer)["newest"]) == (200, "0.4")
    await swarm.live("0.4")
    written = io.StringIO()
    shown = Console(width=200, file=written)
    for daemon in (swarm.hub, peer):
        shown.print(table(await swarm.status(daemon)))
    assert f"mirror {url}: leads to 0.4" in written.getvalue()


async def test_the_mirror_steps_in_for_a_lost_hub_and_steps_back(
    swarm: Any, states: Any, url: str, tmp_path: Path
) -> None:
    state = states.first()
    swarm.publish(0, state)
    hub = await swarm.hub_up(mirror=url)
    one, two = await swarm.peers_up("one", "two", mirror=url)
    await swarm.live("0.0")
    swarm.publish(1, state := states.trained(state, 1))
    await swarm.live("0.1")
    assert not one.sync.mirror_source.in_use
    assert one.sync.mirror_source.bytes_received == two.sync.mirror_source.bytes_received == 0
    # The hub's uplink to its peers is gone, the trainer goes on.
    await swarm.down(hub)
    address, swarm.address = swarm.address, ("127.0.0.1", 0)
    hub = await swarm.hub_up(mirror=url)
    for step in (2, 3):
        swarm.publish(step, state := states.trained(state, step))
        await swarm.mirrored(f"0.{step}")
    await swarm.live("0.3")
    await swarm.until(lambda: one.sync.mirror_source.in_use and two.sync.mirror_source.in_use, "both use the mirror")
    # The hub returns at its old address.
    await swarm.down(hub)
    swarm.address = address
    hub = await swarm.hub_up(mirror=url)
    await swarm.until(
        lambda: not (one.sync.mirror_source.in_use or two.sync.mirror_source.in_use), "the mirror is left"
    )
    received = one.sync.mirror_source.bytes_received
    swarm.publish(4, states.trained(state, 4))
    await swarm.live("0.4")
    assert one.sync.mirror_source.bytes_received == received
    assert one.node.bytes_duplicate == two.node.bytes_duplicate == 0
    assert [e.kind for e in one.events.after(0)[1] if e.kind.startswith("mirror")] == ["mirror_used", "mirror_left"]


def hide(folder: Path, step: int, aside: Path) -> list[tuple[Path, Path]]:
    """Move markers aside, as a stale list or another client could: versions from ``step`` on are not ready any more."""
    late = [p for p in folder.rglob("ready/*") if int(p.name.split("-")[0].split(".")[1]) >= step]
    aside.mkdir()
    return [(path, path.rename(aside / path.name)) for path in late]


async def test_a_mirror_that_lost_objects_takes_no_follower_back(
    swarm: Any, three_versions: Any, url: str, tmp_path: Path, tmpfs: Path
) -> None:
    hub = await three_versions()
    peer = await swarm.peer_up("far", hub=None, mirror=url)
    await swarm.live("0.2")
    await swarm.down(hub)
    hidden = hide(tmp_path / "mirror", 1, tmp_path / "hidden")
    await swarm.until(lambda: peer.sync.mirror_source.status()["version"] == "0.0", "the list shows less")
    assert str(peer.staged) == "0.2"
    # The peer does not go back either if only its state folder's memory is left.
    await swarm.down(peer)
    for folder in (tmpfs / "far", swarm.folder / "far" / "deltas", swarm.folder / "far" / "anchors"):
        shutil.rmtree(folder)
    peer = await swarm.peer_up("far", hub=None, mirror=url)
    await swarm.until(
        lambda: peer.sync.mirror_source.status()["version"] == "0.0" and peer.sync.planner.begun.is_set(),
        "it has looked",
    )
    assert peer.sync.planner.path() == []
    assert peer.staged is None
    for path, kept in hidden:
        kept.rename(path)
    await swarm.live("0.2")


async def test_damaged_objects_are_noticed_and_another_path_is_taken(
    swarm: Any, states: Any, url: str, tmp_path: Path
) -> None:
    state = states.first()
    swarm.publish(0, state)
    await swarm.hub_up(mirror=url)
    await swarm.mirrored("0.0")
    swarm.publish(1, states.trained(state, 1))
    await swarm.mirrored("0.1")
    [delta] = [s for s in swarm.hub.state.store.artifacts.values() if s.base is not None]
    [part] = (tmp_path / "mirror").rglob(f"log/{delta.id.hex()}/*")
    good = part.read_bytes()
    part.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    peer = await swarm.peer_up("far", hub=None, mirror=url)
    await swarm.live("0.0")
    await swarm.until(lambda: "does not match its hash" in (peer.sync.mirror_source.errors.last or ""), "it is found")
    assert peer.node.pieces_corrupt > 0
    assert str(peer.staged) == "0.0"
    part.write_bytes(good)
    await swarm.live("0.1")


async def test_another_runs_key_is_refused(swarm: Any, states: Any, url: str, tmp_path: Path) -> None:
    swarm.publish(0, states.first())
    await swarm.hub_up(mirror=url)
    await swarm.mirrored("0.0")
    [key] = (tmp_path / "mirror").rglob("key")
    key.write_bytes(RunKey.generate().public)
    error = await swarm.ended(swarm.peer_begun("far", hub=None, mirror=url))
    assert isinstance(error, RefusedError)
    assert "the token names" in str(error)


async def test_artifacts_damaged_on_the_hubs_disk_are_not_uploaded(
    swarm: Any, states: Any, url: str, tmp_path: Path
) -> None:
    swarm.publish(0, states.first())
    hub = await swarm.hub_up()
    await swarm.published("0.0")
    [stored] = hub.state.store.artifacts.values()
    await swarm.down(hub)
    weights = stored.path / "model.safetensors"
    contents = bytearray(weights.read_bytes())
    contents[-1] ^= 1
    weights.write_bytes(contents)
    objects = Objects(url, run_folder(hub.token.run))
    store = ArtifactStore(swarm.folder / "hub", hub.state.key.public)
    mirroring = MirrorUploader(store, objects, hub.events, lambda: False, Wakeup())
    task = asyncio.create_task(mirroring.run())
    await swarm.until(lambda: mirroring.status()["damaged"] == 1, "it is found")
    task.cancel()
    assert list((tmp_path / "mirror").rglob("ready/*")) == []


async def test_a_slice_goes_up_only_in_a_gap(swarm: Any, states: Any, url: str) -> None:
    swarm.publish(0, states.first())
    hub = await swarm.hub_up()
    await swarm.published("0.0")
    busy, asked = True, 0

    def sending() -> bool:
        nonlocal asked
        asked += 1
        return busy

    mirroring = MirrorUploader(hub.state.store, Objects(url, "x/"), hub.events, sending, Wakeup())
    task = asyncio.create_task(mirroring.run())
    await swarm.until(lambda: asked > 3, "it waits")
    assert mirroring.bytes_uploaded == 0
    busy = False
    await swarm.until(lambda: mirroring.status()["version"] == "0.0", "it goes up")
    task.cancel()


async def test_an_upload_is_aborted_when_live_traffic_begins(swarm: Any, states: Any, url: str) -> None:
    swarm.publish(0, states.first())
    hub = await swarm.hub_up()
    await swarm.published("0.0")
    busy, begun, given_up = False, asyncio.Event(), asyncio.Event()

    class Slow(Objects):
        async def put(self, name: str, data: bytes | memoryview) -> None:
            if name.startswith("log/") and not given_up.is_set():
                begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    given_up.set()
            await super().put(name, data)

    mirroring = MirrorUploader(hub.state.store, Slow(url, "x/"), hub.events, lambda: busy, Wakeup())
    task = asyncio.create_task(mirroring.run())
    await begun.wait()
    assert not given_up.is_set()
    busy = True
    await given_up.wait()
    busy = False
    await swarm.until(lambda: mirroring.status()["version"] == "0.0", "it goes up afterwards")
    assert mirroring.errors == 0
    task.cancel()


async def test_an_object_above_its_limit_is_not_read(url: str) -> None:
    objects = Objects(url, "x/")
    for name in ("ready/1", "ready/2", "ready/3"):
        await objects.put(name, b"12345")
    assert await objects.get("ready/1", 5) == b"12345"
    with pytest.raises(RetryableError, match="the object has 5 bytes, above its limit of 4"):
        await objects.get("ready/1", 4)
    assert len(await objects.list("ready/", 3)) == 3
    with pytest.raises(RetryableError, match="more than 2 objects"):
        await objects.list("ready/", 2)
