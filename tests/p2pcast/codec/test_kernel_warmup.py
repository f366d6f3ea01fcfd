"""After the warm-up, no codec path compiles a kernel. The log announces a compilation."""

import importlib
import logging
import sys

import numpy as np
import pytest
from numba import njit

from p2pcast.codec import class_ranks, gap_entropy_coder, kernel_warmup, kernels, step_entropy_coder
from p2pcast.codec.cell import apply, decode, encode
from p2pcast.codec.digest import digest, digest_change, word_dtype
from p2pcast.codec.kernel_warmup import warm_up
from p2pcast.codec.layout import Cell


def compiled() -> dict[str, int]:
    every = [
        item
        for module in (kernels, class_ranks, gap_entropy_coder, step_entropy_coder)
        for item in vars(module).items()
    ]
    return {name: len(k.signatures) for name, k in every if hasattr(k, "signatures")}


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_warm_up_compiles_every_kernel(width):
    warm_up([width])
    before = compiled()
    assert sum(before.values())
    rng = np.random.default_rng(width)
    for words, changes in ((1, 1), (300, 3), (70_000, 1), (70_000, 2_000), (5_000, 5_000)):
        cell = Cell(3, 2, 1024 * 5 + 3, words, width, 0, 50)
        old = rng.integers(0, 256, words * width, dtype=np.uint8).view(word_dtype(width))
        new = old.copy()
        new[rng.choice(words, changes, replace=False)] += np.array(
            rng.integers(1, 1 << min(8 * width - 1, 62)), new.dtype
        )
        for readonly in (False, True):
            old.flags.writeable = new.flags.writeable = not readonly
            for codec in ("auto", "flat", "dense", "raw", "context"):
                coded = encode(cell, old, new, codec=codec)
                assert coded is not None
                patch = decode(cell, coded.codec, coded.payload, old, coded.before, coded.after)
                target = old.copy()
                apply(patch, target)
                assert digest(target, cell) == digest(new, cell) == coded.after
                if patch.positions is not None:
                    digest_change(patch.positions, old[patch.positions], patch.words, cell)
    assert compiled() == before


SLOW = """
def doubled(x):
    return 2 * x
"""


@pytest.mark.parametrize("cached", [True, False])
def test_the_log_says_once_before_and_after_that_kernels_are_compiled(tmp_path, monkeypatch, caplog, cached):
    """A kernel of its own, which no cache holds, in the place of the codec's, which take half a minute."""
    (tmp_path / "slow_kernel.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("slow_kernel").doubled
    seen = []

    def paths(*_):
        kernel = njit(cache=cached)(function)
        seen.append([r.message for r in caplog.records])
        assert kernel(2) == 4
        yield

    monkeypatch.setattr(kernel_warmup, "_codec_paths", paths)
    with caplog.at_level(logging.INFO, "p2pcast.codec"):
        warm_up()
        said = [r.message for r in caplog.records]
        caplog.clear()
        warm_up()
    assert len(seen) == 8
    assert seen[0] == []
    assert seen[1] == said[:1]
    assert said[0].startswith("compiling the codec's kernels for up to a minute, ")
    assert ("NUMBA_CACHE_DIR" in said[0], str(tmp_path) in said[0]) == (not cached, cached)
    assert said[1:] == ["the codec's kernels are compiled"]
    assert bool(caplog.records) is not cached
    sys.modules.pop("slow_kernel")
