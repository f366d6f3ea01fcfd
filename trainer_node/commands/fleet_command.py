"""``p2pcast fleet``: which rollout workers a run needs, their cost, and a command that keeps them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pcast.cli.options import PATH, console, documented, seconds, written
from p2pcast.cli.sparse_options import predicts_sparse
from p2pcast.ground.errors import EXIT_FAILED, LocalError
from trainer_node.commands.fleet_run import run
from trainer_node.commands.fleet_status import status
from trainer_node.commands.offer_type import OfferType

if TYPE_CHECKING:
    from p2pcast.sparse.rollout_prediction import RolloutPrediction
    from trainer_node.scheduling.worker_fleet_plan import FleetPlan, Prospect, WorkerOffer

DPI = 120
INCHES = (8.0, 4.8)


@click.group()
def fleet() -> None:
    """Plan the rollout workers of a run, watch them, and start and stop them: how many, of which kind, at what cost."""


fleet.add_command(status)
fleet.add_command(run)


@fleet.command()
@seconds(
    "FLEET_PLAN", "t-train", click.FloatRange(min=0, min_open=True), None,
    "Time of one learner step in seconds, the median of the first five.",
)  # fmt: skip
@seconds(
    "FLEET_PLAN", "t-bcast", click.FloatRange(min=0), 0.0,
    "Time in seconds from a publication until nine in ten engines serve the version.",
)  # fmt: skip
@click.option("--rollouts", type=click.IntRange(1), required=True, help="Number of rollouts trained in one step.")
@click.option(
    "--price",
    "offers",
    type=OfferType(),
    multiple=True,
    required=True,
    help="Kind of worker on offer: price of one in USD an hour, its rollouts a second, number on offer. Repeatable.",
)
@click.option("--staleness", type=click.IntRange(1), default=3, help="Bound S on staleness in learner steps.")
@click.option(
    "--publish-every", type=click.IntRange(1), help="Learner steps between publications.  [default: S - 1, at least 1]"
)
@click.option(
    "--trained-share",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    help="Share of rollouts that are trained; the others are dropped for equal rewards, or stale.",
)
@click.option("--learner-price", type=click.FloatRange(min=0), default=0.0, help="Price of the learner in USD an hour.")
@click.option("--margin", type=click.FloatRange(min=1), default=1.1, help="Capacity asked for ÷ the least capacity.")
@click.option("--plot", type=PATH, help="PNG file for the bubble and the cost by number of workers.")
@predicts_sparse
@documented
def plan(
    t_train_s: float | None,
    t_bcast_s: float,
    rollouts: int,
    offers: tuple[WorkerOffer, ...],
    staleness: int,
    publish_every: int | None,
    trained_share: float,
    learner_price: float,
    margin: float,
    plot: Path | None,
    prediction: RolloutPrediction | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Choose the cheapest workers that keep the learner busy, and predict what it waits. Exit code 1 if all offers
    together are too few.

    \b
    Example, ECHO-2's Qwen3-8B at S = 3:
      p2pcast fleet plan --t-train 1631 --t-bcast 1437 --rollouts 2048 --price rtx5090=0.35:0.28:12
    """
    from trainer_node.scheduling.overlap import RolloutPace
    from trainer_node.scheduling.worker_fleet_plan import planned

    if t_train_s is None:
        raise click.UsageError("Missing option '--t-train'.")
    every = max(1, staleness - 1) if publish_every is None else publish_every
    pace = RolloutPace(t_train_s, t_bcast_s, rollouts, every, trained_share)
    made = planned(pace, staleness, offers, learner_usd_per_h=learner_price, margin=margin)
    sparse: dict[str, Any] = {}
    if prediction is not None:
        sparse = {"sparse": _sparse(prediction, made)}
        offers = tuple(offer.faster(prediction.speed_up) for offer in offers)
        made = planned(pace, staleness, offers, learner_usd_per_h=learner_price, margin=margin)
    document = _document(made, offers, pace.steps, staleness) | sparse
    if plot is not None:
        _draw(made, plot)
    if not written(document, output, as_json=as_json):
        _show(made, offers, document)
    if made.chosen is None:
        sys.exit(EXIT_FAILED)


def _document(made: FleetPlan, offers: tuple[WorkerOffer, ...], every: int, staleness: int) -> dict[str, Any]:
    chosen = [] if made.chosen is None else made.chosen
    return {
        "reached": made.chosen is not None,
        "least_rollouts_per_s": made.least_per_s,
        "target_rollouts_per_s": made.target_per_s,
        "staleness": staleness,
        "publish_every": every,
        "fleet": {offer.kind: sum(one.name.rpartition("-")[0] == offer.kind for one in chosen) for offer in offers},
        "prospect": _prospect(made.prospect),
        "growth": [_prospect(each) for each in made.growth],
    }


