"""The mirror's upload, on a folder as its object store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from parts import Encoder, emitted

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.ground.wakeup import Wakeup
from p2pcast.mirror.object_names import KEY, slice_name, tail_name
from p2pcast.mirror.object_store import Objects
from p2pcast.store.retention import RetentionCounts
from tests.support.until import until
from trainer_node.background import mirror_uploader
from trainer_node.background.mirror_contents import MirrorContents
from trainer_node.background.mirror_uploader import MirrorUploader

V = Version


class Parts:
    def __init__(self, encoder: Encoder, objects: Objects | None = None, **options: Any) -> None:
        self.encoder = encoder
        self.live = False
        self.changed = Wakeup()
        (encoder.folder / "mirror").mkdir(exist_ok=True)
        self.objects = objects or Objects(f"file://{encoder.folder / 'mirror'}", "x/")
        self.uploader = MirrorUploader(
            encoder.store, self.objects, encoder.events, lambda: self.live, self.changed, **options
        )
        self.running: asyncio.Future[None] | None = None

    def run(self) -> None:
        self.running = asyncio.ensure_future(self.uploader.run())

    async def until(self, **status: Any) -> dict[str, Any]:
        """Wait until /status shows these values."""
        await until(lambda: status.items() <= self.uploader.status().items())
        return self.uploader.status()

    async def end(self) -> None:
        if self.running is not None:
            self.running.cancel()
            await asyncio.wait([self.running])


@pytest.fixture
async def parts(encoder: Encoder):
    found: list[Parts] = []

    def make(objects: Objects | None = None, **options: Any) -> Parts:
        found.append(Parts(encoder, objects, **options))
        return found[-1]

    yield make
    for one in found:
        await one.end()


async def test_the_mirror_matches_the_store(parts, encoder: Encoder) -> None:
    await encoder.publish(0)
    found = parts()
    assert found.uploader.status()["current"] is False
    found.run()
    status = await found.until(current=True)
    assert (status["version"], status["lag_versions"], status["pending_bytes"]) == ("0.0", 0, 0)
    await encoder.publish(1)
    await encoder.background.settle()
    found.changed.notify()
    assert (await found.until(version="0.1", current=True))["artifacts"] == 2
    assert [e["version"] for e in emitted(encoder.events, "mirrored")] == ["0.0", "0.1"]
    names = {family.name for family in found.uploader.families()}
    assert "p2pcast_hub_mirror_lag_versions" in names


async def test_objects_that_are_wrong_are_written_again(parts, encoder: Encoder) -> None:
    await encoder.publish(0)
    found = parts()
    found.run()
    await found.until(current=True)
    await found.objects.put(KEY, b"wrong")
    found.uploader.report_wrong([KEY, "log/unknown"])
    await found.until(mended=1, current=True)
    assert await found.objects.get(KEY, 100) == encoder.store.run_key
    assert emitted(encoder.events, "mirror_mended") == [{"name": KEY}]


async def test_a_report_about_right_objects_writes_nothing(parts, encoder: Encoder) -> None:
    await encoder.publish(0)
    found = parts()
    found.run()
    await found.until(current=True)
    uploaded = found.uploader.bytes_uploaded
    found.uploader.report_wrong([KEY])
    await found.until(current=True)
    assert found.uploader.bytes_uploaded == uploaded
    assert found.uploader.repaired == 0


async def test_a_failing_store_is_retried_and_reported_once(parts, encoder: Encoder, monkeypatch, caplog) -> None:
    monkeypatch.setattr(mirror_uploader, "RETRY_MIN_S", 0.001)
    monkeypatch.setattr(mirror_uploader, "RETRY_MAX_S", 0.002)
    await encoder.publish(0)

    class Flaky(Objects):
        left = 3

        async def list(self, prefix: str = "", most: int = 100) -> Any:
            if self.left:
                self.left -= 1
                raise RetryableError("the store is away")
            return await super().list(prefix, most)

    (encoder.folder / "mirror").mkdir()
    found = parts(Flaky(f"file://{encoder.folder / 'mirror'}", "x/"))
    found.run()
    status = await found.until(current=True)
    assert (status["errors"], status["error"]) == (3, None)
    assert caplog.text.count("the store is away") == 1
    assert len(emitted(encoder.events, "mirror_failed")) == 1


async def test_damage_on_the_hubs_disk_does_not_travel(parts, encoder: Encoder) -> None:
    await encoder.publish(0)
    [stored] = encoder.store.artifacts.values()
    weights = bytearray((stored.path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (stored.path / "model.safetensors").write_bytes(weights)
    found = parts()
    found.run()
    assert (await found.until(damaged=1))["artifacts"] == 0


async def test_uploads_wait_for_a_gap_or_for_a_stated_rate(parts, encoder: Encoder) -> None:
    await encoder.publish(0)
    found = parts()
    found.live = True
    found.run()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert found.uploader.bytes_uploaded == 0
    found.live = False
    await found.until(current=True)
    stated = parts(rate_bps=1e12)
    stated.live = True
    assert not stated.uploader._must_wait()


async def test_a_starved_upload_sends_one_slice(parts, encoder: Encoder, monkeypatch) -> None:
    monkeypatch.setattr(mirror_uploader, "STARVED_S", 0.0)
    await encoder.publish(0)
    found = parts()
    found.live = True
    found.run()
    await found.until(current=True)


async def test_removed_artifacts_leave_the_mirror(parts, encoder: Encoder, monkeypatch) -> None:
    monkeypatch.setattr("p2pcast.mirror.upload_plan.LEFT_OVER_S", -1.0)
    await encoder.publish(0)
    await encoder.publish(1, shape=(3, 5))
    found = parts(counts=RetentionCounts(1, 1))
    found.run()
    await found.until(version="0.1", current=True)
    gone = next(s for s in encoder.store.artifacts.values() if s.version == V(0, 0))
    encoder.store.artifacts = {a: s for a, s in encoder.store.artifacts.items() if a != gone.id}
    found.changed.notify()
    await found.until(current=True)
    assert not [o.name for o in await found.objects.list() if gone.id.hex() in o.name]


async def test_contents_are_made_from_the_store_or_not_at_all(encoder: Encoder, tmp_path: Path) -> None:
    await encoder.publish(0)
    [stored] = encoder.store.artifacts.values()
    contents = MirrorContents(encoder.store)
    assert await contents.of(KEY) == encoder.store.run_key
    assert len(await contents.of(slice_name(stored.id, 0))) == stored.manifest.log
    assert await contents.of(slice_name(stored.id, 9)) is None
    assert await contents.of(slice_name(bytes(16), 0)) is None
    assert await contents.of(tail_name(stored.id)) == contents.tail(stored)
    contents.close()
