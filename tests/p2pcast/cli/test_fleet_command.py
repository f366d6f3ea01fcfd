"""``p2pcast fleet plan``: its table, document, plot and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2pcast.cli import cli
from p2pcast.errors import EXIT_FAILED, EXIT_USAGE, UsageError

PAPER = ("--t-train", "1631.2", "--t-bcast", "1437", "--rollouts", "2048", "--learner-price", "12.24")
GPU = ("--price", "rtx5090=0.35:0.2805:12")


def plan(*words: str):
    return CliRunner().invoke(cli, ["fleet", "plan", *words])


def test_the_table_names_fleet_cost_and_bubble():
    done = plan(*PAPER, *GPU, "--price", "old=1:0.1")
    assert done.exit_code == 0, done.output
    assert [cell.strip() for cell in done.output.splitlines()[3].split("│")[1:4]] == ["rtx5090", "12", "9"]
    assert "2.244 rollouts/s at least" in done.output
    assert "6.973 USD a step" in done.output
    assert "waits 0.0% of the time" in done.output


def test_the_document_holds_the_growth_of_the_fleet(tmp_path: Path):
    file = tmp_path / "plan.json"
    done = plan(*PAPER, *GPU, "--json", "-o", str(file))
    document = json.loads(done.output)
    assert document == json.loads(file.read_text())
    assert document["fleet"] == {"rtx5090": 9}
    assert [each["workers"] for each in document["growth"]] == list(range(1, 13))
    assert document["publish_every"] == 2


def test_too_few_workers_fail_with_their_prospect():
    done = plan(*PAPER, "--price", "rtx5090=0.35:0.2805:3")
    assert done.exit_code == EXIT_FAILED
    assert "all 3 workers on offer are too few" in done.output


def test_a_plot_is_written(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="pip install 'p2pcast[lab]'")
    file = tmp_path / "plan.png"
    assert plan(*PAPER, *GPU, "--plot", str(file)).exit_code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "words",
    [
        ("--rollouts", "8", *GPU),
        ("--t-train", "5", "--rollouts", "8"),
        ("--t-train", "0", "--rollouts", "8", *GPU),
        (*PAPER, "--price", "rtx5090"),
        (*PAPER, "--price", "rtx5090=1:0"),
        (*PAPER, "--price", "rtx5090=1e999:1"),
        (*PAPER, "--price", "rtx5090=1.2.3:1"),
    ],
)
def test_wrong_words_are_refused(words: tuple[str, ...]):
    assert plan(*words).exit_code == EXIT_USAGE


def test_a_broadcast_that_outlasts_the_period_is_explained():
    done = plan("--t-train", "10", "--t-bcast", "50", "--rollouts", "8", *GPU)
    assert isinstance(done.exception, UsageError)
    assert "a broadcast takes 50 s" in str(done.exception)
