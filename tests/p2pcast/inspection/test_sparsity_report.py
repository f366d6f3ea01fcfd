"""Sparsity reports of delta files and of folders agree on the same change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from p2pcast import offline
from p2pcast.artifact.artifact_file import P2pdFile
from p2pcast.checkpoint import Checkpoint
from p2pcast.ground.errors import IntegrityError
from p2pcast.inspection import sparsity_report

Make = Callable[..., Path]
ETA = 1e-3


def ignore(done, total):
    pass


@pytest.fixture
def steps(tmp_path: Path, make_checkpoint: Make) -> Path:
    """fp32 masters that move by about ETA, published in bf16 and f32."""
    rng = np.random.default_rng(0)
    masters = rng.standard_normal((60, 500)).astype(np.float32)
    for step in range(2):
        rounded = (masters.view(np.uint32) + 0x8000 >> 16).astype(np.uint16)
        tensors = {
            "lm_head": ("BF16", [60, 500], rounded.tobytes()),
            "norm": ("F32", [500], masters[0].tobytes()),
            "ids": ("I64", [300], np.arange(step, step + 300).tobytes()),
            "still": ("BF16", [4], bytes(8)),
            "none": ("BF16", [0], b""),
        }
        make_checkpoint(tmp_path / f"step_{step}", tensors, {})
        masters += np.float32(ETA) * rng.choice(np.array([-1, 1], np.float32), masters.shape)
    return tmp_path


def of_file(steps, codec, *, with_base=True, rate=None):
    offline.diff(steps / "step_0", steps / "step_1", steps / f"{codec}.p2pd", codec=codec, cell_words=7000)
    with P2pdFile.open(steps / f"{codec}.p2pd") as file:
        base = Checkpoint.open(steps / "step_0") if with_base else None
        return sparsity_report.report(
            file.layout, sparsity_report.examine_delta(file, base, rate, progress=ignore), rate
        )


def of_folders(steps, codec="flat", rate=None):
    was, now = Checkpoint.open(steps / "step_0"), Checkpoint.open(steps / "step_1")
    layout = was.layout(cell_words=7000)
    return sparsity_report.report(
        layout, sparsity_report.compare_folders(was, now, layout, codec, rate, progress=ignore), rate
    )


@pytest.mark.parametrize("codec", ["flat", "context", "dense"])
def test_file_with_base_reports_the_same_as_folders(steps, codec):
    assert of_file(steps, codec, rate=ETA) == of_folders(steps, codec, ETA)


def test_report_matches_counts_by_numpy(steps):
    document = of_folders(steps, rate=ETA)
    rows = {t["name"]: t for t in document["tensors"]}
    assert [t["bytes"] for t in document["tensors"]] == sorted((t["bytes"] for t in document["tensors"]), reverse=True)
    old, new = (Checkpoint.open(steps / f"step_{n}") for n in (0, 1))
    cell = next(c for c in old.layout(cell_words=1 << 20).cells if old.layout().tensors[c.tensor].name == "lm_head")
    was, now = old.words(cell), new.words(cell)
    head = rows["lm_head"]
    assert head["changed"] == np.count_nonzero(was != now)
    assert head["bits_per_change"] == 8 * head["bytes"] / head["changed"]
    small = (was.astype(np.uint32) << 16).view(np.float32)
    small = np.abs(small) < 256 * ETA
    assert head["magnitudes"]["under"] == small.sum()
    assert head["magnitudes"]["under_changed"] == (small & (was != now)).sum()
    assert head["magnitudes"]["threshold"] == 256 * ETA
    assert rows["norm"]["share"] == 1
    assert rows["ids"]["changed"] == 300
    assert rows["ids"]["magnitudes"] is None
    assert (rows["still"]["changed"], rows["none"]["words"]) == (0, 0)
    total = document["total"]
    for key in ("words", "changed", "bytes"):
        assert total[key] == sum(t[key] for t in rows.values())
    assert sum(total["magnitudes"]["by_exponent"].values()) == 30_500
    assert any("norm" in s for s in document["findings"])


def test_mean_update_is_estimated(steps):
    """Rounding keeps the mean, so the estimate holds for each tensor at any precision."""
    document = of_folders(steps)
    assert not document["learning_rate_given"]
    assert document["mean_update"] == pytest.approx(ETA, rel=0.1)
    rows = {t["name"]: t for t in document["tensors"]}
    assert rows["norm"]["magnitudes"]["mean_update"] == pytest.approx(ETA, rel=0.01)
    given = {t["name"]: t for t in of_folders(steps, rate=document["mean_update"])["tensors"]}["lm_head"]["magnitudes"]
    assert rows["lm_head"]["magnitudes"]["under"] == pytest.approx(given["under"], rel=0.05)


def test_report_without_base(steps):
    whole = of_folders(steps)
    flat = of_file(steps, "flat", with_base=False)
    assert flat["total"]["changed"] == whole["total"]["changed"]
    assert flat["total"]["magnitudes"] is None
    assert flat["learning_rate"] is None
    assert sum(sum(w.values()) for w in flat["total"]["ulps"].values()) == flat["total"]["changed"]
    context = of_file(steps, "context", with_base=False)
    assert context["total"]["changed"] == whole["total"]["changed"]
    assert (context["total"]["steps_known"], context["total"]["ulps"]) == (0, {})
    dense = of_file(steps, "dense", with_base=False)
    assert dense["total"]["exact"] is False
    assert dense["total"]["changed"] >= whole["total"]["changed"]


def test_wrong_base_is_refused(steps):
    offline.diff(steps / "step_1", steps / "step_0", steps / "back.p2pd")
    with P2pdFile.open(steps / "back.p2pd") as file, pytest.raises(IntegrityError, match="wrong base"):
        sparsity_report.report(
            file.layout, sparsity_report.examine_delta(file, Checkpoint.open(steps / "step_0"), None, progress=ignore)
        )


def test_equal_folders_report_no_change(steps):
    was = Checkpoint.open(steps / "step_0")
    document = sparsity_report.report(
        was.layout(), sparsity_report.compare_folders(was, was, was.layout(), "auto", None, progress=ignore)
    )
    assert document["findings"] == ["Nothing changed."]
    assert document["total"]["bytes"] == 0
