from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast import offline
from p2pcast.artifact import Open, RunKey, run_id
from p2pcast.artifact.artifact_file import HEADER, P2pdFile, P2pdWriter
from p2pcast.checkpoint import Checkpoint
from p2pcast.codec.cell import apply, decode, digest
from p2pcast.codec.layout import DTYPES, Layout, Tensor
from p2pcast.ground.errors import EXIT_REFUSED, IntegrityError, LocalError, UsageError
from p2pcast.ground.version import Version
from p2pcast.inspection import sparsity_report

Make = Callable[..., Path]
Table = dict[str, tuple[str, list[int], bytes]]
CELL_WORDS = 16


def _random_tensors(draw: random.Random) -> Table:
    """All dtypes, and shapes from empty to several cells."""
    out: Table = {}
    for number, dtype in enumerate(sorted(DTYPES)):
        shape = draw.choice([[], [0, 8], [8], [3, 16], [5, 8]])
        if dtype.startswith(("F4", "F6")) and not shape:
            shape = [8]
        out[f"t{number}"] = (dtype, shape, draw.randbytes(Tensor("t", dtype, tuple(shape)).nbytes))
    return out


def _changed(draw: random.Random, tensors: Table, how: str) -> Table:
    out: Table = {}
    for name, (dtype, shape, contents) in tensors.items():
        new = bytearray(contents)
        if how == "all":
            new = bytearray(b ^ 0xFF for b in new)
        elif how == "noise":
            new = bytearray(draw.randbytes(len(new)))
        elif how == "some" and draw.random() < 0.7:
            for _ in range(draw.randrange(3)):
                if new:
                    new[draw.randrange(len(new))] = draw.randrange(256)
        out[name] = (dtype, shape, bytes(new))
    return out


def _contents(folder: Path) -> dict[str, bytes]:
    """Tensor → bytes, read without the folder's own layout code."""
    checkpoint = Checkpoint.open(folder)
    return {
        tensor.name: file.words(1, begin, tensor.nbytes).tobytes()
        for file in checkpoint.files
        for tensor, begin in file.header.tensors
    }


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    how=st.sampled_from(["none", "some", "all", "noise"]),
    codec=st.sampled_from(["auto", "flat", "dense", "raw", "context"]),
    pad=st.integers(0, 7),
    workers=st.sampled_from([1, 2]),
)
def test_diff_then_apply_is_exact(
    make_checkpoint: Make, seed: int, how: str, codec: str, pad: int, workers: int
) -> None:
    draw = random.Random(seed)
    old = _random_tensors(draw)
    new = _changed(draw, old, how)
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        make_checkpoint(top / "old", old, {"config.json": b"{}", "gone.txt": b"x"}, pad=pad, shards=draw.choice([1, 3]))
        make_checkpoint(top / "new", new, {"config.json": b"{}", "made.txt": b"y"}, shards=draw.choice([1, 2]))
        made = offline.diff(top / "old", top / "new", top / "d", codec=codec, cell_words=CELL_WORDS, workers=workers)
        version = offline.apply_file(top / "old", top / "d", top / "out", workers=workers)
        assert version == made.version == Version(0, 1)
        assert _contents(top / "out") == {n: c for n, (_, _, c) in new.items()}
        assert Checkpoint.open(top / "out").small_files() == {"config.json": b"{}", "made.txt": b"y"}
        assert offline.verify_folder(top / "out", top / "d").faults == []
        assert offline.verify_folder(top / "new", top / "d").state == made.state
        words = {t.name: t.word_bytes for t in Checkpoint.open(top / "new").layout().tensors}
        differing = sum(
            old[n][2][at : at + w] != new[n][2][at : at + w]
            for n, w in words.items()
            for at in range(0, len(new[n][2]), w)
        )
        assert made.changed == differing
        assert made.nbytes == (top / "d").stat().st_size
        assert made.dense_bytes == sum(len(c) for _, _, c in new.values())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), back=st.booleans(), codec=st.sampled_from(["auto", "flat"]))
def test_squash_equals_the_direct_delta(make_checkpoint: Make, seed: int, back: bool, codec: str) -> None:
    """Deltas of the smallest codec with the base given, flat deltas without it."""
    draw = random.Random(seed)
    states = [_random_tensors(draw)]
    for _ in range(3):
        states.append(_changed(draw, states[-1], draw.choice(["some", "some", "none", "noise"])))
    if back:
        states[3] = states[0]
    names = [b"a", draw.choice([b"a", b"b"]), draw.choice([b"a", b"b"]), draw.choice([b"a", b"b"])]
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        for n, state in enumerate(states):
            make_checkpoint(top / f"step_{n}", state, {"config.json": names[n]})
        for n in range(3):
            offline.diff(
                top / f"step_{n}", top / f"step_{n + 1}", top / f"d{n}", cell_words=CELL_WORDS, workers=1, codec=codec
            )
        base = top / "step_0" if codec == "auto" else None
        made = offline.squash_files([top / "d0", top / "d1", top / "d2"], top / "s", base=base, workers=2)
        assert (made.base, made.version) == (Version(0, 0), Version(0, 3))
        offline.apply_file(top / "step_0", top / "s", top / "out", workers=1)
        assert _contents(top / "out") == {n: c for n, (_, _, c) in states[3].items()}
        assert Checkpoint.open(top / "out").small_files() == {"config.json": names[3]}
        if back:
            assert offline.verify_folder(top / "step_0", top / "s").state == made.state


