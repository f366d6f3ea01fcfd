"""Two runs of one model whose engine attends to far too few pages, without the guard of sparse attention and with it:
``python -m examples.research.sparse_guard MODEL``.

Both are runs as users start them: hub, ledger, learner, peer, worker, and a vLLM server with sparse attention. They
differ in ``[sparse] target`` alone: with 0 the learner measures the acceptance rate, and leaves the budget as it is.

Source of the comparison: Sparrow, figures 1 and 2.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import click
from rich.table import Table

from netem.emulation.description import HUB
from netem.fleet.participants import FIRST_PEER
from netem.fleet.processes import ChildProcess, FleetError, Processes, describe_exit
from netem.fleet.rl_participants import ENGINE, LOGPROBS, RlOptions, RlParticipants
from netem.fleet.rollout_processes import LEDGER
from netem.fleet.wait import HTTP_S, FleetWatch, unwrapped
from netem.fleet.workspace import Workspace
from p2pcast.cli import exit_code
from p2pcast.cli.options import PATH, console, documented, written
from p2pcast.ground.errors import EXIT_FAILED
from p2pcast.inspection import png_figure
from p2pcast.rollouts.top_logprobs import MAX_TOP_K, TOP_K
from p2pcast.sparse.acceptance_rate import LEAST_TOKENS
from p2pcast.sparse.budget_guard import FLOOR, TARGET
from p2pcast.sparse.budget_schedule import FILE, BudgetSchedule
from rollout_node.vllm_plugin import SPARSE_VARIABLE
from trainer_node.learning.monitoring.run_log import read_run
from trainer_node.learning.monitoring.run_record import RunRecord

ENGINE_S, RUN_S, WORKER_S = 900.0, 7200.0, 300.0
"""Time limits in seconds: of vLLM's start, of the run, and of the worker's end after it."""
LOW: Final = 0.75
"""5th percentile below which a run's budget counts as too small."""
KEPT: Final = ("loss.kind=tis", "sft.steps=0", "probe.prompts=0", "export.every=0", "optimizer.warmup-steps=0")


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRunOptions:
    """``model``: folder of a model that has learnt ``task``. ``longest``: tokens of prompt and answer. ``pages``: of
    the first budget, in every bin. ``floor``: of the guard. ``guard_tokens``: most probable tokens of a position that
    it compares. ``slots``: plays at the same time. ``engine_words``, ``worker_words``: further words of their command
    lines. ``learner_settings``: TABLE.KEY=VALUE; they replace those of KEPT.
    """

    folder: Path
    model: Path
    task: str
    longest: int
    pages: int = 1
    bin_tokens: int = 512
    block_size: int = 32
    steps: int = 24
    groups: int = 4
    group_size: int = 8
    lr: float = 1e-5
    floor: float = FLOOR
    guard_tokens: int = TOP_K
    slots: int = 16
    staleness: int = 1
    seed: int = 0
    engine_words: tuple[str, ...] = ()
    worker_words: tuple[str, ...] = ()
    learner_settings: tuple[str, ...] = ()

    @property
    def schedule(self) -> BudgetSchedule:
        return BudgetSchedule((self.pages,), bin_tokens=self.bin_tokens)

    @property
    def run(self) -> RlOptions:
        return RlOptions(
            self.folder, steps=self.steps, quiet_steps=0, groups=self.groups, group_size=self.group_size,
            staleness=self.staleness, peers=1, workers=1, sft=0, lr=self.lr, seed=self.seed,
        )  # fmt: skip


class SparseParticipants(RlParticipants):
    """The participants of one run, whose engine has sparse attention."""

    def __init__(self, options: GuardRunOptions, work: Workspace, processes: Processes) -> None:
        super().__init__(options.run, work, processes, options.task)
        self._run_options, self.base = options, options.model

    def engine(self) -> ChildProcess:
        options = self._run_options
        words = ["--enable-scale-out", "--logprobs-mode", LOGPROBS, "--generation-config", "vllm"]
        words += ["--max-model-len", str(options.longest), "--block-size", str(options.block_size)]
        words += ["--max-logprobs", str(options.guard_tokens)]
        words += ["--max-num-seqs", str(options.slots), "--max-num-batched-tokens", str(max(4096, options.longest))]
        words += options.engine_words
        return self._start_engine(self.base, words, {SPARSE_VARIABLE: "1"})


