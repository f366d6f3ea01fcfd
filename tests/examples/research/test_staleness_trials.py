"""Trials of staleness: the interval by hand, and the whole command on known rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from examples.research import staleness_trials
from examples.research.learning_trial import Answer, Trial
from examples.research.staleness_trials import LAST, difference
from netem.fleet.rl_participants import RlOptions


def test_interval_of_the_mean_difference_is_students() -> None:
    found = difference(3, [(0.5, 0.5), (0.5, 0.6), (0.5, 0.7)])
    # sd 0.1, three pairs: the 95 % quantile of Student's t with two degrees of freedom is 2.920.
    half = 2.920 * 0.1 / 3**0.5
    assert found.mean == pytest.approx(0.1)
    assert (found.low, found.high) == (pytest.approx(0.1 - half, abs=1e-4), pytest.approx(0.1 + half, abs=1e-4))


def test_lags_are_compared_in_pairs_of_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def known_trial(folder: Path, options: RlOptions, seed: int, *, lag: int, live: bool) -> Trial:
        return Trial(
            tuple([0.0] * (options.steps - LAST) + [0.1 * seed + 0.01 * lag] * LAST), (Answer(0.0),), (Answer(0.5),)
        )

    monkeypatch.setattr(staleness_trials, "trial", known_trial)
    files = ["--plot", str(tmp_path / "plot.png"), "--output", str(tmp_path / "rows.json")]
    lags = ["--lag", "0", "--lag", "2"]
    done = CliRunner().invoke(staleness_trials.main, ["--seeds", "3", "--steps", "40", *lags, *files])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "lag 2 less lag 0: +0.0200, 90% interval +0.0200 to +0.0200"
    rows = json.loads((tmp_path / "rows.json").read_text())["trials"]
    assert [(row["lag"], row["seed"], len(row["rewards"])) for row in rows] == [
        (lag, seed, 40) for lag in (0, 2) for seed in (1, 2, 3)
    ]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
