"""Payloads of several formats over one link: parameters are checked before anything is made, sizes come from the
bench's own encodings, and figures come from a real link.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from netem.bench.codec_comparison import comparison
from netem.emulation import calibration
from netem.lab.experiments import transfer
from netem.lab.experiments.transfer import FORMATS, Parameters, Payloads, measured
from netem.lab.scenario import cases
from netem.lab.scenario_run import load
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import UsageError
from p2pcast.transport.stripe_count import NetworkPath

SIZES = dict(zip(FORMATS, (1_000_000, 300_001, 200_000, 50_000), strict=True))
WORDS = 100_000
LINK: dict[str, Any] = {"hosts": [{"name": "parent"}, {"name": "child", "rate": "80mbit"}]}


@pytest.fixture(autouse=True)
def made_up_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        transfer, "measured", lambda rate, steps: Payloads({n: steps * s for n, s in SIZES.items()}, 0.01)
    )


def argument(**parameters: object) -> dict[str, Any]:
    return {"network": LINK, "events": [], "parameters": {"sends": ["dense"], **parameters}}


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
    found = measured(0.123, 2)
    sizes = [found.sizes[name] for name in FORMATS]
    assert sizes == sorted(sizes, reverse=True)
    assert found.sizes["dense"] == 2 * 2 * WORDS
    assert found.sizes["naive"] == 6 * round(found.changed_share * 2 * WORDS)
    assert found.changed_share == pytest.approx(0.01, rel=0.1)


def test_sizes_and_the_papers_rate_are_put_in() -> None:
    given = argument(steps=2, gbps=2.5, rate_scale=50)
    ready = transfer.prepared(given)
    assert ready["parameters"]["sizes"] == [2 * SIZES[name] for name in FORMATS]
    assert ready["network"]["hosts"][1]["rate"] == "50000000bit"
    assert given["network"] is LINK
    assert LINK["hosts"][1]["rate"] == "80mbit"


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"sends": ["zip"]}, "'zip' is not a format"),
        ({"sends": ["ours 4"]}, "write 'FORMAT' or 'FORMAT STRIPES CONGESTION'"),
        ({"sends": ["ours 0 cubic"]}, "write 'FORMAT'"),
        ({"sends": ["ours 4 warp"]}, "congestion control 'warp'"),
        ({"rounds": 0}, "rounds"),
        ({"learning_rate": 1.5}, "learning_rate"),
        ({"speed": 1}, "parameters.speed"),
    ],
)
def test_invalid_parameters_are_reported_before_any_work(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        transfer.prepared(argument(**parameters))


def test_prediction_under_loss_uses_the_allowed_window() -> None:
    lossy = NetworkPath(0.1, 80e6, "cubic", 4e6, 0.01)
    one, four = (transfer._predicted_s(1_000_000, n, "cubic", lossy, 0.95) for n in (1, 4))
    assert one > 2 * four
    assert transfer._predicted_s(1_000_000, 1, "bbr", lossy, 0.95) < four


def test_rows_at_the_papers_scale_are_marked() -> None:
    given = Parameters(("dense 1 reno", "dense", "ours"), gbps=1.0, paper_dense_gb=10.0)
    rows = list(transfer._at_paper_scale(given, SIZES, 0.5))
    assert [(row["payload"], row["bytes"], row["simulated"]) for row in rows] == [
        ("dense", 10_000_000_000, True),
        ("ours", 500_000_000, True),
    ]
    assert rows[0]["seconds"] == pytest.approx(80 / 0.5, rel=0.01)


@pytest.mark.root
def test_payloads_travel_over_a_real_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this kernel, with rates alone; another test checks that the path is as requested."""
    monkeypatch.setattr(calibration, "measure", lambda *_: [])
    given = argument(sends=["dense 1 reno", "ours"], rounds=1)
    calibrated, *said = transfer.results(transfer.prepared(given))
    assert calibrated["off"] == []
    rows = [each["row"] for each in said]
    assert [(row["send"], row["bytes"], row["whole"]) for row in rows] == [
        ("dense 1 reno", SIZES["dense"], True),
        ("ours", SIZES["ours"], True),
    ]
    assert (rows[0]["stripes"], rows[0]["congestion"], rows[0]["to_first"]) == (1, "reno", 1.0)
    assert rows[1]["stripes"] >= 4
    # No link is faster than its rate.
    assert rows[0]["seconds"] > 0.95 * rows[0]["predicted_s"]


def test_scenarios_have_valid_parameters() -> None:
    for name in ("sparrowrl-bandwidth", "sparrowrl-steps"):
        for case in cases(load(name)):
            transfer.prepared(case.argument)
    assert FORMATS == ("dense", "naive", "sparrowrl", "ours")