async def sparse_run(options: GuardRunOptions, target: float, work: Workspace, processes: Processes) -> str | None:
    """One run, until it has ended. Returns why the learner gave up; None at the run's last step: then the worker has
    ended too, and the engine answers. Raises FleetError.
    """
    parts, schedule = SparseParticipants(options, work, processes), work.root / FILE
    schedule.write_bytes(options.schedule.to_bytes())
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HTTP_S)) as http:
        watch = FleetWatch(processes, work.state, http, lambda: None)
        engine = parts.engine()
        hub = await watch.daemon(HUB, parts.hub())
        peer = parts.peer(FIRST_PEER)
        peer_url = await watch.daemon(FIRST_PEER, peer, ready=False)
        ledger = await watch.daemon(LEDGER, parts.ledger(hub), ready=False)
        parts.configure(ledger)
        await watch.until_answers("vLLM", engine, ENGINE_S, parts.engine_url + "/health")
        sparse = [f"sparse.schedule={schedule}", f"sparse.target={target}", f"sparse.floor={options.floor}"]
        learner = parts.learner(*KEPT, *sparse, *options.learner_settings)
        await watch.until_answers(FIRST_PEER, peer, ENGINE_S, peer_url + "/readyz")
        guard = ("--guard-share", "1", "--guard-tokens", str(options.guard_tokens))
        worker = parts.worker("w1", ledger, peer_url, *guard, *options.worker_words)
        learner.expected = worker.expected = True
        await watch.until("end of the run", learner, RUN_S, lambda: not learner.alive)
        code = learner.process.returncode
        gave_up = str(learner.failure(f"the learner ended with {describe_exit(code)}")) if code else None
        if gave_up is not None and not parts.metrics.exists():
            raise FleetError(gave_up)
        if gave_up is None:
            await watch.until("end of the worker", worker, WORKER_S, lambda: not worker.alive)
            await watch.until_answers("vLLM", engine, HTTP_S, parts.engine_url + "/health")
        for name in (FIRST_PEER, LEDGER, HUB, ENGINE):
            await asyncio.to_thread(processes.stop, name)
    return gave_up


def _figures(record: RunRecord, target: float) -> dict[str, Any]:
    """``results_until_target``: rollouts until the 5th percentile of every measured bin was at the target, and stayed
    there; None: never.
    """
    results = 0
    back: int | None = None
    for step in record.steps:
        results += step.rollouts or 0
        at_target = step.acceptance is not None and step.acceptance >= target
        back = (results if back is None else back) if at_target else None
    return {
        "rewards": [step.reward for step in record.steps],
        "percentiles": [step.acceptance for step in record.steps],
        "means": [step.acceptance_mean for step in record.steps],
        "kl_sparse": [step.kl_sparse for step in record.steps],
        "weight_sparse": [step.weight_sparse for step in record.steps],
        "budgets": [asdict(event) for event in record.budgets],
        "results_until_target": back,
        "results": results,
    }


def guard_runs(options: GuardRunOptions, picture: Path | None = None) -> dict[str, Any]:
    """Both runs, one after the other. Raises P2PCastError."""
    found = {}
    for name, target in (("without", 0.0), ("with", TARGET)):
        with Workspace(options.folder / name) as work, Processes(work.logs) as processes:
            gave_up = asyncio.run(unwrapped(sparse_run(options, target, work, processes)))
            found[name] = _figures(read_run(work.root / "run"), TARGET) | {"gave_up": gave_up}
    measured = [one for one in found["without"]["percentiles"] if one is not None]
    stays_low = bool(measured) and max(measured) < LOW
    back = found["with"]["results_until_target"] is not None and found["with"]["gave_up"] is None
    document = {
        "verdict": "PASS" if stays_low and back else "FAIL",
        "target": TARGET,
        "tokens_of_a_percentile": LEAST_TOKENS,
        "schedule": options.schedule.document(),
        "runs": found,
    }
    if picture is not None:
        plot_runs(document, picture)
    return document


def plot_runs(document: dict[str, Any], file: Path) -> None:
    """Rewards and 5th percentiles of both runs by step. Raises LocalError."""
    figure, ((reward, percentile),) = png_figure.blank(1, 2, width=12, height=4.5)
    for name, run in document["runs"].items():
        _line(reward, run["rewards"], f"{name} the guard")
        _line(percentile, run["percentiles"], f"{name} the guard")
    percentile.axhline(document["target"], color="black", linestyle=":")
    reward.set_ylabel("mean reward")
    percentile.set_ylabel("5th percentile of the acceptance rate, lowest bin")
    for axis in (reward, percentile):
        axis.set_xlabel("step")
        axis.legend()
    png_figure.save(figure, file)


