"""The codec bench: rivals' formats lose nothing, the reference scan finds all differences, the report has its
documented keys.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from netem.bench.codec_comparison import comparison as bench
from netem.bench.codec_comparison import memory, pulse_format, sparrowrl_format, verl_format, xor_format
from netem.bench.codec_comparison.cores import two_cores
from netem.bench.codec_comparison.reference_scan import compact
from netem.bench.commands.codec_commands import codec as command
from netem.bench.measuring import Peak, anonymous_bytes
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import LocalError

SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 300)),
        st.tuples(st.integers(1, 900), st.integers(1, 40)),
        st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 70_000)),
        st.just(()),
    ),
    min_size=1,
    max_size=5,
)


def same(left, right):
    return all(
        a.tolist() == c.tolist() and b.tolist() == d.tolist() for (a, b), (c, d) in zip(left, right, strict=True)
    )


def decode_flat32(blob, sizes, dtypes):
    """Undo ``pulse.encode_flat32``; only this test needs the decoder."""
    narrow, wide, values = pulse_format._split(blob)
    gaps = np.frombuffer(narrow, "<i4").astype(np.int64)
    gaps[gaps == 0x7FFFFFFF] = np.frombuffer(wide, "<u8").astype(np.int64)
    everywhere = np.cumsum(gaps)
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    cuts = np.searchsorted(everywhere, ends).tolist()
    places = zip([0, *cuts[:-1]], cuts, ends.tolist(), sizes, strict=True)
    return pulse_format._with_values([everywhere[a:b] - (end - size) for a, b, end, size in places], values, dtypes)


@given(shapes=SHAPES, seed=st.integers(0, 1 << 32), density=st.sampled_from([0.0, 0.0005, 0.02, 1.0]))
@settings(max_examples=60, deadline=None)
def test_pulse_loses_nothing(shapes, seed, density):
    rng = np.random.default_rng(seed)
    sizes = [math.prod(s) for s in shapes]
    changes = []
    for size in sizes:
        positions = np.flatnonzero(rng.random(size) < density)
        changes.append((positions, rng.integers(0, 1 << 16, positions.size, dtype=np.uint16)))
    dtypes = [np.dtype("<u2")] * len(shapes)
    assert same(pulse_format.decode_coo(pulse_format.encode_coo(changes, shapes), shapes, dtypes), changes)
    assert same(decode_flat32(pulse_format.encode_flat32(changes, sizes), sizes, dtypes), changes)


def test_pulse_escapes_rows_and_columns_that_do_not_fit():
    shape = (1000, 70_000)
    positions = np.array([0, 65_534, 65_534 + 65_535, 254 * 70_000, 509 * 70_000 + 65_535, 999 * 70_000 + 69_999])
    changes = [(positions, np.arange(6, dtype="<u2"))]
    assert same(pulse_format.decode_coo(pulse_format.encode_coo(changes, [shape]), [shape], ["<u2"]), changes)


def test_pulse_of_nothing():
    changes = [(np.empty(0, np.int64), np.empty(0, "<u2"))]
    assert same(pulse_format.decode_coo(pulse_format.encode_coo(changes, [(5,)]), [(5,)], ["<u2"]), changes)
    assert same(decode_flat32(pulse_format.encode_flat32(changes, [5]), [5], ["<u2"]), changes)


@given(shapes=SHAPES, seed=st.integers(0, 1 << 32), density=st.sampled_from([0.0, 0.0005, 0.02, 1.0]))
@settings(max_examples=30, deadline=None)
def test_sparrowrl_xor_and_absolute_lose_nothing(shapes, seed, density):
    rng = np.random.default_rng(seed)
    changes, dtypes = [], []
    for number, shape in enumerate(shapes):
        dtype = np.dtype(("<u1", "<u2", "<u4", "<u8")[number % 4])
        old = rng.integers(0, 255, math.prod(shape)).astype(dtype)
        new = np.where(rng.random(old.size) < density, old + dtype.type(1), old)
        assert (xor_format.decode(xor_format.encode(old, new), old) == new).all()
        moved = np.flatnonzero(old != new)
        changes.append((moved, new[moved]))
        dtypes.append(dtype)
    assert same(sparrowrl_format.decode(sparrowrl_format.encode(changes), dtypes), changes)
    counts = [len(positions) for positions, _ in changes]
    assert same(verl_format.decode(verl_format.encode(changes), counts, dtypes), changes)


def test_leb128_matches_the_paper():
    """Figure 6: 198 is C6 01; numbers below 128 take a byte."""
    numbers = np.array([198, 0, 127, 128, 16_383, 16_384, (1 << 62) + 5])
    coded = sparrowrl_format.leb128(numbers)
    assert coded[:5] == bytes([0xC6, 0x01, 0, 127, 0x80])
    assert len(coded) == 2 + 1 + 1 + 2 + 2 + 3 + 9
    assert sparrowrl_format.read_leb128(coded).tolist() == numbers.tolist()


@pytest.mark.parametrize("size", [1, 63, 64, 200, 5000])
@pytest.mark.parametrize("density", [0, 0.01, 1])
def test_reference_scan_finds_all_differences(size, density):
    rng = np.random.default_rng(size)
    old = rng.integers(0, 1 << 16, size, dtype=np.uint16)
    new = old + (rng.random(size) < density).astype(np.uint16)
    positions = np.empty(size, dtype=np.uint32)
    assert positions[: compact(old, new, positions)].tolist() == np.flatnonzero(old != new).tolist()


def test_entropy_by_hand():
    """Two exponents of four words: one of four changes (by +1), two of four (by +1, by −1). Positions take 3.245 + 4
    bits, steps 0 + 2 bits.
    """
    old = np.array([0x3F80] * 4 + [0x4000] * 4, dtype="<u2")
    new = old.copy()
    new[0] += 1
    new[4] += 1
    new[5] -= 1
    tensor = Tensor("t", "BF16", (8,))
    assert bench.entropy_bits(tensor, old, new) == pytest.approx(4 * 0.811278 + 4 + 0 + 2, abs=1e-4)
    assert bench.entropy_bits(tensor, old, old) == 0


@pytest.mark.parametrize("most", [1, 500])
def test_grouped_sizes_approximate_whole_sizes(monkeypatch, most):
    dataset = a_dataset()
    whole = bench.other_sizes(dataset.layout.tensors, *dataset.pairs[0])
    monkeypatch.setattr(bench, "GROUP_WORDS", most)
    for key, nbytes in bench.other_sizes(dataset.layout.tensors, *dataset.pairs[0]).items():
        assert whole[key] <= nbytes <= whole[key] + 300


def test_sliced_entropy_equals_whole_entropy(monkeypatch):
    dataset = a_dataset()
    old, new = dataset.pairs[0]
    whole = [bench.entropy_bits(t, old[t.name], new[t.name]) for t in dataset.layout.tensors]
    monkeypatch.setattr(bench, "SLICE_WORDS", 777)
    assert [bench.entropy_bits(t, old[t.name], new[t.name]) for t in dataset.layout.tensors] == pytest.approx(whole)


@pytest.mark.parametrize("nbytes", [30_000, 76_000, 200_000])
def test_the_working_set_is_as_large_as_was_asked(monkeypatch, nbytes):
    """Repeated for a smaller state, otherwise slices of the state."""
    monkeypatch.setattr(bench, "SLICE_WORDS", 1000)
    dataset = a_dataset()
    old, new = bench.tiled(dataset, nbytes)
    whole = sum(t.nbytes for t in dataset.layout.tensors if t.word_bytes == 2)
    assert old.size == new.size
    assert nbytes - 2000 <= old.nbytes < max(nbytes + 2000, nbytes + whole)
    assert 0.01 < np.count_nonzero(old != new) / old.size < 0.03


def a_dataset():
    rng = np.random.default_rng(0)
    tensors = [Tensor("a.weight", "BF16", (300, 128)), Tensor("a.bias", "BF16", (128,)), Tensor("n", "F32", (4,))]
    layout = Layout(tensors, cell_words=10_000)
    states = [{t.name: rng.integers(0, 1 << 14, t.words).astype(f"<u{t.word_bytes}") for t in layout.tensors}]
    for _ in range(2):
        states.append({n: w + (rng.random(w.size) < 0.02).astype(w.dtype) for n, w in states[-1].items()})
    return bench.Dataset("random", layout, states)


KEYS = {
    "bytes", "pulse_bytes", "entropy_bytes", "ratio_to_pulse", "ratio_to_entropy", "encode_vs_scan", "decode_vs_scan",
    "scan_gb_s", "encode_gb_s", "decode_gb_s", "dense_bytes", "changed", "params",
}  # fmt: skip


def test_report_adds_up():
    rows = [bench.measure(a_dataset(), working_set_bytes=1 << 20, repeats=1) for _ in range(2)]
    document = bench.report(rows, "auto")
    assert set(document) >= KEYS | {"rows"}
    for row in document["rows"]:
        assert set(row) >= KEYS | {"dataset"}
        assert row["dense_bytes"] == 2 * (2 * (300 * 128 + 128) + 16)
        assert row["params"] == 2 * (300 * 128 + 128 + 4)
        assert row["entropy_bytes"] < row["bytes"] < row["pulse_bytes"] < row["dense_bytes"]
        assert row["encode_vs_scan"] > 0
    assert document["bytes"] == 2 * rows[0]["bytes"]
    assert document["ratio_to_pulse"] == rows[0]["ratio_to_pulse"]


def write(folder, words):
    folder.mkdir()
    save_file({"w": words.view(np.float16).reshape(50, -1), "b": np.zeros(3, np.float32)}, folder / "model.safetensors")
    return str(folder)


def test_command_on_two_folders(tmp_path):
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 14, 50_000, dtype=np.uint16)
    old = write(tmp_path / "old", words)
    new = write(tmp_path / "new", words + (rng.random(words.size) < 0.01).astype(np.uint16))
    options = ["--old", old, "--new", new, "--working-set", "1"]
    done = CliRunner().invoke(command, [*options, "--json"], catch_exceptions=False)
    document = json.loads(done.stdout)
    assert set(document) >= KEYS
    assert document["codec"] == "context"
    assert document["encode_two_cores"] > 0
    assert document["memory"] is None
    assert {row["format"] for row in document["formats"]["rows"]} == {
        row["format"] for row in document["end_to_end"]["rows"]
    }
    assert document["formats"]["changed_share"] == pytest.approx(0.01, rel=0.2)
    assert document["params"] == 50_003
    assert 0 < document["bytes"] < 3000
    table = CliRunner().invoke(command, options, catch_exceptions=False)
    assert table.exit_code == 0
    assert "PULSE" in table.stdout
    assert "70B" in table.stdout


def test_command_on_equal_folders_has_no_ratios(tmp_path):
    words = np.arange(50, dtype=np.uint16)
    folders = [write(tmp_path / name, words) for name in ("old", "new")]
    done = CliRunner().invoke(
        command, ["--old", folders[0], "--new", folders[1], "--working-set", "1", "--json"], catch_exceptions=False
    )
    document = json.loads(done.stdout)
    assert (document["bytes"], document["ratio_to_entropy"]) == (0, None)


def test_command_wants_both_folders(tmp_path):
    done = CliRunner().invoke(command, ["--old", str(tmp_path)])
    assert done.exit_code != 0
    assert "--old and --new together" in str(done.exception)


def test_two_cores_are_compared_with_one(monkeypatch):
    done = two_cores(a_dataset(), "context", working_set_bytes=1 << 20, turns=2)
    assert set(done) == {f"{name}_two_cores{how}" for name in ("encode", "decode") for how in ("", "_by_cpu")}
    assert min(done.values()) > 0
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert set(two_cores(a_dataset(), "flat", turns=1).values()) == {None}


def test_memory_of_a_large_state(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "SPARE_DISK_BYTES", 0)
    found = memory.memory(1, "context", tmp_path)
    assert found["state_bytes"] == 2 * memory.BLOCK_WORDS
    assert (
        0 < found["before_bytes"] < found["peak_bytes"] == max(found["encode_peak_bytes"], found["decode_peak_bytes"])
    )
    assert found["delta_bytes"] > memory.BLOCK_WORDS * memory.CHANGED
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(memory, "SPARE_DISK_BYTES", 1 << 62)
    with pytest.raises(LocalError, match="disk free"):
        memory.memory(1, "context", tmp_path)


def test_peak_is_of_the_named_process():
    held = 50 << 20
    script = f"held = b'x' * {held}; print('there', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        peak = Peak(other.pid)
        peak.start()
        assert peak.stop() > held
        other.communicate(b"\n")
    assert anonymous_bytes(other.pid) == 0
