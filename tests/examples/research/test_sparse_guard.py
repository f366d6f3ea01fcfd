"""Runs with sparse attention as users start them, with further words for engine, worker and learner.

The proof is a run of `p2pcast learn` with table [distill]: versions of policy and adapter reach a vLLM server, whose
rollouts come from both.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.research.sparse_guard import GuardRunOptions, sparse_run
from netem.emulation.description import HUB
from netem.fleet.participants import FIRST_PEER
from netem.fleet.processes import Processes
from netem.fleet.rl_participants import ENGINE
from netem.fleet.rollout_processes import LEDGER
from netem.fleet.small_model import SmallModel, write_small_model
from netem.fleet.wait import unwrapped
from netem.fleet.workspace import Workspace
from netem.rl_demo.rl_verdict import RunLines, check_once, check_requests, check_staleness, exported_steps
from netem.rollouts import graded_answers
from p2pcast.rollouts.result import Result
from p2pcast.sparse.budget_schedule import FILE
from tests.trainer_node.ledger.ledger_invariants import check_rows, dump
from trainer_node.learning.distillation.rollout_adapter import NAME, RolloutAdapter
from trainer_node.learning.distillation.sparse_distillation import DistillOptions, SparseDistillation
from trainer_node.learning.distillation.sparse_forward import PLAN
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.micro_batches import MicroBatch, micro_batches
from trainer_node.learning.objective.policy_loss import LossOptions
from trainer_node.learning.objective.training_rows import NOT_SAMPLED, TrainingRow
from trainer_node.learning.trained_weights import OptimizerOptions
from trainer_node.learning.trainer_ranks import TrainerRanks
from trainer_node.ledger.database.body_segments import Place
from trainer_node.ledger.database.ledger_store import LedgerStore

sys.path.append(str(Path(__file__).parents[2] / "rollout_node" / "vllm"))

from peft_folders import config, matrices, save

pytestmark = pytest.mark.vllm

STEPS, TOKENS, PAGE, RANK, ALPHA = 4, 200, 32, 8, 16
"""Learner steps; tokens of an answer, of which those after the 128th keep four pages of the cache; LoRA's numbers."""
WORKER = "w1"


@pytest.fixture
def options(tmp_path: Path) -> GuardRunOptions:
    form = SmallModel(graded_answers.VOCABULARY, layers=3, positions=512)
    model = write_small_model(tmp_path / "model", form, seed=1)
    return GuardRunOptions(
        folder=tmp_path / "run",
        model=model,
        task=f"{graded_answers.NAME},tokens={TOKENS}",
        longest=graded_answers.PROMPT_TOKENS + TOKENS + 1,
        block_size=PAGE,
        steps=STEPS,
        groups=2,
        group_size=4,
        lr=1e-4,
        staleness=0,
    )


def distilling(options: GuardRunOptions, first: Path) -> GuardRunOptions:
    """``first``: the adapter with which the server starts."""
    return replace(
        options,
        engine_words=(
            "--dtype", "float32", "--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"{NAME}={first}",
        ),
        worker_words=("--adapter", NAME),
        learner_settings=(
            f"distill.rank={RANK}", f"distill.alpha={ALPHA}", f"distill.page-tokens={PAGE}", "distill.lr=0.02",
            "distill.kl-weight=1", "probe.prompts=4", "export.every=1",
        ),
    )  # fmt: skip


def results_of(folder: Path) -> list[Result]:
    """All accepted results of a ledger that has ended, whose rows are consistent."""
    store = LedgerStore(folder)
    try:
        rows = dump(store)
        check_rows(rows)
        accepted = [row for row in rows["results"] if row.verdict == "accepted"]
        return [Result.from_bytes(store.segments.read(Place(row.segment, row.offset, row.length))) for row in accepted]
    finally:
        store.close()


def row_of(result: Result) -> TrainingRow:
    sampled = result.mask.astype(bool)
    step = result.spans[0].version.step
    return TrainingRow(
        token_ids=result.token_ids.astype(np.int64),
        learnt=sampled,
        logprobs=result.logprobs,
        advantages=np.zeros(len(sampled), np.float32),
        temperature=result.temperature,
        versions=np.where(sampled, step, NOT_SAMPLED),
        group=0,
        reward=0.0,
        truncated=False,
        sparse=sampled,
    )


