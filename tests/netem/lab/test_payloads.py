"""Sizes of one step's weights come from the bench's own encodings."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from netem.bench.codec_comparison import comparison
from netem.lab import payloads
from p2pcast.codec.layout import Layout, Tensor

WORDS = 100_000


def datasets(learning_rates: tuple[float, ...], pairs: int) -> Iterator[comparison.Dataset]:
    random = np.random.default_rng(int(1e9 * learning_rates[0]))
    states = [{"w": random.integers(0x3C00, 0x3E00, WORDS, np.uint16)}]
    for _ in range(pairs):
        new = states[-1]["w"].copy()
        new[random.random(WORDS) < 0.01] += 1
        states.append({"w": new})
    yield comparison.Dataset("made", Layout([Tensor("w", "BF16", (WORDS,))]), states)


def test_formats_shrink_in_their_listed_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "trained_datasets", datasets)
    found = payloads.measured(0.123, 2)
    sizes = [found.sizes[name] for name in payloads.FORMATS]
    assert sizes == sorted(sizes, reverse=True)
    assert found.sizes["dense"] == 2 * 2 * WORDS
    assert found.sizes["naive"] == 6 * round(found.changed_share * 2 * WORDS)
    assert found.changed_share == pytest.approx(0.01, rel=0.1)
