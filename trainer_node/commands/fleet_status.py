"""``p2pcast fleet status``: rates and prices of a run's workers, next to the capacity that its learner needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table
from rich.text import Text

from p2pcast.cli.options import BEARER_FILE, PATH, console, documented, written
from p2pcast.cli.status_document import StatusObject
from p2pcast.ground.errors import UsageError

if TYPE_CHECKING:
    from trainer_node.scheduling.overlap import RolloutPace

DEFAULT_LEDGER = "http://127.0.0.1:7079"


@click.command()
@click.option("--ledger", "url", metavar="URL", help=f"HTTP address of the ledger.  [default: {DEFAULT_LEDGER}]")
@click.option("--state", type=PATH, help="State folder of a ledger on this machine, instead of --ledger.")
@BEARER_FILE
@click.option(
    "--publish-every", type=click.IntRange(1), default=1, help="Learner steps between publications, for the prediction."
)
@documented
def status(
    url: str | None,
    state: Path | None,
    bearer_file: Path | None,
    publish_every: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """Show what each worker brings and costs, and whether all of them keep the learner busy.

    Rates are of accepted results; times are those of the newest 16 steps and versions.

    \b
    Example:
      p2pcast fleet status --ledger http://127.0.0.1:7079
    """
    from p2pcast.daemon.daemon_requests import ask, daemon_url

    where = daemon_url(url or (None if state else DEFAULT_LEDGER), state)
    found = StatusObject(ask(where, "/status", state=state, bearer_file=bearer_file))
    if found.text("role") != "ledger":
        raise UsageError(f"the daemon there is a {found.text('role', 'stranger')}, not a ledger: see --ledger")
    document = fleet_document(found, publish_every)
    if not written(document, output, as_json=as_json):
        _show(document)


def fleet_document(ledger: StatusObject, publish_every: int) -> dict[str, Any]:
    """Build the output. ``ledger``: its /status. Rates are in rollouts per second, and None if not measured yet."""
    tokens = ledger.number("mean_tokens")
    workers = [_worker(row, tokens) for row in ledger.rows("workers")]
    workers.sort(key=lambda one: one["usd_per_1000_rollouts"] or math.inf)
    times, rate = ledger.part("times"), sum(one["rollouts_per_s"] or 0.0 for one in workers)
    measured = {name: times.number(name) if times.has(name) else None for name in MEASURED}
    return {
        "workers": workers,
        "rollouts_per_s": rate,
        "usd_per_h": sum(one["usd_per_h"] for one in workers),
        **measured,
        "trained_share": _trained_share(ledger),
        **_needed(_pace(measured, _trained_share(ledger), publish_every), _whole(ledger.number("staleness")), rate),
    }


MEASURED = ("steps", "train_s", "wait_s", "broadcast_s", "rollouts", "bubble")


def _worker(row: StatusObject, tokens: float) -> dict[str, Any]:
    rate = row.number("tokens_per_s") / tokens if row.has("tokens_per_s") and tokens > 0 else None
    usd = row.number("price_usd_h")
    return {
        "name": row.text("name"),
        "served": row.text("served", "-"),
        "leases": _whole(row.number("leases")),
        "silent_s": row.number("silent_s"),
        "rollouts_per_s": rate,
        "usd_per_h": usd,
        "usd_per_1000_rollouts": usd / rate / 3.6 if rate else None,
    }


def _trained_share(ledger: StatusObject) -> float | None:
    """The share of finished groups that were not dropped."""
    groups = ledger.part("groups")
    kept = sum(groups.number(state) for state in ("complete", "short", "trained"))
    ended = kept + groups.number("dropped")
    return round(kept / ended, 4) if kept > 0 else None


def _pace(measured: dict[str, float | None], share: float | None, every: int) -> RolloutPace | None:
    """The measured pace, or None until a step and a broadcast have been measured."""
    from trainer_node.scheduling.overlap import RolloutPace

    train_s, broadcast_s, rollouts = (measured[name] for name in ("train_s", "broadcast_s", "rollouts"))
    if not train_s or broadcast_s is None or not rollouts or share is None:
        return None
    try:
        return RolloutPace(train_s, broadcast_s, _whole(rollouts), every, share)
    except UsageError:  # a ledger measures no such times
        return None


def _whole(number: float) -> int:
    return int(number) if math.isfinite(number) else 0


def _needed(pace: RolloutPace | None, staleness: int, rate: float) -> dict[str, Any]:
    """μ_min by the ledger's rule, and the predicted bubble. ``why``: the reason if no capacity suffices."""
    from trainer_node.scheduling.overlap import bubble_ratio_within, least_rollouts_per_s_within

    empty = {"least_rollouts_per_s": None, "predicted_bubble": None, "why": None}
    if pace is None:
        return empty
    try:
        return empty | {
            "least_rollouts_per_s": least_rollouts_per_s_within(pace, staleness),
            "predicted_bubble": bubble_ratio_within(pace, staleness, rate),
        }
    except UsageError as error:
        return empty | {"why": str(error)}


def _show(document: dict[str, Any]) -> None:
    table = Table("worker", "serves", "leases", "silent", "rollouts/s", "USD/h", "USD per 1000 rollouts")
    for one in document["workers"]:
        cells = [
            one["name"], one["served"], str(one["leases"]), f"{one['silent_s']:.0f} s", _figure(one["rollouts_per_s"]),
            _figure(one["usd_per_h"]), _figure(one["usd_per_1000_rollouts"]),
        ]  # fmt: skip
        table.add_row(*map(Text, cells))
    console().print(table)
    click.echo(f"{document['rollouts_per_s']:.4g} rollouts/s for {document['usd_per_h']:.4g} USD/h")
    click.echo(
        f"learner: trains {_figure(document['train_s'])} s and waits {_figure(document['wait_s'])} s a step of "
        f"{_figure(document['rollouts'])} rollouts; a version reaches nine engines in ten after "
        f"{_figure(document['broadcast_s'])} s"
    )
    if document["why"]:
        click.echo(document["why"])
    elif document["least_rollouts_per_s"] is not None:
        click.echo(
            f"needed: {document['least_rollouts_per_s']:.4g} rollouts/s; predicted bubble "
            f"{document['predicted_bubble']:.1%}, measured {document['bubble']:.1%}"
        )
    else:
        click.echo("needed: not known before a step and a broadcast are measured")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