def largest_differences(
    options: GuardRunOptions, policy: Path, phi: Mapping[str, torch.Tensor], result: Result
) -> dict[str, float]:
    """Of the rollout's log-probabilities from the learner's: with sparse attention and phi, and without either."""
    model = LearnerModel(policy, TrainerRanks(0, 1, torch.device("cpu")), compute="float32")
    adapter = RolloutAdapter(model, rank=RANK, alpha=ALPHA, options=OptimizerOptions())
    with torch.no_grad():
        for (name, _), parameter in zip(adapter.published(), adapter.parameters.values(), strict=True):
            parameter.copy_(phi[name])
    (batch,) = micro_batches([[(0, row_of(result))]], 0, 1 << 12, "padded")
    sampling = SparseDistillation(
        model, adapter, DistillOptions(LossOptions(), 1 << 12, page_tokens=PAGE), lambda version: options.schedule
    )
    with torch.no_grad():
        with sampling.rolling_out(batch) as plan:
            assert plan.places.numel(), "positions with fewer pages than there are"
            found = {"both": model.scores(batch, to_attention={PLAN: plan}).logprobs}
        with adapter.applied():
            found["phi"] = model.logprobs(batch)
        found["sparse"] = sparse_without(sampling, model, adapter, batch)
    return {name: float((one - batch.sampler_logprobs)[batch.learnt].abs().max()) for name, one in found.items()}


def sparse_without(
    sampling: SparseDistillation, model: LearnerModel, adapter: RolloutAdapter, batch: MicroBatch
) -> torch.Tensor:
    """Log-probabilities by sparse attention and without phi, whose matrices B become 0."""
    for name, parameter in adapter.parameters.items():
        if ".lora_B." in name:
            parameter.zero_()
    with sampling.rolling_out(batch) as plan:
        return model.scores(batch, to_attention={PLAN: plan}).logprobs


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_a_run_that_distils_plays_each_version_of_policy_and_adapter(options: GuardRunOptions, tmp_path: Path) -> None:
    first = save(tmp_path / "first", matrices(options.model, rank=RANK, dtype=torch.float32), config(rank=RANK))
    chosen = distilling(options, first)
    with Workspace(chosen.folder) as work, Processes(work.logs) as processes:
        assert asyncio.run(unwrapped(sparse_run(chosen, 0.0, work, processes))) is None
        codes = {name: processes.children[name].process.returncode for name in (WORKER, FIRST_PEER, LEDGER, HUB)}
        assert set(codes.values()) == {0}, codes
    events = [json.loads(line) for line in (work.root / "run" / "metrics.jsonl").read_text().splitlines()]
    check_log(events)
    lines, database = RunLines.read(work.root / "run" / "metrics.jsonl"), work.state(LEDGER) / "ledger.db"
    for check in (
        check_once(lines, database, STEPS),
        check_staleness(lines.steps, database, chosen.run.staleness),
        check_requests(work.logs / f"{ENGINE}.log", [work.logs / f"{WORKER}.log"]),
    ):
        assert check.ok, check

    policies = {0: options.model} | exported_steps(work.trained)
    assert sorted(policies) == list(range(STEPS + 1))
    folders = {step: work.installed(FIRST_PEER) / f"step_{step}" for step in policies}
    adapters = {step: check_version(folders[step], policy) for step, policy in policies.items()}
    for step, phi in adapters.items():
        assert all(matrix.any() for matrix in phi.values()) == (step > 0), "matrices B begin with 0, and learn"

    results = results_of(work.state(LEDGER))
    assert len(results) == STEPS * options.groups * options.group_size
    name = blake3.blake3(options.schedule.to_bytes()).digest()
    by_step = {}
    for result in results:
        (span,) = result.spans
        assert dict(result.schedules or ()) == {span.version: name}
        by_step[span.version.step] = result
    assert sorted(by_step) == list(range(STEPS))
    for step in range(1, STEPS):
        found = largest_differences(options, policies[step], adapters[step], by_step[step])
        print(step, found)
        assert found["both"] < 1e-3
        assert found["phi"] > 1e-2
        assert found["sparse"] > 1e-2


def check_log(events: list[dict[str, Any]]) -> None:
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    for event in steps:
        assert event["kl_distill"] > 0
        assert 0 < event["acceptance_distill"] < 1
        assert event["distill_shortened"] > 0
        assert event["distill_grad_norm"] > 0
        assert event["kl_distill_sampler"] is not None
        assert event["judged_tokens"] > 0
    probes = [event for event in events if event["event"] == "probe"]
    assert probes
    assert not any(event.get("alarm") for event in probes)
    (end,) = (event for event in events if event["event"] == "end")
    assert end["step"] == STEPS


def check_version(folder: Path, policy: Path) -> dict[str, torch.Tensor]:
    """A version's folder has the policy's words bit for bit, and the adapter beside them. Returns the adapter."""
    found, theta = load_file(folder / "model.safetensors"), load_file(policy / "model.safetensors")
    phi = {name: found.pop(name) for name in list(found) if name.startswith(f"{NAME}/")}
    assert found.keys() == theta.keys()
    for name, tensor in theta.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), f"{folder}: {name}"
    assert (folder / FILE).is_file()
    assert json.loads((folder / NAME / "adapter_config.json").read_text())["r"] == RANK
    assert phi
    return phi
