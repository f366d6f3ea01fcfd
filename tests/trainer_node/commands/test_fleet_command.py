"""``p2pcast fleet plan``: its table, document, plot and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2pcast.cli import cli
from p2pcast.ground.errors import EXIT_FAILED, EXIT_USAGE, UsageError
from p2pcast.sparse.budget_schedule import BudgetSchedule

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


FIGURES = ("--prompt-tokens", "200", "--samples", "8", "--intensity", "412")
LENGTHS = ("--answer-tokens", "4000", "--answer-tokens", "16000")


@pytest.fixture
def schedule(tmp_path: Path) -> tuple[str, str]:
    file = tmp_path / "sparse_attention.json"
    file.write_bytes(BudgetSchedule((29, 45, 61, 77, 93, 125, 157, 221, 253)).to_bytes())
    return ("--sparse", str(file))


def test_sparse_attention_needs_fewer_workers(tmp_path: Path, schedule: tuple[str, str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    dense = json.loads(plan(*PAPER, *GPU, "--json").output)
    words = (*PAPER, *GPU, *schedule, *FIGURES, *LENGTHS)
    sparse = json.loads(plan(*words, "--model", str(folder), "--json").output)
    found = sparse.pop("sparse")
    assert found["dense_workers"] == dense["fleet"]["rtx5090"] == 9
    assert sparse["fleet"] == {"rtx5090": 3}
    assert sparse["growth"][0]["rollouts_per_s"] == pytest.approx(found["speed_up"] * 0.2805)
    assert sparse["target_rollouts_per_s"] == dense["target_rollouts_per_s"]
    assert sparse.keys() == dense.keys()
    assert [row["answer_tokens"] for row in found["by_length"]] == [4000, 16000]
    short, long = (row["speed_up"] for row in found["by_length"])
    assert 1 < short < found["speed_up"] < long
    stated = json.loads(plan(*words, "--model", "4.02e9:36:1024:4", "--json").output)["sparse"]
    assert stated["speed_up"] == pytest.approx(found["speed_up"], rel=1e-3)
    text = plan(*words, "--model", str(folder)).output
    assert f"{found['speed_up']:.3g} times as fast" in text
    assert "3 workers with it, 9 without it" in text


def test_a_fleet_that_only_sparse_attention_makes_large_enough(schedule: tuple[str, str]) -> None:
    words = (*PAPER, "--price", "rtx5090=0.35:0.2805:4", *schedule, *FIGURES, *LENGTHS, "--model", "4.02e9:36:1024:4")
    done = plan(*words)
    assert done.exit_code == 0
    assert "3 workers with it, all 4 on offer are too few without it" in done.output


@pytest.mark.parametrize(
    "word", ["--sparse", "--model", "--prompt-tokens", "--answer-tokens", "--samples", "--intensity"]
)
def test_the_figures_of_sparse_attention_go_together(schedule: tuple[str, str], word: str) -> None:
    given = {
        "--sparse": schedule[1], "--model": "4.02e9:36:1024:4", "--prompt-tokens": "0", "--answer-tokens": "100",
        "--samples": "8", "--intensity": "412",
    }  # fmt: skip
    assert plan(*PAPER, *GPU, *(each for pair in given.items() for each in pair)).exit_code == 0
    alone = plan(*PAPER, *GPU, word, given.pop(word))
    rest = plan(*PAPER, *GPU, *(each for pair in given.items() for each in pair))
    for done in (alone, rest):
        assert done.exit_code == EXIT_USAGE
        assert "go together" in done.output


@pytest.mark.parametrize(
    ("file", "contents", "said"),
    [
        ("model/config.json", '{"num_experts": 8}', "PARAMETERS:LAYERS:WIDTH:QUERIES"),
        ("model/config.json", "{", "no JSON document"),
        ("model/other.json", "{}", "No such file"),
        ("sparse_attention.json", '{"values": []}', "page_tokens"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, schedule: tuple[str, str], file: str, contents: str, said: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / file).write_text(contents)
    done = plan(*PAPER, *GPU, *schedule, *FIGURES, *LENGTHS, "--model", str(tmp_path / "model"))
    assert done.exit_code == EXIT_USAGE
    assert said in " ".join(done.output.split())
