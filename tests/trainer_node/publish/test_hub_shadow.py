"""The hub's shadow on a real store: after a restart, after damage, and while another one takes its place."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from parts import Background, Encoder

from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from p2pcast.state.shadow import Shadow
from trainer_node.publish.hub_shadow import HubShadow

V = Version


class Restarted:
    """A hub that has published 0.0, 0.1 and 0.2. ``shadow``: of a later process, not restored yet."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self.seen: list[Version] = []
        self.shadow = HubShadow(
            encoder.node, encoder.store, encoder.staging, encoder.folder / "shadow", self.seen.append
        )
        self.state = encoder.weights()
        encoder.shadow.close()

    @property
    def weights(self) -> bytes:
        shadow = self.shadow.shadow
        assert shadow is not None
        return b"".join(shadow.words(cell).tobytes() for cell in shadow.layout.cells)

    def damage(self) -> None:
        with (self.shadow.folder / "model.safetensors").open("r+b") as file:
            file.seek(-64, 2)
            file.write(b"wrong")


@pytest.fixture
async def hub(encoder: Encoder, background: Background) -> AsyncIterator[Restarted]:
    for step in range(3):
        await encoder.publish(step)
        if step == 1:
            shutil.copytree(encoder.folder / "shadow", encoder.folder / "older")
    await background.settle()
    found = Restarted(encoder)
    yield found
    found.shadow.close()


async def test_without_versions_there_is_no_shadow(encoder: Encoder) -> None:
    await encoder.shadow.restore()
    assert encoder.shadow.shadow is None
    assert not await encoder.shadow.repair()


async def test_a_right_shadow_is_taken_over_unchanged(hub: Restarted, monkeypatch) -> None:
    monkeypatch.setattr(hub.encoder.staging, "fill", None)
    await hub.shadow.restore()
    assert hub.weights == hub.state
    assert hub.seen == [V(0, 2)], "its number is known to be used"


async def test_damaged_cells_are_repaired_in_place(hub: Restarted, monkeypatch) -> None:
    hub.damage()
    monkeypatch.setattr(hub.encoder.staging, "fill", None)
    await hub.shadow.restore()
    assert hub.weights == hub.state


async def test_a_damaged_shadow_that_the_store_cannot_repair_is_rebuilt(hub: Restarted, monkeypatch) -> None:
    hub.damage()
    monkeypatch.setattr("trainer_node.publish.hub_shadow.replay_to", lambda version, holdings: None)
    await hub.shadow.restore()
    assert hub.weights == hub.state
    assert not await hub.shadow.repair(), "no cell is corrupt any more"


@pytest.mark.parametrize("lost", [True, False])
async def test_a_shadow_that_is_missing_or_of_another_state_is_rebuilt(hub: Restarted, monkeypatch, lost: bool) -> None:
    if lost:
        shutil.rmtree(hub.shadow.folder)
    else:
        real = hub.encoder.store.manifest
        unlike = replace(real(V(0, 2)), state=real(V(0, 2)).state ^ 1)
        monkeypatch.setattr(hub.encoder.store, "manifest", lambda v: unlike if v == V(0, 2) else real(v))
    await hub.shadow.restore()
    assert hub.weights == hub.state


async def test_a_shadow_behind_the_store_needs_the_later_deltas_alone(hub: Restarted, monkeypatch) -> None:
    shutil.rmtree(hub.shadow.folder)
    (hub.encoder.folder / "older").rename(hub.shadow.folder)
    monkeypatch.setattr(hub.encoder.staging, "fill", None)
    await hub.shadow.restore()
    assert hub.seen == [V(0, 1)]
    assert hub.weights == hub.state
    assert hub.shadow.shadow.patches == []


async def test_repair_restores_every_corrupt_cell_or_reports_failure(hub: Restarted, monkeypatch) -> None:
    await hub.shadow.restore()
    assert not await hub.shadow.repair(), "no cell is corrupt"
    hub.damage()
    with monkeypatch.context() as patched:
        patched.setattr("trainer_node.publish.hub_shadow.replay_to", lambda version, holdings: None)
        assert not await hub.shadow.repair()
    assert await hub.shadow.repair()
    assert hub.weights == hub.state


async def test_another_shadow_takes_its_place_once_no_reader_is_left(hub: Restarted, tmp_path: Path) -> None:
    await hub.shadow.restore()
    layout: Layout = hub.shadow.shadow.layout

    async def filled() -> tuple[Shadow, str]:
        assert hub.shadow.shadow is None, "the old one is closed first: both lie in one folder"
        return Shadow.create(tmp_path / "other", layout), "files"

    async with hub.shadow.reading:
        replacing = asyncio.create_task(hub.shadow.replace(filled))
        await asyncio.sleep(0)
        assert hub.weights == hub.state
    assert await replacing == "files"
    assert hub.shadow.shadow is not None


async def test_a_whole_state_that_fails_leaves_no_shadow(hub: Restarted) -> None:
    await hub.shadow.restore()

    async def fails() -> tuple[Shadow, None]:
        raise LocalError("no space is left")

    with pytest.raises(LocalError):
        await hub.shadow.replace(fails)
    assert hub.shadow.shadow is None
    assert not hub.shadow.reading.locked()
    await hub.shadow.restore()
    assert hub.weights == hub.state
