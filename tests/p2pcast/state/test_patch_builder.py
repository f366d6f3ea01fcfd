from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.codec.digest import word_dtype
from p2pcast.codec.layout import DTYPES, Layout, Tensor
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from p2pcast.state.patch_builder import PatchBuilder
from p2pcast.state.patch_file import PatchFile, PatchWriter

V0, V1 = Version(0, 0), Version(0, 1)

_tensors = st.lists(
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=5
).map(lambda found: [Tensor(f"t{n}", dtype, tuple(shape)) for n, (dtype, shape) in enumerate(found)])


@settings(max_examples=60, deadline=None)
@given(
    tensors=_tensors,
    cell_words=st.integers(1, 40),
    steps=st.lists(
        st.tuples(st.sampled_from(["auto", "flat", "dense", "raw"]), st.floats(0, 1)), min_size=1, max_size=4
    ),
    seed=st.integers(0, 2**32),
)
def test_any_chain_of_deltas_is_applied_bit_exact(world_class, tensors, cell_words, steps, seed):
    world = world_class()
    world.layout = Layout(tensors, cell_words=cell_words)
    rng = np.random.default_rng(seed)
    state = world.state(seed)
    with tempfile.TemporaryDirectory() as name, world.filled(Path(name), state) as shadow:
        for number, (codec, share) in enumerate(steps):
            new = bytearray(state)
            for cell in world.layout.cells:
                words = np.frombuffer(new, word_dtype(cell.word_bytes), cell.words, cell.offset)
                where = rng.random(cell.words) < share
                words[where] ^= np.frombuffer(rng.bytes(words.nbytes), words.dtype)[where]
            path = world.stage(shadow, state, bytes(new), Version(1, number), shadow.version, codec)
            shadow.apply(path)
            state = bytes(new)
            assert world.bytes_of(shadow) == state
            assert shadow.state_digest == world.digest(state)


def test_cells_are_decoded_in_any_order_on_many_threads(world, tmp_path):
    a = world.state(1)
    b = world.step(a, 2, share=0.5)
    delta = world.delta(a, b)
    np.random.default_rng(0).shuffle(delta)
    with world.filled(tmp_path, a) as shadow:
        stager = world.stager(shadow, V1, V0)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda entry: stager.decode(*entry), delta))
        path = stager.finish(world.digest(b))
        assert [c.cell for c in PatchFile.open(path, world.layout).cells] == sorted(p.cell for p, _ in delta)
        shadow.apply(path)
        assert world.bytes_of(shadow) == b


def test_delta_against_another_base_is_refused(world, tmp_path):
    a, other = world.state(1), world.state(7)
    b = world.step(a, 2)
    with world.filled(tmp_path, other) as shadow:
        with pytest.raises(IntegrityError, match=r"wrong base: version 0\.1 is against 0\.5"):
            world.stager(shadow, V1, Version(0, 5))
        stager = world.stager(shadow, V1, V0)
        for placed, payload in world.delta(a, b):
            with pytest.raises(IntegrityError, match=r"wrong base: version 0\.1 is against digest .* \(0\.0\)"):
                stager.decode(placed, payload)
        stager.abandon()
        assert list(tmp_path.glob("patches/*")) == []
        assert world.bytes_of(shadow) == other
        elsewhere = Layout([Tensor("x", "U8", (1,))])
        writer = PatchWriter(shadow.patch_path(V1), elsewhere, V0, V1)
        with pytest.raises(IntegrityError, match="another layout"):
            PatchBuilder(shadow, elsewhere, V1, V0, writer)
        writer.abandon()


def test_corrupt_shadow_is_detected(world, tmp_path):
    a = world.state(1)
    b = world.step(a, 2)
    with world.filled(tmp_path, a) as shadow:
        placed, payload = world.delta(a, b)[0]
        data = bytearray(shadow.path.read_bytes())
        data[-world.layout.nbytes + world.layout.cells[placed.cell].offset] ^= 1
        with shadow.path.open("r+b") as file:
            file.write(data)
        stager = world.stager(shadow, V1, V0)
        with pytest.raises(IntegrityError, match="digest"):
            stager.decode(placed, payload)
        stager.abandon()
        assert [c.index for c in shadow.verify()] == [placed.cell]


def test_damaged_payload_or_directory_is_refused(world, tmp_path):
    a = world.state(1)
    b = world.step(a, 2, share=0.3)
    delta = world.delta(a, b)
    with world.filled(tmp_path, a) as shadow:
        for placed, payload in delta:
            stager = world.stager(shadow, V1, V0)
            for wrong in (payload[:-1], payload + b"\0", bytes([payload[0] ^ 1]) + payload[1:], b""):
                with pytest.raises(IntegrityError):
                    stager.decode(placed, wrong)
            with pytest.raises(IntegrityError):
                stager.decode(placed._replace(after=placed.after ^ 1), payload)
            stager.decode(placed, payload)
            with pytest.raises(IntegrityError, match="twice"):
                stager.decode(placed, payload)
            stager.abandon()


def test_manifest_of_another_state_is_refused(world, tmp_path):
    a = world.state(1)
    b = world.step(a, 2)
    with world.filled(tmp_path, a) as shadow:
        with pytest.raises(IntegrityError, match="its manifest says"):
            world.stage(shadow, a, b, V1, V0, "auto", state=world.digest(b) ^ 1)
        # A state with a missing cell is another state, too.
        stager = world.stager(shadow, V1, V0)
        for placed, payload in world.delta(a, b)[1:]:
            stager.decode(placed, payload)
        with pytest.raises(IntegrityError, match="its manifest says"):
            stager.finish(world.digest(b))
        assert list(tmp_path.glob("patches/*")) == []
        assert world.bytes_of(shadow) == a


def test_shadow_must_not_move_during_staging(world, tmp_path):
    a = world.state(1)
    b = world.step(a, 2)
    with world.filled(tmp_path, a) as shadow:
        stager = world.stager(shadow, Version(0, 2), V0)
        shadow.apply(world.stage(shadow, a, b, V1, V0))
        with pytest.raises(IntegrityError, match=r"the shadow holds 0\.1"):
            stager.finish(world.digest(b))
