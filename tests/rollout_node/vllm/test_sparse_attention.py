"""Sparse attention in real vLLM engines (CPU build), beside vLLM's own backend and an independent reference."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from real_server import ENVIRONMENT

from p2pcast.sparse.budget_schedule import BudgetSchedule

pytestmark = pytest.mark.vllm

VOCABULARY, LAYERS, PAGE = 500, 6, 32
OPTIONS = {"dtype": "float32", "block_size": PAGE, "max_model_len": 1024, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of random weights, whose attention spreads over the whole text."""
    folder = tmp_path_factory.mktemp("sparse") / "model"
    script = f"""
from pathlib import Path
from netem.fleet.small_model import SmallModel, write_small_model
write_small_model(Path({str(folder)!r}), SmallModel({VOCABULARY}, layers={LAYERS}, positions=2048), seed=1)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=900, capture_output=True)
    return folder


def answers(model: Path, rounds: list[Any], *, sparse: bool = True, adapter: Path | None = None, **options: Any) -> Any:
    asked = {"model": str(model), "sparse": sparse, "options": OPTIONS | options, "rounds": rounds}
    asked["adapter"] = None if adapter is None else str(adapter)
    script = Path(__file__).with_name("sparse_engine.py")
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(asked),
        env=environment,
        text=True,
        capture_output=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def text(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(tokens)]


def test_tokens_attend_to_the_pages_of_the_reference(model: Path) -> None:
    """A batch of a long text, a shorter one and one within the budget; the log-probabilities are the reference's."""
    from sparse_reference import Reference

    rng = random.Random(5)
    requests = [[text(rng, length), 24] for length in (700, 300, 60)]
    # 128 tokens: 4 pages of 32.
    rounds = [{"schedule": schedule, "requests": requests} for schedule in ([5], None, [1000])]
    found, dense_round, full = answers(model, rounds)["rounds"]
    assert full == dense_round != found
    sparse, dense = Reference(model, PAGE, 4), Reference(model, PAGE, None)
    for number, ((prompt, _), (tokens, logprobs)) in enumerate(zip(requests, found, strict=True)):
        assert logprobs == pytest.approx(sparse.logprobs(prompt, tokens), abs=1e-3)
        other = dense.logprobs(prompt, tokens)
        if number < 2:
            assert max(abs(a - b) for a, b in zip(logprobs, other, strict=True)) > 0.05
        else:
            assert logprobs == pytest.approx(other, abs=1e-3)
    assert sparse.dropped > 1000


def mixed(rng: random.Random, count: int) -> list[Any]:
    """Requests of many lengths, of which some begin alike."""
    shared = text(rng, 400)
    return [
        [(shared[: rng.randrange(32, 400)] if rng.random() < 0.4 else []) + text(rng, rng.randrange(1, 500)), tokens]
        for tokens in (rng.choice((1, 8, 30, 60)) for _ in range(count))
    ]


@pytest.mark.prove
@pytest.mark.parametrize("count", [30, 1000])
def test_full_budget_equals_the_dense_backend_bit_for_bit(model: Path, count: int) -> None:
    """With prefix caching, chunks of prompts, and preemption for lack of pages."""
    rounds = [{"schedule": schedule, "requests": mixed(random.Random(7), count)} for schedule in (None, [1000])]
    small = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 256, "enable_prefix_caching": True}
    ours, theirs = (answers(model, rounds, sparse=sparse, **small) for sparse in (True, False))
    assert ours["rounds"] == theirs["rounds"]
    assert ours["metrics"]["vllm:num_preemptions"] > 0
    assert ours["metrics"]["vllm:prefix_cache_hits"] > 0


@pytest.mark.prove
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
            "speculative decoding",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "a KV connector",
        ),
    ],
)
def test_servers_whose_cache_others_write_are_refused(model: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(AssertionError, match=f"sparse attention does not work with {named}"):
        answers(model, [], **options)


@pytest.mark.prove  # tests/p2pcast/sparse/test_budget_calibration.py is the sample
def test_calibration_finds_the_budget_that_is_nearly_dense(model: Path, tmp_path: Path) -> None:
    """Of whole distributions, since all tokens are candidates."""
    rng = random.Random(11)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": text(rng, 200)}) + "\n" for _ in range(8)))
    schedule = tmp_path / "sparse_attention.json"
    command = [sys.executable, "-m", "p2pcast.cli", "sparse", "calibrate", str(model), "--prompts", str(prompts)]
    command += ["--schedule", str(schedule), "--tokens", "240", "--bin-tokens", "300", "--candidates", str(VOCABULARY)]
    command += ["--budget", "1", "--budget", "1000", "--block-size", str(PAGE), "--target", "0.97", "--json"]
    command += ["--plot", str(tmp_path / "plot.png")]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, text=True, capture_output=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    rates = {(row["pages"], row["number"]): row["percentile"] for row in found["rows"]}
    # 11 and more pages of 32, of which the small budget keeps 4.
    assert rates[1, 1] < 0.97 < rates[1000, 1]
    assert 0 < found["tails"]["1"]["ks"] < 1
    assert found["means"]["1"] < found["means"]["1000"]
    assert BudgetSchedule.from_bytes(schedule.read_bytes()).values[1] == 1000
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def lookback(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The trained model that looks far back, and what the bench found."""
    folder = tmp_path_factory.mktemp("lookback") / "model"
    command = [sys.executable, "-m", "p2pcast.cli", "bench", "lookback", "--folder", str(folder), "--length", "2048"]
    command += ["--samples", "8", "--budget", "1", "--budget", "125", "--block-size", str(PAGE), "--json"]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, text=True, capture_output=True, timeout=5400)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads(done.stdout)


@pytest.mark.prove
def test_a_small_budget_lowers_the_acceptance_rate_of_far_look_backs(lookback: tuple[Path, Any]) -> None:
    """Answers begin at position 2048, in a bin of 512."""
    _, found = lookback
    rates = {row["pages"]: row["percentile"] for row in found["rows"] if row["number"] == 4}
    assert rates[1] < 0.75
    assert rates[125] > 0.86


@pytest.mark.prove
def test_pages_of_a_trained_model_are_dropped_in_later_layers(lookback: tuple[Path, Any]) -> None:
    """The reference drops pages in layers 2 and later alone."""
    from sparse_reference import Reference

    from p2pcast.tasks.trial_tasks.recite import Recite

    folder, _ = lookback
    task = Recite(1000)
    prompt = task.drawn(next(task.jobs(5)).prompt).prompt.tolist()
    ((tokens, logprobs),) = answers(folder, [{"schedule": [5], "requests": [[prompt, 16]]}])["rounds"][0]
    sparse, dense = Reference(folder, PAGE, 4), Reference(folder, PAGE, None)
    assert logprobs == pytest.approx(sparse.logprobs(prompt, tokens), abs=1e-3)
    assert max(abs(a - b) for a, b in zip(logprobs, dense.logprobs(prompt, tokens), strict=True)) > 0.05
    # 32 pages, of which 4 are kept, in 4 layers.
    assert sparse.dropped > 16 * 4 * 20
