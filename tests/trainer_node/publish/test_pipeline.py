"""The pipeline on a real store: whole states, deltas, failures, and the shadow after a restart."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from parts import Background, Encoder, words_in

from p2pcast.checkpoint import Checkpoint
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.version import Version
from trainer_node.publish.version_source import FolderSource

V = Version


class FailingSource:
    """Adds no cell, then fails."""

    async def encode(self, shadow, builder, choice):
        await asyncio.sleep(0)
        raise LocalError("the source is gone")

    async def fill(self, folder, layout, version):
        raise LocalError("the source is gone")


async def test_the_first_version_is_whole_and_the_next_a_delta(encoder: Encoder) -> None:
    first = await encoder.publish(0)
    assert (first.version, first.kind, first.choice) == (V(0, 0), "anchor", None)
    second = await encoder.publish(1)
    assert (second.version, second.kind) == (V(0, 1), "delta")
    assert (second.changed, second.params) == (10, 64 * 65)
    assert second.bytes < first.bytes
    assert encoder.pipeline.head == V(0, 1)
    assert encoder.weights() == words_in(encoder.folder / "checkpoints" / "step_1")
    assert encoder.store.newest() == V(0, 1)


async def test_another_layout_is_a_whole_state(encoder: Encoder) -> None:
    await encoder.publish(0)
    done = await encoder.publish(1, shape=(3, 5))
    assert (done.version, done.kind) == (V(0, 1), "anchor")
    assert await encoder.pipeline.base_for(Checkpoint.open(encoder.folder / "checkpoints/step_1").layout()) == V(0, 1)
    assert await encoder.pipeline.base_for(Checkpoint.open(encoder.folder / "checkpoints/step_0").layout()) is None


async def test_a_delta_that_fails_is_aborted_and_its_number_is_used(encoder: Encoder, background: Background) -> None:
    await encoder.publish(0)
    layout = encoder.shadow.shadow.layout
    with pytest.raises(LocalError, match="the source is gone"):
        await encoder.pipeline.publish(V(0, 1), layout, FailingSource())
    await background.settle()
    assert {h.open.version for h in encoder.node.holdings.values()} == {V(0, 0)}
    assert len(encoder.announcer.withdrawn) == 1
    assert encoder.pipeline.head == V(0, 0)
    assert (await encoder.publish(1)).version == V(1, 1)


async def test_a_whole_state_that_fails_leaves_no_shadow_until_the_next_base_is_asked_for(encoder: Encoder) -> None:
    await encoder.publish(0)
    layout = encoder.shadow.shadow.layout
    other = Checkpoint.open(encoder.folder / "checkpoints" / "step_0").layout(cell_words=1024)
    with pytest.raises(LocalError):
        await encoder.pipeline.publish(V(0, 1), other, FailingSource())
    assert encoder.pipeline.shadow is None
    assert await encoder.pipeline.base_for(layout) == V(0, 0)


async def test_a_whole_state_that_cannot_be_written_is_not_the_base_of_the_next(encoder: Encoder, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise LocalError("no space is left")

    with monkeypatch.context() as patched:
        patched.setattr(encoder.store, "write_anchor", full)
        with pytest.raises(LocalError, match="no space"):
            await encoder.publish(0)
    assert encoder.pipeline.shadow is None
    assert encoder.pipeline.head is None
    assert (await encoder.publish(1)).kind == "anchor"


async def test_the_same_weights_under_the_same_step_are_recognized(encoder: Encoder) -> None:
    await encoder.publish(3)
    same, other = (Checkpoint.open(encoder.folder / "checkpoints" / "step_3"), None)
    assert await encoder.pipeline.unchanged(3, same) == V(0, 3)
    assert await encoder.pipeline.unchanged(4, same) is None, "another step is another version"
    mark = encoder.pipeline.mark_of(V(0, 3))
    assert await encoder.pipeline.unchanged(4, same, mark) == V(0, 4), "retention has removed step 4"
    await encoder.publish(5)
    other = Checkpoint.open(encoder.folder / "checkpoints" / "step_5")
    assert await encoder.pipeline.unchanged(3, other) is None
    assert encoder.pipeline.mark_of(V(9, 9)) is None


async def test_numbers_are_reserved_after_the_newest_version(encoder: Encoder) -> None:
    encoder.pipeline.reserve()
    assert (encoder.folder / "versions.log").exists() is False
    await encoder.publish(2)
    encoder.pipeline.reserve()
    assert '"reserved": [0, 1026]' in (encoder.folder / "versions.log").read_text()
    assert encoder.pipeline.version_for(2) == V(1, 2)
    assert encoder.pipeline.version_for(3, resume=True) == V(1, 3)


async def test_only_damaged_cells_are_repaired_from_disk(encoder: Encoder) -> None:
    await encoder.publish(0)
    await encoder.publish(1)
    assert not await encoder.pipeline.repair()
    before = encoder.weights()
    _rot(encoder)
    assert encoder.weights() != before
    assert await encoder.pipeline.repair()
    assert encoder.weights() == before


async def test_cells_that_no_artifact_can_repair_stay(encoder: Encoder) -> None:
    await encoder.publish(0)
    _rot(encoder)
    encoder.node.holdings.clear()
    assert not await encoder.pipeline.repair()


def _rot(encoder: Encoder) -> None:
    path = encoder.folder / "shadow" / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-64, 2)
        file.write(b"rotten")


@pytest.mark.parametrize("damage", ["none", "rot", "lost"])
async def test_a_restarted_hub_has_the_newest_state(tmp_path, background, encoder: Encoder, damage: str) -> None:
    await encoder.publish(0)
    await encoder.publish(1)
    state = encoder.weights()
    await background.settle()
    await encoder.close()
    if damage == "rot":
        _rot(encoder)
    elif damage == "lost":
        shutil.rmtree(tmp_path / "shadow")
    again = Encoder(tmp_path, background)
    await again.pipeline.restore()
    assert again.pipeline.head == V(0, 1)
    assert again.weights() == state
    assert (await again.publish(2)).kind == "delta"
    await background.settle()
    await again.close()


async def test_a_shadow_behind_the_store_continues_from_its_version(tmp_path, background, encoder: Encoder) -> None:
    await encoder.publish(0)
    await encoder.publish(1)
    shutil.copytree(tmp_path / "shadow", tmp_path / "older")
    await encoder.publish(2)
    state = encoder.weights()
    await background.settle()
    await encoder.close()
    shutil.rmtree(tmp_path / "shadow")
    (tmp_path / "older").rename(tmp_path / "shadow")
    again = Encoder(tmp_path, background)
    await again.pipeline.restore()
    assert again.pipeline.head == V(0, 2)
    assert again.weights() == state
    await again.close()


async def test_a_store_without_versions_gives_no_shadow(encoder: Encoder) -> None:
    await encoder.pipeline.restore()
    assert encoder.pipeline.head is None
    assert encoder.pipeline.base_files() == {}


async def test_small_files_of_the_base_are_known(encoder: Encoder) -> None:
    await encoder.publish(0, config='{"a": 1}')
    assert encoder.pipeline.base_files() == {"config.json": b'{"a": 1}'}


async def test_a_delta_whose_shadow_has_rotted_is_refused(encoder: Encoder) -> None:
    await encoder.publish(0)
    _rot(encoder)
    path = encoder.folder / "checkpoints" / "step_0"
    checkpoint = Checkpoint.open(path)
    source = FolderSource(checkpoint, {}, encoder.staging)
    with pytest.raises(IntegrityError):
        await encoder.pipeline.publish(V(0, 1), checkpoint.layout(), source)
    assert await encoder.pipeline.repair()
    done = await encoder.pipeline.publish(encoder.pipeline.version_for(1), checkpoint.layout(), source)
    assert (done.version, done.changed) == (V(1, 1), 0)
