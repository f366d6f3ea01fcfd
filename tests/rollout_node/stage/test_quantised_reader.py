"""A quantised copy beside a shadow that is replaced or repaired, or that comes into doubt meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from staging_peer import Peer
from staging_peer import Shadow as FakeShadow

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import LocalError
from p2pcast.ground.version import Version
from p2pcast.quantised.quantisation_kinds import kind_named
from p2pcast.quantised.quantised_checkpoint import quantised_words
from p2pcast.quantised.quantised_layout import QuantisedLayout
from p2pcast.quantised.quantised_shadow import QuantisedShadow
from p2pcast.state.shadow import Shadow
from rollout_node.shadow.shadow_state import ShadowState
from rollout_node.stage.quantised_reader import QuantisedReader

KIND, VERSION = "fp8-channel", Version(0, 1)


def shadow_of(folder: Path, value: float, columns: int = 8) -> Shadow:
    layout = Layout([Tensor("l.q_proj.weight", "F32", (4, columns)), Tensor("norm.weight", "F32", (columns,))])
    made = Shadow.create(folder, layout)
    made.fill(VERSION, lambda cell: np.full(cell.words, value, "<f4").view("<u4"))
    return made


@pytest.fixture
def state(tmp_path: Path) -> Iterator[ShadowState]:
    made = ShadowState()
    made.shadow, made.staged = shadow_of(tmp_path / "first", 1.0), VERSION
    yield made
    made.close()


@pytest.fixture
def reader(state: ShadowState, tmp_path: Path) -> Iterator[QuantisedReader]:
    made = QuantisedReader(state, SimpleNamespace(holdings={}), tmp_path, KIND)
    yield made
    made.close()


async def assert_copy_is_the_shadows(reader: QuantisedReader, plain: Shadow) -> None:
    async with reader.held_still() as held:
        assert held is not None
        assert reader.layout_document() == QuantisedLayout(plain.layout, kind_named(KIND)).layout.document
        copy = reader._quantised()
        for cell in copy.form.layout.cells:
            words = quantised_words(
                copy.form, cell, lambda n, at, count: plain.words(plain.layout.cells[n])[at:][:count]
            )
            assert np.array_equal(copy.shadow.words(cell), words)


async def test_an_engine_learns_layout_and_files_before_the_first_copy(
    state: ShadowState, reader: QuantisedReader, tmp_path: Path
) -> None:
    """An installer starts before it holds the shadow still, and the copy is made while it holds the shadow still."""
    assert state.shadow is not None
    for shadow in (state.shadow, shadow_of(tmp_path / "second", 2.0, 12)):
        state.shadow = shadow
        form = QuantisedLayout(shadow.layout, kind_named(KIND))
        assert reader.layout_document() == form.layout.document
        assert reader.files({}) == form.files({})
    assert reader._copy is None


@pytest.mark.parametrize("columns", [8, 12])
async def test_a_replaced_shadow_of_the_same_version_gives_another_copy(
    state: ShadowState, reader: QuantisedReader, tmp_path: Path, columns: int
) -> None:
    """The peer's state was not the run's state of that version, or could not be repaired."""
    assert state.shadow is not None
    await assert_copy_is_the_shadows(reader, state.shadow)
    state.shadow.close()
    state.shadow = shadow_of(tmp_path / "second", 2.0, columns)
    await assert_copy_is_the_shadows(reader, state.shadow)


async def test_a_doubt_during_the_work_is_about_its_result(
    reader: QuantisedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    follow = QuantisedShadow.follow

    def doubted(copy: QuantisedShadow, changes: object) -> None:
        made.append(copy)
        if len(made) == 1:
            reader.distrust()
        follow(copy, changes)  # type: ignore[arg-type]

    monkeypatch.setattr(QuantisedShadow, "follow", doubted)
    for expected in (1, 2, 2):
        async with reader.held_still():
            assert len(made) == expected
    assert made[0] is not made[1]


async def test_a_doubt_outlives_a_failure(reader: QuantisedReader, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reader.held_still():
        before = reader._quantised()
    reader.distrust()
    with monkeypatch.context() as patch:
        patch.setattr(Shadow, "create", _no_room)
        with pytest.raises(LocalError, match="no room"):
            async with reader.held_still():
                pass
    async with reader.held_still():
        assert reader._quantised() is not before


def _no_room(*_: object) -> None:
    raise LocalError("no room")


@pytest.mark.parametrize("able", [True, False])
async def test_corrupt_cells_are_announced_after_their_repair(monkeypatch, able: bool) -> None:
    kept = FakeShadow(1)
    async with Peer(monkeypatch, kept=kept) as peer:
        await peer.staged(1)
        told: list[bool] = []
        peer.check._on_corrupt = lambda: told.append(bool(peer.repair.repaired) and kept.closed is not able)
        peer.repair.able = able
        assert not await peer.check.reread(kept)
        assert told == []
        kept.corrupt = ["cell"]
        assert await peer.check.reread(kept)
        assert told == [True]
