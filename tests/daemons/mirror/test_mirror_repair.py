"""Repair of a mirror by the hub: after a start, after a change, and after a follower's complaint. test_mirror_s3 does
it with a real server.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from netem.emulation.description import HUB
from netem.emulation.loopback import Net
from p2pcast.mirror import requests
from p2pcast.mirror.object_store import Objects
from p2pcast.mirror.requests import ObjectRequest
from p2pcast.store.artifact_store import Stored
from rollout_node.sync import mirror_source as following
from trainer_node.background import mirror_uploader

T = TypeVar("T")


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


@pytest.fixture
def url(mirror: Path) -> str:
    return f"file://{mirror}"


def run_of(mirror: Path) -> Path:
    [run] = mirror.glob("p2pcast-1/*")
    return run


def first_slice(mirror: Path, stored: Stored) -> Path:
    return run_of(mirror) / "log" / stored.id.hex() / "00000000"


def marker_of(mirror: Path, stored: Stored) -> Path:
    [marker] = (run_of(mirror) / "ready").glob(f"*-{stored.id.hex()}")
    return marker


def objects(mirror: Path) -> dict[str, bytes]:
    """By name below the run's folder."""
    run = run_of(mirror)
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def change(path: Path) -> None:
    """A bit, in the middle, in one step."""
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    part = path.with_name("#1")
    part.write_bytes(contents)
    part.replace(path)


async def test_a_starting_hub_repairs_the_mirror(swarm: Any, url: str, three_versions: Any, mirror: Path) -> None:
    hub = await three_versions()
    anchor, one, two = sorted(hub.state.store.artifacts.values(), key=lambda s: s.version)
    await swarm.down(hub)
    before = objects(mirror)
    tails = run_of(mirror) / "tail"
    change(first_slice(mirror, one))
    part = first_slice(mirror, two)
    part.write_bytes(part.read_bytes()[:-1])
    first_slice(mirror, anchor).unlink()
    change(tails / anchor.id.hex())
    (tails / one.id.hex()).write_bytes(b"")
    change(marker_of(mirror, two))
    change(run_of(mirror) / "key")
    assert sum(before[name] != contents for name, contents in objects(mirror).items()) == 6
    hub = await swarm.hub_up(mirror=url)
    # Missing objects, and objects of another size, show in the listing and are uploaded again.
    await swarm.until(lambda: objects(mirror) == before, "all is as it was")
    await swarm.until(lambda: hub.publishing.mirror_uploader.repaired == 5, "it has counted")
    assert {e.facts["name"] for e in hub.events.after(0)[1] if e.kind == "mirror_mended"} >= {
        "key",
        f"tail/{anchor.id.hex()}",
    }
    assert hub.publishing.mirror_uploader.errors == 0
    await swarm.peer_up("far", hub=None, mirror=url)
    await swarm.live("0.2")


async def test_a_running_hub_repairs_changed_objects(
    swarm: Any, three_versions: Any, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_uploader, "RESCAN_S", 0.1)
    hub = await three_versions()
    before = objects(mirror)
    uploaded = hub.publishing.mirror_uploader.bytes_uploaded
    for stored in hub.state.store.artifacts.values():
        change(first_slice(mirror, stored))
    await swarm.until(lambda: objects(mirror) == before, "all is as it was")
    sizes = sum(s.manifest.log for s in hub.state.store.artifacts.values())
    await swarm.until(
        lambda: hub.publishing.mirror_uploader.bytes_uploaded - uploaded == sizes, "that is all that it wrote"
    )


class Spoiler:
    """A store that alters what it is given, and says nothing of it: under the tag that it gave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.active = False

    async def request(self, request: ObjectRequest, do: Callable[[], Awaitable[T]]) -> T:
        result = await do()
        if self.active and request.what == "write" and "/log/" in request.name:
            path = self.folder / request.name
            was = path.stat()
            with path.open("r+b") as file:
                first = file.read(1)
                file.seek(0)
                file.write(bytes([first[0] ^ 1]))
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        return result


async def test_objects_that_a_follower_complains_of_are_repaired(
    swarm: Any, states: Any, url: str, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "GONE_S", 0.1)
    net, spoiler = Net(1e12), Spoiler(mirror)
    with requests.watched(spoiler):
        state = states.first()
        swarm.publish(0, state)
        hub = await swarm.hub_up(mirror=url)
        front = ("127.0.0.1", await net.front(HUB, swarm.address[1]))
        peer = await swarm.peer_up("a", hub=front, mirror=url)
        await swarm.live("0.0")
        await swarm.mirrored("0.0")
        net.cut((HUB, "*"), ("*", HUB))
        await net.hang_up(HUB)
        spoiler.active = True
        swarm.publish(1, states.trained(state, 1))
        await swarm.mirrored("0.1")
        spoiler.active = False
        await swarm.until(
            lambda: "does not match its hash" in (peer.sync.mirror_source.errors.last or ""), "it is found"
        )
        assert hub.publishing.mirror_uploader.repaired == 0
        net.restore()
        await swarm.until(lambda: hub.publishing.mirror_uploader.repaired == 1, "the hub has heard of it")
    [delta] = [s for s in hub.state.store.artifacts.values() if s.base is not None]
    log = hub.state.store.open_log(delta)
    assert first_slice(mirror, delta).read_bytes() == log.read(0, delta.manifest.log)
    log.close()
    await swarm.live("0.1")
    await net.close()


async def test_a_complaint_makes_a_hub_read_and_write_nothing_that_is_right(
    swarm: Any, url: str, three_versions: Any, mirror: Path
) -> None:
    hub = await three_versions()
    peer = await swarm.peer_up("a", mirror=url)
    await swarm.live("0.2")
    before, uploaded, read = objects(mirror), hub.publishing.mirror_uploader.bytes_uploaded, list[str]()

    class Reader:
        async def request(self, request: ObjectRequest, do: Callable[[], Awaitable[T]]) -> T:
            if request.what == "read":
                read.append(request.name.partition("/")[2].partition("/")[2])
            return await do()

    with requests.watched(Reader()):
        # As a peer does that lies.
        assert peer.startup.hub_session.send(
            replace(peer.reporter.report(), spoilt=["../../etc/passwd", f"log/{'0' * 32}/00000000", *before])
        )
        await swarm.until(lambda: len(read) >= len(before), "it has looked")
    assert sorted(read) == sorted(before)
    assert (hub.publishing.mirror_uploader.bytes_uploaded, hub.publishing.mirror_uploader.repaired) == (uploaded, 0)
    assert objects(mirror) == before


async def test_an_object_that_can_not_be_read_back_holds_up_no_upload(
    swarm: Any, states: Any, url: str, three_versions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = await three_versions()
    await swarm.down(hub)
    get = Objects.get

    async def denied(self: Objects, name: str, most_bytes: int) -> bytes:
        if name.startswith("log/"):
            raise mirror_uploader.RetryableError("denied")
        return await get(self, name, most_bytes)

    monkeypatch.setattr(Objects, "get", denied)
    hub = await swarm.hub_up(mirror=url)
    await swarm.until(lambda: hub.publishing.mirror_uploader.errors == 1, "one was asked for")
    swarm.publish(3, states.trained(swarm.steps[2][0], 3))
    await swarm.mirrored("0.3")
    assert hub.publishing.mirror_uploader.errors == 1
