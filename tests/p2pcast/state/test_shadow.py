from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from p2pcast.checkpoint import Checkpoint
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.errors import IntegrityError, LocalError
from p2pcast.parallel import ordered_map
from p2pcast.state.shadow import Phase, Shadow
from p2pcast.version import Version

V0, V1, V2 = Version(0, 0), Version(0, 1), Version(0, 2)


class Died(BaseException):
    """The process ends here."""


class Mortal(Shadow):
    """A shadow whose process dies at its ``left``-th write; an overwrite dies in the middle of the cell."""

    left = -1

    def _write(self, name: str, *args: object) -> None:
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
        assert (shadow.version, shadow.phase) == (V1, Phase.CLEAN)
        assert world.bytes_of(shadow) == b
        assert shadow.state_digest == world.digest(b)
        assert shadow.verify(workers=workers) == []
    with Shadow.open(tmp_path, world.layout) as again:
        assert again.version == V1
        assert world.bytes_of(again) == b


def test_a_version_without_changes(world, tmp_path):
    a = world.state(1)
    with world.filled(tmp_path, a) as shadow:
        shadow.apply(world.stage(shadow, a, a, V1, V0))
        assert shadow.version == V1
        assert world.bytes_of(shadow) == a


@pytest.mark.parametrize("tensors", [[], [Tensor("empty", "BF16", (0,))], [Tensor("scalar", "U8", ())]])
def test_tiny_layouts(tmp_path, tensors):
    layout = Layout(tensors)
    with Shadow.create(tmp_path, layout) as shadow:
        shadow.fill(V0, lambda cell: np.zeros(cell.words, np.uint8), 0)
    with Shadow.open(tmp_path, layout) as shadow:
        assert shadow.verify() == []
        assert shadow.state_digest == 0


def _deaths(world, folder: Path):
    """(how many writes came before, folder) for a death at every write of an apply from state 1 to its step."""
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


def test_a_death_at_any_write_of_apply_is_mended(world, tmp_path):
    a = world.state(1)
    b = world.step(a, 2, share=0.1)
    count = 0
    for left, at in _deaths(world, tmp_path):
        count += 1
        with Shadow.open(at, world.layout) as shadow:
            # Only before the phase was set is the old version still there, whole.
            want = (V0, a) if left <= 2 else (V1, b)
            assert (shadow.version, world.bytes_of(shadow)) == want, left
            assert shadow.phase is Phase.CLEAN
            assert shadow.verify() == []
            if left <= 2:
                shadow.apply(shadow.patch_path(V1))
                assert world.bytes_of(shadow) == b
    assert count == 2 * len(world.delta(a, b)) + 4 >= 20


def test_a_death_while_mending_is_mended(world, tmp_path):
    a = world.state(1)
    b = world.step(a, 2, share=0.1)
    dead = next(at for left, at in _deaths(world, tmp_path) if left == 9)
    # One more write lives each time: every one of them is the last at some point.
    for left in range(1, 200):
        Mortal.left = left
        with contextlib.suppress(Died), Mortal.open(dead, world.layout):
            break
    else:
        pytest.fail("it never got through")
    Mortal.left = -1
    assert left > 9
    with Shadow.open(dead, world.layout) as shadow:
        assert (shadow.version, world.bytes_of(shadow)) == (V1, b)
        assert shadow.verify() == []


def test_a_death_while_filling_starts_over(world, tmp_path):
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


def test_killed_for_real(world, tmp_path):
    """SIGKILL in the midst of applying, another process mends."""
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


def test_half_way_without_its_patch_is_refused(world, tmp_path):
    at = next(at for left, at in _deaths(world, tmp_path) if left == 8)
    patch = at / "patches" / "0.1.p2pp"
    whole = patch.read_bytes()
    patch.chmod(0o600)
    for bad in (whole[:-1], whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]):
        patch.write_bytes(bad)
        with pytest.raises(IntegrityError, match="made anew"):
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
        other.fill(V0, world.words(b))  # the version says yes, the bytes say no
        with pytest.raises(IntegrityError, match="wrong base"):
            other.apply(moved)
        assert world.bytes_of(other) == b
        assert other.version == V0
        with pytest.raises(LocalError, match="lies at"):
            other.apply(path)