def _line(axis: Any, values: Sequence[float | None], label: str) -> None:
    known = [(step, value) for step, value in enumerate(values, 1) if value is not None]
    if known:
        axis.plot(*zip(*known, strict=True), marker="o", label=label)


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--task",
    default="recite,tokens=1024,phrases=16",
    metavar="NAME,KEY=VALUE",
    help="Task that the model has learnt, as of `p2pcast ledger --task`.",
)
@click.option("--longest", type=click.IntRange(64), default=1088, help="Tokens of a prompt and its answer together.")
@click.option("--pages", type=click.IntRange(1), default=1, help="Pages of 16 tokens of the first budget.")
@click.option("--bin-tokens", type=click.IntRange(16), default=512, help="Positions of a bin.")
@click.option("--block-size", type=click.IntRange(16), default=32, help="Tokens of a page of the engine's cache.")
@click.option("--steps", type=click.IntRange(4), default=24, help="Learner steps of each run.")
@click.option("--groups", type=click.IntRange(1), default=4, help="Prompts of a batch.")
@click.option("--group-size", type=click.IntRange(2), default=8, help="Rollouts of a prompt.")
@click.option("--lr", type=click.FloatRange(0, min_open=True), default=1e-5, help="Learning rate.")
@click.option(
    "--floor",
    type=click.FloatRange(0, 0.86),
    default=FLOOR,
    help="5th percentile below which the guard makes a bin dense at once, in place of twice the pages.",
)
@click.option(
    "--guard-tokens",
    type=click.IntRange(1, MAX_TOP_K),
    default=64,
    help="Most probable tokens of a position that the guard compares; a small model's tail is long.",
)
@click.option("--dir", "folder", type=PATH, default="bench-out/guard", help="Work folder; replaces an earlier one.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="PNG of rewards and percentiles by step.")
@documented
def sparse_guard(
    model: Path,
    task: str,
    longest: int,
    pages: int,
    bin_tokens: int,
    block_size: int,
    steps: int,
    groups: int,
    group_size: int,
    lr: float,
    floor: float,
    guard_tokens: int,
    folder: Path,
    plot: Path | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Train MODEL twice with a budget of sparse attention that is far too small: without the guard, and with it.

    Exit code 1: the 5th percentile of the acceptance rate rose to 0.75 without the guard, or did not end at the target
    with it.
    """
    if plot is not None:
        png_figure.require_matplotlib()
    options = GuardRunOptions(
        folder=folder, model=model, task=task, longest=longest, pages=pages, bin_tokens=bin_tokens,
        block_size=block_size, steps=steps, groups=groups, group_size=group_size, lr=lr, floor=floor,
        guard_tokens=guard_tokens,
    )  # fmt: skip
    document = guard_runs(options, plot)
    if not written(document, output, as_json=as_json):
        _print(document)
    if document["verdict"] != "PASS":
        sys.exit(EXIT_FAILED)


def _print(document: dict[str, Any]) -> None:
    out = console()
    without, guarded = (document["runs"][name] for name in ("without", "with"))
    table = Table(title=document["verdict"])
    for title in ("step", "reward without", "5th percentile without", "reward with", "5th percentile with"):
        table.add_column(title, justify="right")
    for step in range(max(len(without["rewards"]), len(guarded["rewards"]))):
        cells = [run[key][step : step + 1] for run in (without, guarded) for key in ("rewards", "percentiles")]
        table.add_row(str(step + 1), *(_cell(*cell) for cell in cells))
    out.print(table)
    for name, run in document["runs"].items():
        if run["gave_up"] is not None:
            click.echo(f"{name} the guard: {run['gave_up']}")
    for change in guarded["budgets"]:
        after = "all pages" if change["after"] is None else f"{change['after']} pages"
        out.print(f"step {change['step']}: bin {change['bin']} gets {after}, at {change['percentile']:.3f}")
    back = guarded["results_until_target"]
    out.print("never at the target" if back is None else f"at the target after {back} results")


def _cell(value: float | None = None) -> str:
    return "" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(exit_code(lambda: sparse_guard(standalone_mode=False)))
