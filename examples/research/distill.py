"""The tail of acceptance rates before and after the adapter of rollouts was trained, at equal budgets and seeds:
``python -m examples.research.distill MODEL``.

Answers are sampled in this process, by sparse attention with the adapter; rates are those of whole distributions, and
of prompts that the adapter never saw. The first token of an answer is left out: its prompt's pass, which is dense,
gives it.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from rich.table import Table

from examples.research.sparse_sampler import Answers, sparse_answers
from p2pcast.cli import exit_code
from p2pcast.cli.options import PATH, console, documented, written
from p2pcast.ground.errors import UsageError
from p2pcast.inspection.png_figure import blank, require_matplotlib, save
from p2pcast.sparse.acceptance_rate import LEAST_TOKENS, PERCENTILE
from p2pcast.sparse.budget_schedule import BudgetSchedule
from p2pcast.tasks.trial_tasks.recite import Recite
from rollout_node.sparse_calibration.model_calibration import prompts_of_file
from trainer_node.learning.distillation.rollout_adapter import RolloutAdapter
from trainer_node.learning.distillation.sparse_distillation import DistillOptions, DistillReport, SparseDistillation
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.objective.policy_loss import LossOptions
from trainer_node.learning.objective.training_rows import TrainingRow
from trainer_node.learning.trained_weights import OptimizerOptions
from trainer_node.learning.trainer_ranks import TrainerRanks

logger = logging.getLogger("p2pcast.bench")

SEED: Final = 4242
"""Of prompts of task recite: unlike those of the model's training."""
DRAWN: Final = 4000
"""Prompts of task recite to train on."""
AT_ONCE: Final = 16
"""Prompts of one pass of the sampler."""
LOG_EVERY: Final = 10
MOST_TOKENS: Final = 4096
"""Of a micro-batch."""
KEYS: Final = ("percentile", "mean", "kl")
"""Of each row, before and after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailOptions:
    """``prompts``: token ids, all of one length; the last ``held_out`` of them are measured, and the adapter is trained
    on the others. ``tokens``: of an answer. ``pages``: budget of the training, in pages of 16 tokens besides the
    reserved ones; it is measured, and so are ``budgets``. ``page_tokens``: of the cache. ``steps``: updates of the
    adapter. ``batch``: answers of each. ``rank``, ``alpha``, ``lr``: of the adapter.
    """

    model: Path
    prompts: Sequence[list[int]]
    held_out: int
    tokens: int
    pages: int
    budgets: Sequence[int]
    page_tokens: int
    steps: int
    batch: int
    rank: int
    alpha: float
    lr: float
    seed: int


def bench_distill(options: TailOptions) -> dict[str, Any]:
    """``rows`` by budget: pages, tokens, and ``percentile``, ``mean`` and ``kl`` (sparse from dense, in nats) before
    and after; the log of ``steps``. Raises UsageError for prompts that do not fit.
    """
    prompts = options.prompts
    if options.held_out * (options.tokens - 1) < LEAST_TOKENS or len(prompts) <= options.held_out:
        raise UsageError(f"a percentile needs {LEAST_TOKENS} tokens of held-out prompts, and others are trained on")
    trained, held = prompts[: -options.held_out], prompts[-options.held_out :]
    model = LearnerModel(options.model, TrainerRanks(0, 1, torch.device("cpu")), compute="float32")
    adapter = RolloutAdapter(
        model, rank=options.rank, alpha=options.alpha, options=OptimizerOptions(options.lr), seed=options.seed
    )
    schedule = BudgetSchedule((options.pages,))
    distillation = SparseDistillation(
        model,
        adapter,
        DistillOptions(
            LossOptions(), MOST_TOKENS, "padded", kl_weight=1.0, ppo_weight=0.0, page_tokens=options.page_tokens
        ),
        lambda version: schedule,
    )
    budgets = sorted({options.pages, *options.budgets})
    before = {pages: _rates(model, adapter, held, pages, options) for pages in budgets}
    steps = _train(distillation, model, trained, schedule, options)
    after = {pages: _rates(model, adapter, held, pages, options) for pages in budgets}
    rows = [
        {"pages": pages, "tokens": before[pages]["tokens"]}
        | {f"{key}_{name}": found[pages][key] for name, found in (("before", before), ("after", after)) for key in KEYS}
        for pages in budgets
    ]
    return {"parameters": sum(p.numel() for p in adapter.parameters.values()), "rows": rows, "steps": steps}


def _train(
    distillation: SparseDistillation,
    model: LearnerModel,
    prompts: Sequence[list[int]],
    schedule: BudgetSchedule,
    options: TailOptions,
) -> list[dict[str, Any]]:
    rng, log = random.Random(options.seed), []
    for step in range(options.steps):
        chosen = rng.sample(prompts, options.batch)
        with distillation.adapter.applied():
            answers = _answers(model, chosen, schedule, options, options.seed + step + 1)
        report: DistillReport = distillation.train(_rows(chosen, answers), step, lambda: None)
        log.append(report.document())
        if step % LOG_EVERY == 0 or step == options.steps - 1:
            logger.info("step %d: KL %.4f, mean acceptance %.4f", step + 1, report.kl, report.acceptance)
    return log


def _answers(
    model: LearnerModel, prompts: Sequence[list[int]], schedule: BudgetSchedule, options: TailOptions, seed: int
) -> Answers:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        sparse_answers(
            model.module, prompts[at : at + AT_ONCE], options.tokens, schedule, options.page_tokens, generator
        )
        for at in range(0, len(prompts), AT_ONCE)
    ]
    return Answers(*(torch.cat(one) for one in zip(*parts, strict=True)))


def _rates(
    model: LearnerModel, adapter: RolloutAdapter, prompts: Sequence[list[int]], pages: int, options: TailOptions
) -> dict[str, float]:
    """Of sparse attention with the adapter, against dense attention without."""
    with adapter.applied():
        answers = _answers(model, prompts, BudgetSchedule((pages,)), options, options.seed)
    ids = torch.cat([torch.tensor(prompts), answers.token_ids], 1)
    first = len(prompts[0])
    dense = []
    with torch.no_grad():
        for part in ids.split(AT_ONCE):
            logits = model.module(input_ids=part, use_cache=False).logits[:, first - 1 : -1]
            dense.append(logits.float().log_softmax(-1))
    p, q = torch.cat(dense)[:, 1:], answers.logprobs[:, 1:]
    alphas = torch.minimum(p.exp(), q.exp()).sum(-1).flatten().numpy()
    return {
        "tokens": alphas.size,
        "percentile": float(np.percentile(alphas, PERCENTILE)),
        "mean": float(alphas.mean()),
        "kl": float((q.exp() * (q - p)).sum(-1).mean()),
    }


def _rows(prompts: Sequence[list[int]], answers: Answers) -> list[TrainingRow]:
    logprobs = answers.logprobs.gather(2, answers.token_ids[..., None])[..., 0]
    said = zip(prompts, answers.token_ids.tolist(), logprobs.numpy(), strict=True)
    return [TrainingRow.of_answer(*one) for one in said]


def token_ids_of_file(file: Path) -> list[list[int]]:
    """Of JSON lines with ``token_ids``. Raises UsageError."""
    prompts = prompts_of_file(file)
    found = [one for one in prompts if not isinstance(one, str)]
    if len(found) < len(prompts) or len({len(one) for one in found}) > 1:
        raise UsageError(f"{file}: each line has token_ids, and all prompts have one length")
    return found


def prompts_of_recite(tokens: int, phrases: int, count: int) -> list[list[int]]:
    """Raises UsageError for a length that the task refuses."""
    task = Recite(tokens, phrases=phrases)
    return [task.drawn(job.prompt).prompt.tolist() for job in islice(task.jobs(SEED), count)]


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with `token_ids`, all of one length. Default: prompts of task recite.",
)
@click.option("--length", type=click.IntRange(64), default=512, help="Tokens of a prompt of task recite.")
@click.option("--phrases", type=click.IntRange(1, 64), default=8, help="Different phrases of such a prompt.")
@click.option("--held-out", type=click.IntRange(1), default=48, help="Prompts at the file's end that are measured.")
@click.option("--tokens", type=click.IntRange(2), default=32, help="Tokens of an answer.")
@click.option("--pages", type=click.IntRange(1), default=5, help="Budget of the training, in pages besides the three.")
@click.option("--budget", "budgets", type=click.IntRange(1), multiple=True, help="Another measured budget; repeatable.")
@click.option("--block-size", type=click.IntRange(1), default=16, help="Tokens of a page of the cache.")
@click.option("--steps", type=click.IntRange(1), default=60, help="Updates of the adapter.")
@click.option("--batch", type=click.IntRange(1), default=16, help="Answers of one update.")
@click.option("--rank", type=click.IntRange(1), default=16, help="Rank of the adapter.")
@click.option(
    "--alpha", type=float, default=16.0, help="Scale of the adapter: its product is multiplied by alpha / rank."
)
@click.option("--lr", type=float, default=3e-3, help="Learning rate of the adapter.")
@click.option("--seed", type=int, default=0, help="Seed of answers and adapter.")
@click.option("--plot", type=PATH, metavar="FILE.png", help="File for a plot of the percentiles by budget.")
@documented
def distill(
    model: Path,
    prompts: Path | None,
    length: int,
    phrases: int,
    held_out: int,
    tokens: int,
    pages: int,
    budgets: tuple[int, ...],
    block_size: int,
    steps: int,
    batch: int,
    rank: int,
    alpha: float,
    lr: float,
    seed: int,
    plot: Path | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Train the adapter of rollouts on answers of MODEL, and measure acceptance rates before and after, at equal
    budgets, on other prompts.
    """
    if plot is not None:
        require_matplotlib()
    drawn = prompts_of_recite(length, phrases, held_out + DRAWN) if prompts is None else token_ids_of_file(prompts)
    found = bench_distill(
        TailOptions(
            model=model, prompts=drawn, held_out=held_out, tokens=tokens, pages=pages, budgets=budgets,
            page_tokens=block_size, steps=steps, batch=batch, rank=rank, alpha=alpha, lr=lr, seed=seed,
        )
    )  # fmt: skip
    if plot is not None:
        _draw(found["rows"], plot)
    if written(found, output, as_json=as_json):
        return
    table = Table(title=f"acceptance rates before → after {steps} steps at {_budget_tokens(pages)} tokens")
    for title in ("budget, tokens", "measured tokens", "5th percentile", "mean", "KL, nats"):
        table.add_column(title, justify="right")
    for row in found["rows"]:
        pairs = [f"{row[f'{key}_before']:.3f} → {row[f'{key}_after']:.3f}" for key in ("percentile", "mean", "kl")]
        table.add_row(str(_budget_tokens(row["pages"])), str(row["tokens"]), *pairs)
    console().print(table)


def _budget_tokens(pages: int) -> int:
    return BudgetSchedule((pages,)).budget_tokens(0)


def _draw(rows: list[dict[str, Any]], file: Path) -> None:
    figure, ((axes,),) = blank(1, 1, width=6.4, height=4)
    budgets = [_budget_tokens(row["pages"]) for row in rows]
    for name, colour in (("before", "gray"), ("after", "tab:blue")):
        axes.plot(budgets, [row[f"percentile_{name}"] for row in rows], marker="o", color=colour, label=name)
    axes.set_xlabel("budget, tokens")
    axes.set_ylabel("5th percentile of the acceptance rate")
    axes.legend()
    save(figure, file)


if __name__ == "__main__":
    sys.exit(exit_code(lambda: distill(standalone_mode=False)))
