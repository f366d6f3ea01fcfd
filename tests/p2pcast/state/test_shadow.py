from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pcast.checkpoint import Checkpoint
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import IntegrityError, LocalError
from p2pcast.ground.ordered_map import ordered_map
from p2pcast.ground.version import Version
from p2pcast.state.shadow import Shadow, ShadowPhase

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)


class Died(BaseException):
    """Simulates the process's death."""


class Mortal(Shadow):
    """A shadow whose process dies at its ``left``-th write; an overwrite dies in the middle of the cell."""

    left = -1

    def _write(self, name: str, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            if name == "_overwrite":
                change = args[0]
                half = len(change.words) // 2
                target = self._words(self.layout.cells[change.cell])
                if change.positions is None:
                    target[:half] = change.words[:half]
                else:
                    target[change.positions[:half]] = change.words[:half]
            if name in ("_set_held", "_set_target"):
                at = 40 if name == "_set_held" else 56
                self._table[at : at + 4] = b"\x77\x77\0\0"
            raise Died
        getattr(Shadow, name)(self, *args)


for _name in ("_overwrite", "_set_mark", "_set_target", "_set_held", "_set_phase"):

    def _dying(self, *args, name=_name):
        self._write(name, *args)

    setattr(Mortal, _name, _dying)


def test_fill_is_bit_exact_and_an_ordinary_checkpoint(world, tmp_path):
    state = world.state(1)
    with world.filled(tmp_path / "s", state, V1) as shadow:
        assert shadow.version == V1
        assert world.bytes_of(shadow) == state
        assert shadow.state_digest == world.digest(state)
        assert shadow.verify() == []
        found = Checkpoint.open(tmp_path / "s")
        assert found.layout().tensors == world.layout.tensors
        for cell in world.layout.cells:
            assert found.words(cell).tobytes() == world.words(state)(cell).tobytes()
        with pytest.raises(ValueError):
            shadow.words(world.layout.cells[0])[0] = 1


@pytest.mark.parametrize("codec", ["auto", "flat", "dense", "raw"])
@pytest.mark.parametrize("workers", [1, 3])
def test_apply_is_bit_exact(world, tmp_path, codec, workers):
    a = world.state(1)
    b = world.step(a, 2)
    with world.filled(tmp_path, a) as shadow:
        shadow.apply(world.stage(shadow, a, b, V1, V0, codec), workers=workers)
        assert (shadow.version, shadow.phase) == (V1, ShadowPhase.CLEAN)
        assert world.bytes_of(shadow) == b
        assert shadow.state_digest == world.digest(b)
        assert shadow.verify(workers=workers) == []
    with Shadow.open(tmp_path, world.layout) as again:
        assert again.version == V1
        assert world.bytes_of(again) == b


def test_version_without_changes(world, tmp_path):
    a = world.state(1)
    with world.filled(tmp_path, a) as shadow:
        shadow.apply(world.stage(shadow, a, a, V1, V0))
        assert shadow.version == V1
        assert world.bytes_of(shadow) == a


@pytest.mark.parametrize("tensors", [[], [Tensor("empty", "BF16", (0,))], [Tensor("scalar", "U8", ())]])
def test_layouts_of_few_words(tmp_path, tensors):
    layout = Layout(tensors)
    with Shadow.create(tmp_path, layout) as shadow:
        shadow.fill(V0, lambda cell: np.zeros(cell.words, np.uint8), 0)
    with Shadow.open(tmp_path, layout) as shadow:
        assert shadow.verify() == []
        assert shadow.state_digest == 0


def _deaths(world, folder: Path):
    """(number of earlier writes, folder) for a death at every write of an apply from state 1 to its step."""
    a = world.state(1)
    b = world.step(a, 2, share=0.1)
    for left in range(1, 10_000):
        at = folder / str(left)
        with world.filled(at, a) as shadow:
            path = world.stage(shadow, a, b, V1, V0)
        with Mortal.open(at, world.layout) as shadow:
            shadow.left = left
            survived = True
            try:
                shadow.apply(path)
            except Died:
                survived = False
        if survived:
            return
        yield left, at


def test_death_at_any_write_of_apply_is_repaired(world, tmp_path):
    a = world.state(1)
    b = world.step(a, 2, share=0.1)
    count = 0
    for left, at in _deaths(world, tmp_path):
        count += 1
        with Shadow.open(at, world.layout) as shadow:
            # The old version is still whole only if the phase was not set yet.
            want = (V0, a) if left <= 2 else (V1, b)
            assert (shadow.version, world.bytes_of(shadow)) == want, left
            assert shadow.phase is ShadowPhase.CLEAN
            assert shadow.verify() == []
            if left <= 2:
                shadow.apply(shadow.patch_path(V1))
                assert world.bytes_of(shadow) == b
    assert count == 2 * len(world.delta(a, b)) + 4 >= 20


def test_death_during_repair_is_repaired(world, tmp_path):
    a = world.state(1)
    b = world.step(a, 2, share=0.1)
    dead = next(at for left, at in _deaths(world, tmp_path) if left == 9)
    # Each attempt survives one write more, so every write is once the last.
    for left in range(1, 200):
        Mortal.left = left
        with contextlib.suppress(Died), Mortal.open(dead, world.layout):
            break
    else:
        pytest.fail("the repair never completed")
    Mortal.left = -1
    assert left > 9
    with Shadow.open(dead, world.layout) as shadow:
        assert (shadow.version, world.bytes_of(shadow)) == (V1, b)
        assert shadow.verify() == []


def test_death_during_fill_starts_over(world, tmp_path):
    a, b = world.state(1), world.state(2)
    with world.filled(tmp_path, a):
        pass
    with Mortal.open(tmp_path, world.layout) as shadow:
        shadow.left = 7
        with pytest.raises(Died):
            shadow.fill(V1, world.words(b))
        with pytest.raises(LocalError, match="never filled"):
            _ = shadow.version
    with pytest.raises(IntegrityError, match="still being filled"):
        Shadow.open(tmp_path, world.layout)
    with world.filled(tmp_path, b, V1) as shadow:
        assert world.bytes_of(shadow) == b


def test_sigkill_during_apply_is_repaired(world, tmp_path):
    """SIGKILL during an apply; another process repairs the shadow."""
    a = world.state(1)
    b = world.step(a, 2)
    with world.filled(tmp_path, a) as shadow:
        path = world.stage(shadow, a, b, V1, V0)
    script = f"""
import os, pathlib, signal
from p2pcast.codec.layout import Layout
from p2pcast.state.shadow import Shadow
class Doomed(Shadow):
    left = 5
    def _set_mark(self, cell, value):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._set_mark(cell, value)
folder = pathlib.Path({str(tmp_path)!r})
Doomed.open(folder, Layout.from_document({world.layout.document!r})).apply(pathlib.Path({str(path)!r}))
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    with Shadow.open(tmp_path, world.layout) as shadow:
        assert (shadow.version, world.bytes_of(shadow)) == (V1, b)


def test_interrupted_apply_without_its_patch_is_refused(world, tmp_path):
    at = next(at for left, at in _deaths(world, tmp_path) if left == 8)
    patch = at / "patches" / "0.1.p2pp"
    whole = patch.read_bytes()
    patch.chmod(0o600)
    for bad in (whole[:-1], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        patch.write_bytes(bad)
        with pytest.raises(IntegrityError, match="create a new one"):
            Shadow.open(at, world.layout)
    patch.unlink()
    with pytest.raises(IntegrityError, match="cannot be replayed"):
        Shadow.open(at, world.layout)


def test_wrong_base_is_refused_before_a_byte_changes(world, tmp_path):
    a = world.state(1)
    b = world.step(a, 2)
    with world.filled(tmp_path / "a", a) as source, world.filled(tmp_path / "b", b, V1) as other:
        path = world.stage(source, a, b, V1, V0)
        moved = other.patch_path(V1)
        moved.write_bytes(path.read_bytes())
        with pytest.raises(IntegrityError, match=r"wrong base.*against 0.0, the shadow holds 0.1"):
            other.apply(moved)
        other.fill(V0, world.words(b))  # the version matches, the bytes do not
        with pytest.raises(IntegrityError, match="wrong base"):
            other.apply(moved)
        assert world.bytes_of(other) == b
        assert other.version == V0
        with pytest.raises(LocalError, match="is at"):
            other.apply(path)


def test_patch_of_another_state_is_refused(world, tmp_path):
    a = world.state(1)
    b = world.step(a, 2)
    with world.filled(tmp_path, a) as shadow:
        path = world.stage(shadow, a, b, V1, V0)
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.seek(80)
            file.write(bytes(8))
        with pytest.raises(IntegrityError, match="do not lead to its state"):
            shadow.apply(path)
        assert world.bytes_of(shadow) == a


def test_damaged_patch_is_refused_or_harmless(world, tmp_path):
    a = world.state(1)
    b = world.step(a, 2, share=0.02)
    rng = np.random.default_rng(3)
    with world.filled(tmp_path, a) as shadow:
        path = world.stage(shadow, a, b, V1, V0)
        path.chmod(0o600)
        good = path.read_bytes()
        refused = 0
        for at in [*range(128), *rng.integers(128, len(good), 400).tolist()]:
            bad = bytearray(good)
            bad[at] ^= 1 << int(rng.integers(8))
            path.write_bytes(bad)
            try:
                shadow.apply(path)
            except (IntegrityError, LocalError):
                refused += 1
                assert world.bytes_of(shadow) == a
                assert (shadow.version, shadow.phase) == (V0, ShadowPhase.CLEAN)
            else:  # the flip was in padding, or in the count of changed words
                assert world.bytes_of(shadow) == b
                shadow.fill(V0, world.words(a))
        assert refused > 400


def test_corruption_is_found_and_healed(world, tmp_path):
    a = world.state(1)
    with world.filled(tmp_path, a) as shadow:
        cell = world.layout.cells[5]
        with open(shadow.path, "r+b") as file:
            file.seek(-world.layout.nbytes + cell.offset, os.SEEK_END)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 4]))
        assert shadow.verify() == [cell]
        with pytest.raises(IntegrityError):
            shadow.restore_cell(cell, world.words(world.state(9))(cell))
        shadow.restore_cell(cell, world.words(a)(cell))
        assert shadow.verify() == []
        assert world.bytes_of(shadow) == a


def test_fill_with_the_wrong_state_is_refused(world, tmp_path):
    a = world.state(1)
    with Shadow.create(tmp_path, world.layout) as shadow:
        with pytest.raises(IntegrityError, match="it is another version"):
            shadow.fill(V1, world.words(a), 1)
        with pytest.raises(LocalError):
            shadow.verify()
        with pytest.raises(ZeroDivisionError):
            shadow.fill(V1, lambda cell: 1 // 0, workers=2)
        shadow.fill(V1, world.words(a), world.digest(a), workers=2)
        assert world.bytes_of(shadow) == a


def test_filling_takes_cells_in_any_order_from_several_threads(world, tmp_path):
    a, b = world.state(1), world.state(2)
    with world.filled(tmp_path, a) as shadow:
        cells = sorted(shadow.layout.cells, key=lambda c: c.index * 7 % 11)
        with shadow.filling(V1) as put:
            assert shadow.phase is ShadowPhase.FILLING
            list(ordered_map(lambda cell: put(cell, world.words(b)(cell)), cells, workers=3, name="test"))
        assert (shadow.version, shadow.state_digest) == (V1, world.digest(b))
        assert world.bytes_of(shadow) == b
        assert shadow.verify() == []


def test_fill_without_a_cell_leaves_an_empty_shadow(world, tmp_path):
    a = world.state(1)
    with world.filled(tmp_path, a) as shadow:
        some = [cell for cell in shadow.layout.cells if cell.index not in (3, 5)]
        with pytest.raises(IntegrityError, match="lacks 2 cells, the first is 3"), shadow.filling(V1) as put:
            list(map(put, some, map(world.words(a), some)))
        with pytest.raises(LocalError, match="never filled"):
            assert shadow.version
        with pytest.raises(KeyError), shadow.filling(V1):
            raise KeyError
        shadow.fill(V1, world.words(a), world.digest(a))
        assert shadow.version == V1


def test_shadow_is_locked_by_one_process(world, tmp_path):
    with world.filled(tmp_path, world.state(1)) as shadow:
        for attempt in (Shadow.open, Shadow.create):
            with pytest.raises(LocalError, match="in use"):
                attempt(tmp_path, world.layout)
    with pytest.raises(LocalError, match="closed"):
        shadow.fill(V1, world.words(world.state(1)))
    Shadow.open(tmp_path, world.layout).close()


def test_damaged_or_foreign_shadows_are_refused(world, tmp_path):
    with pytest.raises(LocalError):
        Shadow.open(tmp_path / "none", world.layout)
    with pytest.raises(LocalError):
        Shadow.open(tmp_path, world.layout)
    world.filled(tmp_path, world.state(1)).close()
    with pytest.raises(IntegrityError):
        Shadow.open(tmp_path, Layout([Tensor("other", "BF16", (3,))]))
    marks = tmp_path / "shadow.p2ps"
    good = marks.read_bytes()
    same_size = Layout(world.layout.tensors, cell_words=64, cuts={2: (4, 50)})
    with pytest.raises(IntegrityError, match="another layout"):
        Shadow.open(tmp_path, same_size)
    for at, value in ((0, 1), (4, 2), (5, 3), (6, 1), (44, 1), (60, 1), (72, 99), (76, 1)):
        bad = bytearray(good)
        bad[at] = value
        marks.write_bytes(bad)
        with pytest.raises(IntegrityError):
            Shadow.open(tmp_path, world.layout)
    marks.write_bytes(good[:-1])
    with pytest.raises(IntegrityError):
        Shadow.open(tmp_path, world.layout)
    marks.write_bytes(good)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(20)
        file.write(b"#")
    with pytest.raises(IntegrityError, match="header"):
        Shadow.open(tmp_path, world.layout)


def test_patches_are_listed_and_dropped(world, tmp_path):
    a = world.state(1)
    b, c = world.step(a, 2), world.step(a, 3)
    with world.filled(tmp_path, a) as shadow:
        shadow.apply(world.stage(shadow, a, b, V1, V0))
        shadow.apply(world.stage(shadow, b, c, V2, V1))
        (tmp_path / "patches" / "notes.p2pp").touch()
        world.stager(shadow, Version(1, 0), V2)  # dies before the end
        assert shadow.patches == [V1, V2]
        shadow.drop_patches(V1)
        assert shadow.patches == [V2]
    with Shadow.open(tmp_path, world.layout) as shadow:
        assert shadow.patches == [V2]
        assert not list(tmp_path.glob("patches/*.part"))


def test_full_tmpfs_is_one_error_with_a_remedy(world, tmpfs):
    big = Layout([Tensor("big", "BF16", (1 << 20,))])
    with pytest.raises(LocalError, match=r"no room for the shadow.*GiB are free"):
        Shadow.create(tmpfs / "s", big)
    assert not (tmpfs / "s" / "model.safetensors").exists()
    # There is room for the shadow only: staging fails, the shadow stays valid.
    fits = Layout([Tensor("fits", "BF16", (460_000,))], cell_words=1 << 16)
    world.layout = fits
    a, b = world.state(1), world.state(2)
    with world.filled(tmpfs / "s", a) as shadow:
        with pytest.raises(LocalError, match=r"0\.1\.p2pp.*no space"):
            world.stage(shadow, a, b, V1, V0, "raw")
        assert shadow.verify() == []
        assert world.bytes_of(shadow) == a
        c = bytearray(a)
        c[7] ^= 1
        shadow.apply(world.stage(shadow, a, bytes(c), V1, V0))
        assert world.bytes_of(shadow) == c


def test_file_size_limit_is_one_error_with_a_remedy(world, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(LocalError, match=r"model\.safetensors"):
            Shadow.create(tmp_path, world.layout)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.glob("*.safetensors")) == []


def test_shadow_cut_short_ends_its_process_with_a_message(world, tmp_path):
    """Only the shadow's own user can cut it short. Every pass over the shadow reads a map."""
    with world.filled(tmp_path, world.state(1)):
        pass
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "import mmap, os, pathlib, sys\n"
            "from p2pcast.process.daemon_process import name_fatal_signals\n"
            "from p2pcast.state.shadow import MODEL_NAME, _mapped\n"
            "path = pathlib.Path(sys.argv[1]) / MODEL_NAME\n"
            "name_fatal_signals()\n"
            "found = _mapped(os.open(sys.argv[1], os.O_RDONLY), path, path.stat().st_size)\n"
            "os.truncate(path, 0)\n"
            "found[0]",
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGBUS
    assert "Bus error" in ended.stderr
    with pytest.raises(IntegrityError, match="create a new shadow"):
        Shadow.open(tmp_path, world.layout)


def test_smaller_shadow_keeps_maps_of_the_previous_one_valid(tmp_path):
    """In a process of its own, which would end by SIGBUS on failure."""
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "import pathlib, sys\n"
            "from p2pcast.codec.layout import Layout, Tensor\n"
            "from p2pcast.state.shadow import Shadow\n"
            "folder = pathlib.Path(sys.argv[1])\n"
            "large, small = (Layout([Tensor('w', 'BF16', (words,))]) for words in (100_000, 10))\n"
            "before = Shadow.create(folder, large)\n"
            "view = before.words(large.cells[0])\n"
            "before.close()\n"
            "with Shadow.create(folder, small) as after:\n"
            "    assert view[-1] == 0\n"
            "    assert after.words(small.cells[0]).size == 10\n",
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended
