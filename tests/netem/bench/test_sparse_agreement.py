"""Agreement of an engine with the learner's sparse attention; a transformers model decodes in place of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from examples.research.sparse_sampler import sparse_answers
from netem.bench import sparse_speed
from netem.bench.commands.engine_commands import sparse
from netem.bench.sparse_agreement import ScoredAnswer, agreement
from p2pcast.sparse.budget_schedule import BudgetSchedule
from tests.trainer_node.learning.distillation.sparse_rows import ALONE, PAGE, SCHEDULE, deep_folder, sparse_row
from trainer_node.learning.learner_model import LearnerModel

PROMPTS = [sparse_row(seed, 30, 1).token_ids[:30].tolist() for seed in (1, 2)]
WIDER = BudgetSchedule((3,), PAGE, 1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deep_folder(tmp_path_factory.mktemp("deep") / "model")


def said(folder: Path, schedule: BudgetSchedule | None) -> Sequence[ScoredAnswer]:
    module = LearnerModel(folder, ALONE).module
    found = sparse_answers(module, PROMPTS, 20, schedule, PAGE, torch.Generator().manual_seed(1))
    logprobs = found.logprobs.gather(2, found.token_ids[..., None])[..., 0]
    return [ScoredAnswer(*one) for one in zip(found.token_ids.tolist(), logprobs.tolist(), strict=True)]


def test_an_engine_with_the_learner_s_pages_agrees(folder: Path) -> None:
    found = agreement(folder, PROMPTS, said(folder, None), said(folder, SCHEDULE), SCHEDULE, PAGE)
    assert found["agrees"]
    assert max(found["dense_gap"], found["sparse_gap"]) < 1e-4
    assert found["effect"] > 0.05
    assert (found["shortened"], found["tokens"]) == (38, 40)  # not the first token of an answer


@pytest.mark.parametrize("schedule", [None, WIDER], ids=["dense", "another budget"])
def test_an_engine_with_other_pages_disagrees(folder: Path, schedule: BudgetSchedule | None) -> None:
    found = agreement(folder, PROMPTS, said(folder, None), said(folder, schedule), SCHEDULE, PAGE)
    assert not found["agrees"]


@pytest.mark.parametrize(("exact", "agrees"), [(True, True), (False, True), (True, False)])
def test_the_bench_fails_unless_both_comparisons_hold(
    monkeypatch: pytest.MonkeyPatch, exact: bool, agrees: bool
) -> None:
    gaps: dict[str, Any] = dict.fromkeys(("dense_gap", "sparse_gap", "effect"), 0.1)
    compared = {**gaps, "shortened": 3, "tokens": 4, "exact": exact, "agrees": agrees}
    row = {"length": 64, "dense": 1.0, "sparse": 2.0, "ratio": 2.0}
    monkeypatch.setattr(sparse_speed, "bench_sparse", lambda options: {"agreement": compared, "rows": [row]})
    found = CliRunner().invoke(sparse, [])
    assert found.exit_code == (0 if exact and agrees else 1)
    assert ("DIFFERS" in found.output, "DISAGREES" in found.output) == (not exact, not agrees)
