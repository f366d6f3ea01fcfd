"""The table of times: predictions from given costs, and the choices that follow."""

from __future__ import annotations

import json

import numpy as np
import pytest

from netem.bench.codec_comparison.comparison import Dataset
from netem.bench.codec_comparison.end_to_end import GBIT_S, end_to_end
from netem.bench.codec_comparison.formats import DeltaFormat, measure_formats
from p2pcast.codec.codec_prediction import MEASURED_BEFORE, Cost
from p2pcast.codec.layout import Layout, Tensor

OURS = [DeltaFormat(name, cost, ours=True) for name, cost in MEASURED_BEFORE.items()]
RIVAL = DeltaFormat("rival", Cost(2e9, 2e9, 1 / 50), overlaps=False)


def seconds(document, model, name, gbit_s):
    row = next(r for r in document["rows"] if (r["model"], r["format"]) == (model, name))
    return row["seconds"][GBIT_S.index(gbit_s)]


def test_context_wins_on_slow_links_and_flat_on_fast_links():
    document = end_to_end([*OURS, RIVAL])
    json.dumps(document, allow_nan=False)
    assert seconds(document, "8B", "context", 0.4) < seconds(document, "8B", "flat", 0.4)
    assert seconds(document, "8B", "context", 100) > seconds(document, "8B", "flat", 100)
    chosen = {(c["model"], c["gbit_s"]): c["codec"] for c in document["chosen"]}
    for model in ("8B", "70B"):
        assert chosen[model, 0.1] == "context"
        assert chosen[model, 100] == "flat"
        cross = next(
            c for c in document["crossovers"] if (c["model"], c["small"], c["quick"]) == (model, "context", "flat")
        )
        for rate in GBIT_S:
            assert (chosen[model, rate] == "context") == (rate < cross["overlapped_gbit_s"])


def test_sequential_format_takes_the_sum_of_its_stages():
    document = end_to_end([*OURS, RIVAL], encode_cores=1, decode_cores=1)
    assert seconds(document, "8B", "rival", 1) == pytest.approx(8 + 8 + 16 * 8 / 50, rel=1e-3)
    assert seconds(document, "70B", "rival", 1) == pytest.approx(70 + 70 + 140 * 8 / 50, rel=1e-3)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_format_is_measured(width):
    rng = np.random.default_rng(0)
    dtype = {1: "U8", 2: "BF16", 4: "F32"}[width]
    layout = Layout([Tensor("w", dtype, (64, 1000)), Tensor("none", dtype, (0,))])
    old = {"w": rng.integers(0, 1 << 14, 64_000).astype(f"<u{width}"), "none": np.empty(0, f"<u{width}")}
    new = {"w": old["w"] + (rng.random(64_000) < 0.02).astype(old["w"].dtype), "none": old["none"]}
    compared = measure_formats(Dataset("random", layout, [old, new]), working_set_bytes=1 << 18, repeats=1)
    rows = {row["format"]: row for row in compared.document["rows"]}
    assert set(rows) == {"context", "flat", "dense", "raw", "pulse", "sparrowrl", "xor_zstd", "int32_bf16"}
    assert rows["pulse"]["ratio_to_pulse"] == 1
    assert rows["raw"]["times_smaller"] == 1
    assert rows["flat"]["times_smaller"] > rows["sparrowrl"]["times_smaller"] > rows["int32_bf16"]["times_smaller"]
    assert compared.document["changed_share"] == pytest.approx(0.02, rel=0.1)
    assert all(f.cost.encode_bytes_s > 0 and f.cost.decode_bytes_s > 0 for f in compared.formats)