def _sparse(prediction: RolloutPrediction, dense: FleetPlan) -> dict[str, Any]:
    """The part of the output about sparse attention. ``dense``: the plan with the rates of dense attention."""
    return {
        "speed_up": prediction.speed_up,
        "dense_workers": None if dense.chosen is None else len(dense.chosen),
        "by_length": [
            {"answer_tokens": row.answer, "attended_tokens": row.attended, "speed_up": row.speed_up}
            for row in prediction.by_length
        ],
    }


def _prospect(one: Prospect) -> dict[str, Any]:
    return {
        "workers": one.workers,
        "rollouts_per_s": one.rollouts_per_s,
        "usd_per_h": one.usd_per_h,
        "usd_per_step": one.usd_per_step,
        "bubble": one.bubble,
        "bubble_within_staleness": one.bubble_within,
        "worst_staleness": one.staleness,
    }


def _show(made: FleetPlan, offers: tuple[WorkerOffer, ...], document: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("kind", "on offer", "chosen", "USD/h each", "rollouts/s each", "USD per 1000 rollouts")
    for offer in sorted(offers, key=lambda each: each.usd_per_h / each.rollouts_per_s):
        table.add_row(
            offer.kind, f"{offer.count}", f"{document['fleet'][offer.kind]}", f"{offer.usd_per_h:g}",
            f"{offer.rollouts_per_s:g}", f"{offer.usd_per_h / offer.rollouts_per_s / 3.6:.3g}",
        )  # fmt: skip
    console().print(table)
    if "sparse" in document:
        _show_sparse(document["sparse"], made)
    one = made.prospect
    click.echo(
        f"capacity: {made.least_per_s:.4g} rollouts/s at least, {made.target_per_s:.4g} with the margin; "
        f"{one.workers} workers make {one.rollouts_per_s:.4g}"
    )
    click.echo(f"cost: {one.usd_per_h:.4g} USD/h for workers, {one.usd_per_step:.4g} USD a step with the learner")
    click.echo(
        f"learner waits {one.bubble:.1%} of the time if engines sample nothing during a broadcast (ECHO-2's rule), "
        f"{one.bubble_within:.1%} if they sample on within S = {document['staleness']} (the ledger's rule)"
    )
    click.echo(f"worst staleness by ECHO-2's rule: {one.staleness} steps, published every {document['publish_every']}")
    if made.chosen is None:
        click.echo(f"all {one.workers} workers on offer are too few: {one.rollouts_per_s / made.target_per_s:.0%}")


def _show_sparse(sparse: dict[str, Any], made: FleetPlan) -> None:
    from rich.table import Table

    table = Table("answer tokens", "attended tokens, mean", "predicted speed-up")
    for row in sparse["by_length"]:
        table.add_row(f"{row['answer_tokens']}", f"{row['attended_tokens']:.0f}", f"{row['speed_up']:.2f}")
    console().print(table)
    few = f"all {len(made.growth)} on offer are too few"
    dense = few if sparse["dense_workers"] is None else sparse["dense_workers"]
    click.echo(
        f"sparse attention: rollouts are {sparse['speed_up']:.3g} times as fast by Sparrow's cost model, which has no "
        f"overheads; {made.prospect.workers} workers with it, {dense} without it"
    )


def _draw(made: FleetPlan, path: Path) -> None:
    """Draw the plan. Raises LocalError if matplotlib is missing or the file cannot be written."""
    from p2pcast.files.atomic_files import explained

    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise LocalError("matplotlib is not installed: pip install 'p2pcast[lab]'") from None
    figure = Figure(INCHES, layout="constrained")
    axes = figure.add_subplot()
    workers = [each.workers for each in made.growth]
    axes.plot(workers, [each.bubble for each in made.growth], marker="o", label="bubble, ECHO-2's rule")
    axes.plot(workers, [each.bubble_within for each in made.growth], marker=".", label="bubble, the ledger's rule")
    if made.chosen is not None:
        axes.axvline(len(made.chosen), linestyle=":", color="grey", label="chosen")
    axes.set(xlabel="workers, the cheapest per rollout first", ylabel="predicted bubble ratio", ylim=(0, 1))
    cost = axes.twinx()
    cost.plot(workers, [each.usd_per_step for each in made.growth], color="tab:red", linestyle="--", label="cost")
    cost.set(ylabel="USD a step (dashed)", ylim=(0, None))
    axes.legend(fontsize="small")
    with explained("write", path):
        figure.savefig(path, dpi=DPI, format="png")
