"""A snapshot of a shadow that moves on; corrupt cells restored from artifacts on disk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pcast.codec.digest import digest
from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.state import shadow_snapshot as module
from p2pcast.state.version_reader import VersionReader, restore_cells


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.data())
def test_snapshot_is_unchanged_whenever_its_cells_are_read(world_class, tmp_path_factory, order):
    world = world_class()
    states = [world.state(1)]
    shadow = world.filled(tmp_path_factory.mktemp("shadow"), states[0])
    cells = list(world.layout.cells)
    left = order.draw(st.permutations(cells))
    found = {}
    with shadow.frozen() as frozen:
        for step in (1, 2, 3):
            for _ in range(order.draw(st.integers(0, len(left)))):
                cell = left.pop()
                found[cell.index] = frozen.words(cell).tobytes()
            states.append(world.step(states[-1], step))
            patch = world.stage(shadow, states[-2], states[-1], Version(0, step), Version(0, step - 1))
            shadow.apply(patch)
        for cell in left:
            found[cell.index] = frozen.words(cell).tobytes()
        assert frozen.version == Version(0, 0)
        assert int(frozen.digests.sum(dtype="u8")) == world.digest(states[0])
    assert b"".join(found[c.index] for c in cells) == states[0]
    assert world.bytes_of(shadow) == states[-1]
    shadow.close()


def test_too_slow_reader_gets_an_error(world, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    one, two = world.state(1), world.state(2)
    shadow = world.filled(tmp_path / "s", one)
    with shadow.frozen() as frozen:
        shadow.apply(world.stage(shadow, one, two, Version(0, 1), Version(0, 0)))
        with pytest.raises(RetryableError, match="could not be read in time"):
            frozen.words(world.layout.cells[0])
    assert world.bytes_of(shadow) == two
    shadow.close()


def test_corrupt_cells_are_healed_and_others_unchanged(world, tmp_path):
    state = world.state(1)
    shadow = world.filled(tmp_path / "s", state)
    rotten = [world.layout.cells[2], world.layout.cells[5]]
    for cell in rotten:
        shadow._words(cell)[0] ^= np.array(1, shadow._words(cell).dtype)
    assert shadow.verify() == rotten
    assert restore_cells(shadow, rotten, VersionReader(world.words(state))) == []
    assert world.bytes_of(shadow) == state
    shadow._words(rotten[0])[0] ^= np.array(1, shadow._words(rotten[0]).dtype)
    ((left, error),) = restore_cells(shadow, rotten[:1], VersionReader(world.words(world.state(9))))
    assert left == rotten[0]
    assert "do not match version" in str(error)
    assert digest(shadow.words(rotten[0]), rotten[0]) != shadow.mark(rotten[0].index)
    shadow.close()
