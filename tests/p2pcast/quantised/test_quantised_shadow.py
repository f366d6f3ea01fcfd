"""A quantised copy that follows a shadow, beside the same state quantised from nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from p2pcast.codec.cell import Patch
from p2pcast.codec.digest import MASK, digest, word_dtype
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import IntegrityError
from p2pcast.ground.version import Version
from p2pcast.quantised.quantisation_kinds import KINDS
from p2pcast.quantised.quantised_checkpoint import quantised_words
from p2pcast.quantised.quantised_shadow import KEPT_PATCHES, QuantisedShadow
from p2pcast.state.patch_file import PatchFile, PatchWriter
from p2pcast.state.shadow import Shadow

TENSORS = [
    Tensor("l.q_proj.weight", "BF16", (300, 516)),
    Tensor("l.k_proj.weight", "F32", (70, 260)),
    Tensor("l.o_proj.weight", "F16", (1, 4)),
    Tensor("norm.weight", "BF16", (516,)),
    Tensor("empty", "F32", (0, 3)),
    Tensor("ids", "I64", (7,)),
]
LAYOUT = Layout(TENSORS, cell_words=7000)
DTYPES = {"BF16": "<f4", "F16": "<f2", "F32": "<f4"}


def values(tensor: Tensor, draw: np.random.Generator) -> np.ndarray:
    if tensor.dtype == "I64":
        return draw.integers(0, 99, tensor.elements).astype("<u8")
    normal = (0.02 * draw.standard_normal(tensor.elements)).astype(DTYPES[tensor.dtype])
    words = normal.view(f"<u{normal.itemsize}")
    return (words >> 16).astype("<u2") if tensor.dtype == "BF16" else words


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Shadow]:
    draw = np.random.default_rng(0)
    state = [values(tensor, draw) for tensor in LAYOUT.tensors]
    shadow = Shadow.create(tmp_path / "plain", LAYOUT)
    shadow.fill(Version(0, 0), lambda c: state[c.tensor][c.start : c.start + c.words])
    yield shadow
    shadow.close()


def step(shadow: Shadow, seed: int, share: float = 0.01, value: int | None = None) -> Path:
    """The patch to the next version, applied: each changed word differs in its lowest bits, or is ``value``."""
    draw = np.random.default_rng(seed)
    base = shadow.version
    path = shadow.patch_path(Version(0, base.step + 1))
    writer = PatchWriter(path, LAYOUT, base, Version(0, base.step + 1))
    state = shadow.state_digest
    for cell in LAYOUT.cells:
        if draw.random() < 0.3:
            continue
        old = shadow.words(cell).copy()
        count = max(1, int(share * cell.words))
        at = np.sort(draw.choice(cell.words, count, replace=False)).astype(np.uint32)
        new = old.copy()
        new[at] ^= draw.integers(1, 4, count).astype(new.dtype)
        if value is not None and cell.word_bytes == 2:
            new[at[0]] = value
        before, after = digest(old, cell), digest(new, cell)
        dense = bool(draw.random() < 0.2)
        writer.add(Patch(cell.index, None if dense else at, new if dense else new[at], before, after, count))
        state = (state + after - before) & MASK
    writer.finish(state)
    shadow.apply(path)
    return path


def assert_follows(copy: QuantisedShadow, plain: Shadow) -> None:
    """Bytes and digests are those of the quantised state, made from nothing by another reader of the plain state."""
    whole = [
        np.concatenate([plain.words(c) for c in LAYOUT.cells if c.tensor == n] or [np.empty(0, "<u1")])
        for n in range(len(TENSORS))
    ]
    assert copy.version == plain.version
    assert copy.shadow.verify() == []
    for cell in copy.form.layout.cells:
        expected = quantised_words(copy.form, cell, lambda n, start, count: whole[n][start : start + count])
        assert np.array_equal(copy.shadow.words(cell), expected)
        assert copy.shadow.mark(cell.index) == digest(expected.astype(word_dtype(cell.word_bytes)), cell)


@pytest.mark.parametrize("kind", KINDS)
def test_copy_after_changes_is_the_copy_made_anew(plain: Shadow, tmp_path: Path, kind: str) -> None:
    copy = QuantisedShadow(plain, tmp_path / "copy", KINDS[kind])
    copy.follow(None)
    assert_follows(copy, plain)
    for seed, share in ((1, 0.01), (2, 0.0), (3, 0.5)):
        copy.follow([step(plain, seed, share)])
        assert_follows(copy, plain)
    copy.follow([step(plain, 4), step(plain, 5)])
    assert_follows(copy, plain)
    chain = copy.patches(Version(0, 0), Version(0, 5))
    assert isinstance(chain, list)
    ends = [(p.base.step, p.version.step) for p in (PatchFile.open(path, copy.form.layout) for path in chain)]
    assert ends == [(0, 1), (1, 2), (2, 3), (3, 5)]
    assert copy.patches(Version(0, 4), Version(0, 5)) == copy.shadow.path, "no patch starts there"
    assert copy.patches(None, Version(0, 5)) == copy.shadow.path
    copy.close()


def test_patches_beyond_the_limit_are_dropped(plain: Shadow, tmp_path: Path) -> None:
    copy = QuantisedShadow(plain, tmp_path / "copy", KINDS["fp8-channel"])
    copy.follow(None)
    for seed in range(KEPT_PATCHES + 3):
        copy.follow([step(plain, seed)])
    newest = plain.version
    assert len(copy.shadow.patches) == KEPT_PATCHES
    assert len(copy.patches(Version(0, 3), newest)) == KEPT_PATCHES  # type: ignore[arg-type]
    assert copy.patches(Version(0, 2), newest) == copy.shadow.path
    copy.close()


@pytest.mark.parametrize("kind", KINDS)
def test_copy_stays_when_a_version_is_refused(plain: Shadow, tmp_path: Path, kind: str) -> None:
    copy = QuantisedShadow(plain, tmp_path / "copy", KINDS[kind])
    copy.follow(None)
    before = copy.shadow.digests
    infinite = 0x7C00 | 0x7F80
    bad = step(plain, 1, value=infinite)
    with pytest.raises(IntegrityError, match="holds NaN or infinity"):
        copy.follow([bad])
    assert copy.version == Version(0, 0)
    assert np.array_equal(copy.shadow.digests, before)
    copy.close()
