"""One delta on a real store: its seal, its decoding by the hub, and its end after every kind of failure."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from parts import Background, Encoder, words_in, write_checkpoint

from p2pcast.checkpoint import Checkpoint
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version
from p2pcast.relay.holding import Holding
from tests.support.until import until
from trainer_node.publish.delta_builder import DeltaBuilder, encode_folder
from trainer_node.publish.delta_publisher import Delta, DeltaPublisher
from trainer_node.publish.version_source import Files

V = Version


class Source:
    """The cells of a folder. ``files`` None: the base's small files stay. Waits for ``released`` before it ends."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.files = files
        self.released = asyncio.Event()
        self.released.set()
        self.error: Exception | None = None
        self.ended = False
        self.builder: DeltaBuilder | None = None

    async def encode(self, shadow, builder, choice):
        self.builder = builder
        try:
            encode_folder(self.checkpoint, shadow, builder, choice)
            builder.emit()
            await self.released.wait()
        finally:
            self.ended = True
        if self.error is not None:
            raise self.error
        return self.files


@pytest.fixture
async def hub(encoder: Encoder) -> Encoder:
    """A hub with version 0.0, and a folder of the next one."""
    await encoder.publish(0, config='{"a": 1}')
    write_checkpoint(encoder.folder / "next", 3)
    return encoder


def publish(hub: Encoder, source: Source) -> asyncio.Task[Delta]:
    deltas = DeltaPublisher(hub.node, hub.store, hub.key, hub.staging, hub.sizes, hub.numbers)
    choice = hub.pipeline.choice_for(hub.shadow.shadow.layout)
    return asyncio.ensure_future(deltas.publish(V(0, 1), hub.shadow.shadow, choice, source))


def opened(hub: Encoder) -> Holding | None:
    return next((h for h in hub.node.holdings.values() if h.open.version == V(0, 1)), None)


async def test_a_delta_is_durable_and_its_patch_leads_to_the_new_weights(hub: Encoder) -> None:
    delta = await publish(hub, Source(hub.folder / "next"))
    holding = opened(hub)
    assert holding.durable
    assert holding.confirmed
    assert hub.store.newest() == V(0, 1)
    assert (delta.published.version, delta.published.kind, delta.published.changed) == (V(0, 1), "delta", 30)
    assert 0 < delta.payload_bytes <= delta.published.bytes
    assert holding.open.base_hash == hub.store.identity(V(0, 0))
    await hub.staging.apply(hub.shadow.shadow, delta.patch)
    assert hub.weights() == words_in(hub.folder / "next")


async def test_an_unfinished_delta_is_announced_as_unsealed(hub: Encoder) -> None:
    source = Source(hub.folder / "next")
    source.released.clear()
    task = publish(hub, source)
    await until(lambda: opened(hub) is not None and source.builder is not None)
    assert hub.announcer.announced[-1] == (V(0, 1), False)
    source.released.set()
    await task
    assert opened(hub).assembly.sealed


@pytest.mark.parametrize("files", [None, {"config.json": b'{"a": 1}'}, {"config.json": b'{"a": 2}'}])
async def test_unchanged_small_files_are_named_and_not_sent_again(hub: Encoder, files: Files | None) -> None:
    await publish(hub, Source(hub.folder / "next", files))
    contents = b'{"a": 1}' if files is None else files["config.json"]
    (entry,) = hub.store.manifest(V(0, 1)).files
    assert (entry.path, entry.size) == ("config.json", len(contents))
    assert (entry.offset is None) is (contents == b'{"a": 1}')
    assert hub.store.small_files(V(0, 1)) == {"config.json": contents}


async def test_the_number_is_on_disk_before_the_version_opens(hub: Encoder, monkeypatch) -> None:
    def unwritable(version: Version) -> None:
        raise LocalError("no space is left")

    monkeypatch.setattr(hub.numbers, "note", unwritable)
    with pytest.raises(LocalError, match="no space"):
        await publish(hub, Source(hub.folder / "next"))
    assert opened(hub) is None
    assert hub.announcer.announced == []


async def test_a_delta_whose_source_fails_is_aborted(hub: Encoder, background: Background) -> None:
    source = Source(hub.folder / "next")
    source.error = LocalError("the folder is gone")
    with pytest.raises(LocalError, match="the folder is gone"):
        await publish(hub, source)
    await _is_gone(hub, background)


async def test_a_delta_that_does_not_decode_is_aborted_before_its_source_ends(
    hub: Encoder, background: Background
) -> None:
    """The hub is the first to decode its delta; a wrong digest shows in it before any peer may install it."""

    class Wrong(Source):
        async def encode(self, shadow, builder, choice):
            add, builder.add = builder.add, lambda coded: add(replace(coded, after=coded.after ^ 1))
            return await super().encode(shadow, builder, choice)

    source = Wrong(hub.folder / "next", {"filler": bytes(3_000_000)})
    with pytest.raises(IntegrityError):
        await publish(hub, source)
    assert source.ended
    await _is_gone(hub, background)


async def test_a_cancelled_delta_is_aborted_once_its_source_has_ended(hub: Encoder, background: Background) -> None:
    source = Source(hub.folder / "next")
    source.released.clear()
    task = publish(hub, source)
    await until(lambda: source.builder is not None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.ended
    await _is_gone(hub, background)


async def _is_gone(hub: Encoder, background: Background) -> None:
    """No holding and no file of 0.1 is left, peers were told, and its number is used."""
    await background.settle()
    assert opened(hub) is None
    assert len(hub.announcer.withdrawn) == 1
    assert hub.store.newest() == V(0, 0)
    assert hub.pipeline.version_for(1) == V(1, 1)