def test_a_patch_that_names_another_state_is_refused(world, tmp_path):
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


def test_every_damaged_byte_of_a_patch_is_harmless_or_refused_whole(world, tmp_path):
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
                assert (shadow.version, shadow.phase) == (V0, Phase.CLEAN)
            else:  # the flip was in padding, or in the count of changed words
                assert world.bytes_of(shadow) == b
                shadow.fill(V0, world.words(a))
        assert refused > 400


def test_rot_is_found_and_healed(world, tmp_path):
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
            shadow.heal(cell, world.words(world.state(9))(cell))
        shadow.heal(cell, world.words(a)(cell))
        assert shadow.verify() == []
        assert world.bytes_of(shadow) == a


def test_a_fill_with_the_wrong_state_is_refused(world, tmp_path):
    a = world.state(1)
    with Shadow.create(tmp_path, world.layout) as shadow:
        with pytest.raises(IntegrityError, match="not that version"):
            shadow.fill(V1, world.words(a), 1)
        with pytest.raises(LocalError):
            shadow.verify()
        with pytest.raises(ZeroDivisionError):
            shadow.fill(V1, lambda cell: 1 // 0, workers=2)
        shadow.fill(V1, world.words(a), world.digest(a), workers=2)
        assert world.bytes_of(shadow) == a


def test_cells_that_are_brought_in_any_order_from_several_threads(world, tmp_path):
    a, b = world.state(1), world.state(2)
    with world.filled(tmp_path, a) as shadow:
        cells = sorted(shadow.layout.cells, key=lambda c: c.index * 7 % 11)
        with shadow.filling(V1) as put:
            assert shadow.phase is Phase.FILLING
            list(ordered_map(lambda cell: put(cell, world.words(b)(cell)), cells, workers=3, name="test"))
        assert (shadow.version, shadow.state_digest) == (V1, world.digest(b))
        assert world.bytes_of(shadow) == b
        assert shadow.verify() == []


def test_a_state_that_lacks_a_cell_holds_nothing(world, tmp_path):
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


def test_one_process_at_a_time(world, tmp_path):
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
        world.stager(shadow, Version(1, 0), V2)  # dies before it ends
        assert shadow.patches == [V1, V2]
        shadow.drop_patches(V1)
        assert shadow.patches == [V2]
    with Shadow.open(tmp_path, world.layout) as shadow:
        assert shadow.patches == [V2]
        assert not list(tmp_path.glob("patches/*.part"))


def test_a_full_tmpfs_is_one_clear_error(world, tmpfs):
    big = Layout([Tensor("big", "BF16", (1 << 20,))])
    with pytest.raises(LocalError, match=r"no room for the shadow.*GiB are free"):
        Shadow.create(tmpfs / "s", big)
    assert not (tmpfs / "s" / "model.safetensors").exists()
    # Room for the shadow and no more: staging fails, the shadow does not.
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


def test_a_limit_on_file_sizes_is_one_clear_error(world, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(LocalError, match=r"model\.safetensors"):
            Shadow.create(tmp_path, world.layout)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.glob("*.safetensors")) == []


def test_a_shadow_that_is_cut_short_ends_its_process_in_words_and_is_made_anew(world, tmp_path):
    """Nobody but its own user can do that; every pass over the shadow is a pass over a map."""
    with world.filled(tmp_path, world.state(1)):
        pass
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            "import mmap, os, pathlib, sys\n"
            "from p2pcast.daemon import name_fatal_signals\n"
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
    with pytest.raises(IntegrityError, match="must be made anew"):
        Shadow.open(tmp_path, world.layout)


def test_a_smaller_shadow_takes_nothing_away_from_who_maps_the_one_before(tmp_path):
    """In a process of its own: where it fails, that one ends by SIGBUS."""
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