@pytest.fixture
def pair(tmp_path: Path, make_checkpoint: Make) -> tuple[Path, Table, Table]:
    """old, new, and the delta d between them, in a folder of their own."""
    draw = random.Random(1)
    old = {"w": ("BF16", [40, 10], draw.randbytes(800)), "b": ("F32", [3], draw.randbytes(12))}
    changed = bytearray(old["w"][2])
    for at in (100, 101, 400):
        changed[at] ^= 0x55
    new = {**old, "w": ("BF16", [40, 10], bytes(changed))}
    make_checkpoint(tmp_path / "old", old, {"config.json": b"{}", "same.txt": b"same" * 99})
    make_checkpoint(tmp_path / "new", new, {"config.json": b'{"a": 1}', "same.txt": b"same" * 99})
    offline.diff(tmp_path / "old", tmp_path / "new", tmp_path / "d", cell_words=50, codec="flat")
    return tmp_path, old, new


def _refused(top: Path, base: str, words: str, delta: str = "d") -> None:
    before = sorted(os.listdir(top))
    with pytest.raises(IntegrityError, match=words) as caught:
        offline.apply_file(top / base, top / delta, top / "out")
    assert caught.value.exit_code == EXIT_REFUSED
    assert sorted(os.listdir(top)) == before


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_auto_takes_the_smallest_codec_per_cell(seed: int) -> None:
    """Few and many changes, in weight-like words and in noise."""
    draw = np.random.default_rng(seed)
    words, share = int(draw.integers(1, 5000)), float(draw.choice([0.0005, 0.01, 0.2, 1.0]))
    cell = Layout([Tensor("w", "BF16", (words,))]).cells[0]
    old = (draw.normal(0, 0.02, words).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    moved = draw.random(words) < share
    new = np.where(moved, old + draw.integers(1, 3, words).astype(np.uint16), old)
    before = digest(old, cell)
    made = offline.encode_smallest(cell, old, new, before, "auto")
    others = [offline.encode_smallest(cell, old, new, before, codec) for codec in ("context", "flat", "dense", "raw")]
    if made is None:
        assert others == [None] * 4
        return
    assert len(made.payload) == min(len(other.payload) for other in others if other is not None)
    patch = decode(cell, made.codec, made.payload, old, made.before, made.after)
    reached = old.copy()
    apply(patch, reached)
    assert np.array_equal(reached, new)


def test_wrong_base_is_named(pair: tuple[Path, Table, Table], make_checkpoint: Make) -> None:
    top, old, _ = pair
    files = {"config.json": b"{}", "same.txt": b"same" * 99}

    def base(name: str, at: int) -> None:
        hurt = bytearray(old["w"][2])
        hurt[at] ^= 1
        make_checkpoint(top / name, {**old, "w": ("BF16", [40, 10], bytes(hurt))}, files)

    base("touched", 110)
    _refused(top, "touched", r"wrong base: .*touched: tensor 'w', words 50 to 99 \(cell 2\)")
    base("elsewhere", 799)
    _refused(top, "elsewhere", r"wrong base: .*another cell differs")
    _refused(top, "new", r"tensor 'w', words 50 to 99")
    make_checkpoint(top / "file", old, {**files, "same.txt": b"other"})
    _refused(top, "file", r"small file 'same.txt' differs")
    make_checkpoint(top / "nofile", old, {"config.json": b"{}"})
    _refused(top, "nofile", r"small file 'same.txt' is missing")
    make_checkpoint(top / "shape", {**old, "w": ("BF16", [400], old["w"][2])}, files)
    _refused(top, "shape", r"w: BF16\[40, 10\] became BF16\[400\]")
    make_checkpoint(top / "fewer", {"w": old["w"]}, files)
    _refused(top, "fewer", "missing: b")


def test_damaged_delta_writes_no_folder(pair: tuple[Path, Table, Table]) -> None:
    top, _, _ = pair
    whole = (top / "d").read_bytes()
    with P2pdFile.open(top / "d") as file:
        log = file.manifest.log
        borders = [len(HEADER) + p.offset for p in file.assembly.directory]
        tensors = {p.cell for p in file.assembly.directory}
    assert len(tensors) == 2
    tail = len(HEADER) + log
    cuts = {
        0,
        1,
        4,
        len(HEADER),
        tail,
        tail + 1,
        len(whole) - 24,
        len(whole) - 16,
        len(whole) - 8,
        len(whole) - 1,
        *borders,
    }
    for cut in sorted(cuts):
        (top / "x").write_bytes(whole[:cut])
        _refused(top, "old", "cut short|not a", "x")
    draw = random.Random(3)
    for at in [*borders, *(draw.randrange(len(whole)) for _ in range(150))]:
        hurt = bytearray(whole)
        hurt[at] ^= 1 << draw.randrange(8)
        (top / "x").write_bytes(hurt)
        _refused(top, "old", "damaged|not a|cut short|version", "x")


@pytest.mark.parametrize("lie", ["payload", "after", "state"])
def test_wrong_signed_data_is_detected(pair: tuple[Path, Table, Table], lie: str) -> None:
    """A key's holder may sign wrong data: applied deltas must still reach the signed digests."""
    top, _, _ = pair
    key = RunKey.generate()
    with P2pdFile.open(top / "d") as file:
        opened = replace(file.assembly.open, run=run_id(key.public))
        with P2pdWriter(top / "x", key, opened, file.layout) as writer:
            for p in file.assembly.directory:
                payload = bytearray(file.read_cell(p))
                payload[-1] ^= lie == "payload"
                writer.add_cell(p.cell, p.codec, bytes(payload), p.before, p.after ^ (lie == "after"))
            writer.add_file("config.json", b"{}")
            writer.seal(file.manifest.state ^ (lie == "state"))
    _refused(top, "old", "another cell differs" if lie == "state" else "cell 2", "x")


def test_apply_does_not_overwrite(pair: tuple[Path, Table, Table]) -> None:
    top, _, _ = pair
    with pytest.raises(LocalError, match="not empty"):
        offline.apply_file(top / "old", top / "d", top / "old")
    with pytest.raises(LocalError, match="cannot write"):
        offline.diff(top / "old", top / "new", top / "none" / "d")


def test_diff_of_different_layouts_is_refused(tmp_path: Path, make_checkpoint: Make) -> None:
    make_checkpoint(tmp_path / "a", {f"t{n}": ("U8", [1], b"1") for n in range(30)})
    make_checkpoint(tmp_path / "b", {"t0": ("I8", [1], b"1"), "new": ("U8", [1], b"1")})
    with pytest.raises(IntegrityError, match="anchor") as caught:
        offline.diff(tmp_path / "a", tmp_path / "b", tmp_path / "d")
    assert "missing: t1" in str(caught.value)
    assert "… and 21 more" in str(caught.value)
    assert not (tmp_path / "d").exists()


def test_unknown_codec_leaves_no_file(pair: tuple[Path, Table, Table]) -> None:
    top, _, _ = pair
    with pytest.raises(UsageError, match="codec"):
        offline.diff(top / "old", top / "new", top / "e", codec="zip")
    assert not (top / "e").exists()
    assert not [n for n in os.listdir(top) if n.startswith(".")]


@pytest.mark.parametrize(
    ("old", "new", "base", "version"),
    [
        ("a", "b", "0.0", "0.1"),
        ("step_7", "step_9", "0.7", "0.9"),
        ("a", "step_9", "0.0", "0.9"),
        ("a", "step_0", "0.0", "1.0"),
        ("step_7", "b", "0.7", "0.8"),
        ("step_9", "step_7", "0.9", "1.7"),
    ],
)
def test_versions_follow_folder_names(old: str, new: str, base: str, version: str) -> None:
    assert [str(v) for v in offline.folder_versions(Path(old), Path(new))] == [base, version]


def test_squash_refuses_gaps(pair: tuple[Path, Table, Table], make_checkpoint: Make) -> None:
    top, old, _ = pair
    offline.diff(top / "new", top / "old", top / "back", cell_words=50, codec="flat")
    with pytest.raises(IntegrityError, match="does not follow"):
        offline.squash_files([top / "d", top / "d"], top / "s")
    make_checkpoint(top / "third", {**old, "b": ("F32", [3], bytes(12))})
    offline.diff(top / "old", top / "third", top / "t", cell_words=50)
    with pytest.raises(IntegrityError, match="does not follow"):
        offline.squash_files([top / "d", top / "t"], top / "s")
    offline.diff(top / "new", top / "old", top / "othercells", cell_words=60)
    with pytest.raises(IntegrityError, match="other cells"):
        offline.squash_files([top / "d", top / "othercells"], top / "s")
    with pytest.raises(UsageError, match="nothing to squash"):
        offline.squash_files([], top / "s")
    assert not (top / "s").exists()
    made = offline.squash_files([top / "d", top / "back"], top / "s")
    assert (made.changed, made.codecs) == (0, {"none": 9})
    offline.apply_file(top / "old", top / "s", top / "out")
    assert _contents(top / "out") == _contents(top / "old")


def test_verify_names_every_difference(pair: tuple[Path, Table, Table], make_checkpoint: Make) -> None:
    top, _, new = pair
    faults = offline.verify_folder(top / "old", top / "d").faults
    assert any("tensor 'w', words 50 to 99" in f for f in faults)
    assert any("'config.json' differs" in f for f in faults)
    hurt = bytes(12)
    make_checkpoint(top / "hurt", {**new, "b": ("F32", [3], hurt)})
    faults = offline.verify_folder(top / "hurt", top / "d").faults
    assert faults[0] == "a cell that this delta does not change differs"
    assert any("missing" in f for f in faults)
    (top / "one").mkdir()
    with pytest.raises(LocalError):
        offline.verify_folder(top / "one", top / "d")


def test_verify_against_a_hubs_digests(pair: tuple[Path, Table, Table]) -> None:
    top, _, _ = pair
    state = offline.state_digest(Checkpoint.open(top / "new"))
    assert state == offline.state_digest(
        Checkpoint.open(top / "new"), Checkpoint.open(top / "old").layout(cell_words=7)
    )
    status: dict[str, Any] = {
        "layout_id": "00",
        "digests": {"0.3": "0" * 16, "0.12": f"{state:016x}", "0.4": f"{state:016x}"},
    }
    assert offline.verify_digests(top / "new", status).version == Version(0, 12)
    assert offline.verify_digests(top / "new", status, version=Version(0, 4)).faults == []
    assert (
        "is not that of 0.3; the layouts"
        in offline.verify_digests(top / "new", status, version=Version(0, 3)).faults[0]
    )
    assert "does not know" in offline.verify_digests(top / "new", status, version=Version(0, 5)).faults[0]
    assert "any of the hub's 3" in offline.verify_digests(top / "old", status).faults[0]
    for nothing in ({}, [], {"digests": {}}, None):
        with pytest.raises(LocalError, match="no digests"):
            offline.verify_digests(top / "new", nothing)
    for wrong in ({"x": "00"}, {"0.1": "zz"}, {"0.1": 7}):
        with pytest.raises(IntegrityError, match="digests"):
            offline.verify_digests(top / "new", {"digests": wrong})


def test_anchor_cannot_be_squashed(tmp_path: Path, make_checkpoint: Make) -> None:
    layout = Checkpoint.open(make_checkpoint(tmp_path / "m", {"a": ("U8", [2], b"12")})).layout()
    key = RunKey.generate()
    opened = Open(bytes(16), None, "anchor", layout.layout_id, 1024, run_id(key.public), Version(0, 0))
    with P2pdWriter(tmp_path / "a", key, opened, layout) as writer:
        writer.add_cell(0, 1, b"12", 0, 5)
        writer.seal(5)
    with pytest.raises(UsageError, match="anchor"):
        offline.squash_files([tmp_path / "a"], tmp_path / "s")


@pytest.mark.parametrize(
    "what", ["diff old", "diff new", "apply", "squash", "verify", "inspect delta", "inspect folders"]
)
def test_folder_cut_short_during_reading_is_an_error(pair: tuple[Path, Table, Table], what: str) -> None:
    """Cut short by another process, after the header was checked; with a map, this process would end by SIGBUS."""
    top, _, _ = pair
    folder = top / ("new" if what in ("diff new", "verify", "inspect folders") else "old")

    def progress(count: int, total: int) -> None:
        os.truncate(folder / "model.safetensors", 400)

    def inspected() -> None:
        with P2pdFile.open(top / "d") as file:
            list(sparsity_report.examine_delta(file, Checkpoint.open(top / "old"), None, progress=progress))

    def compared() -> None:
        was, now = Checkpoint.open(top / "old"), Checkpoint.open(top / "new")
        list(sparsity_report.compare_folders(was, now, was.layout(cell_words=50), "auto", None, progress=progress))

    work = {
        "diff": lambda: offline.diff(
            top / "old", top / "new", top / "out", progress=progress, cell_words=50, workers=1
        ),
        "apply": lambda: offline.apply_file(top / "old", top / "d", top / "out", progress=progress, workers=1),
        "squash": lambda: offline.squash_files(
            [top / "d"], top / "out", base=top / "old", codec="flat", progress=progress, workers=1
        ),
        "verify": lambda: offline.verify_folder(top / "new", top / "d", progress=progress, workers=1),
        "inspect delta": inspected,
        "inspect folders": compared,
    }
    before = sorted(os.listdir(top))
    with pytest.raises(LocalError, match=f"{folder.name}/model.safetensors: the file was cut short during reading"):
        work.get(what, work["diff"])()
    assert sorted(os.listdir(top)) == before
