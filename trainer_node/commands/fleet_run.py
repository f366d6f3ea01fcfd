"""``p2pcast fleet run``: keep the rollout workers of a run at the capacity that its learner needs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2pcast.cli.options import BEARER_FILE, PATH, seconds
from p2pcast.ground.errors import LocalError, RetryableError, UsageError

if TYPE_CHECKING:
    from trainer_node.scheduling.worker_fleet import FleetChange
    from trainer_node.scheduling.worker_fleet_operator import FleetOperator, FleetState, OfferSource
    from trainer_node.scheduling.worker_fleet_plan import WorkerOffer

FIRST_STEPS = 5
"""Number of steps whose median is the first measured T_train (ECHO-2, section 4.3)."""
DRAIN_S, DRAIN_POLLS = 900.0, 3
"""An order to drain a worker lasts at least this many seconds and this many checks; each check renews it. A provider's
start command, which delays the checks, takes at most 600 s.
"""

log = logging.getLogger("p2pcast.fleet")


@click.command()
@click.option(
    "--price",
    "prices",
    multiple=True,
    required=True,
    metavar="KIND=USD_H:RATE:COUNT",
    help="Kind of worker on offer: price of one in USD an hour, its rollouts a second, number on offer. Repeatable.",
)
@click.option(
    "--provider",
    "providers",
    multiple=True,
    required=True,
    metavar="KIND=PROVIDER",
    help=(
        "Provider of one kind's workers: static:NAME,NAME, exec:START -- STOP -- LIST, or "
        "kubernetes:NAMESPACE/DEPLOYMENT. Repeatable, once for each kind."
    ),
)
@click.option("--ledger", "url", metavar="URL", help="HTTP address of the ledger.  [default: http://127.0.0.1:7079]")
@click.option("--state", type=PATH, help="State folder of a ledger on this machine, instead of --ledger.")
@BEARER_FILE
@click.option(
    "--publish-every", type=click.IntRange(1), default=1, help="Learner steps between publications, for the capacity."
)
@click.option("--margin", type=click.FloatRange(min=1), default=1.1, help="Capacity asked for ÷ the least capacity.")
@click.option(
    "--least",
    type=click.IntRange(0),
    default=1,
    help=f"Number of workers of the slowest kind whose capacity is asked for until {FIRST_STEPS} steps are measured.",
)
@seconds("FLEET_RUN", "interval", click.FloatRange(0.1, 3600.0), 20.0, "Time in seconds between two looks.")
@seconds(
    "FLEET_RUN", "window", click.FloatRange(0.0, 86_400.0), 60.0,
    "Time in seconds, and at least three looks, that a deviation must last before the fleet changes.",
)  # fmt: skip
@click.option(
    "--dry-run", is_flag=True, help="One look: print the change that a lasting deviation would bring, and end."
)
def run(
    prices: tuple[str, ...],
    providers: tuple[str, ...],
    url: str | None,
    state: Path | None,
    bearer_file: Path | None,
    publish_every: int,
    margin: float,
    least: int,
    interval_s: float,
    window_s: float,
    dry_run: bool,
) -> None:
    """Start the cheapest workers that the learner needs; drain and stop those that are too many.

    Runs until a signal. Workers go on after that: a later `p2pcast fleet run` finds them through its providers.

    \b
    Example:
      p2pcast fleet run --price rtx5090=0.35:0.28:12 --provider "rtx5090=exec:./start.sh -- ./stop.sh -- ./list.sh"
    """
    from p2pcast.daemon.daemon_requests import daemon_url
    from p2pcast.process import event_loop
    from p2pcast.process.daemon_process import run_until_signal
    from trainer_node.commands.fleet_status import DEFAULT_LEDGER
    from trainer_node.scheduling.worker_fleet_operator import FleetOperator

    sources = sources_of(prices, providers)
    where = daemon_url(url or (None if state else DEFAULT_LEDGER), state)
    ledger = LedgerWorkers(where, state, bearer_file, publish_every, max(DRAIN_S, DRAIN_POLLS * interval_s))
    operator = FleetOperator(sources, ledger, window_s=window_s)
    target = Target(least * min(source.offer.rollouts_per_s for source in sources), margin)

    async def work() -> None:
        if dry_run:
            await _preview(operator, ledger, target)
        else:
            await _operate(operator, ledger, target, interval_s)

    event_loop.run(run_until_signal(work))


def sources_of(prices: tuple[str, ...], providers: tuple[str, ...]) -> list[OfferSource]:
    """Return an offer and a provider for each kind. Raises UsageError or LocalError."""
    from trainer_node.commands.offer_type import OfferType
    from trainer_node.scheduling.provider import Provider, provider_of
    from trainer_node.scheduling.worker_fleet_operator import OfferSource

    offers: dict[str, WorkerOffer] = {}
    for text in prices:
        try:
            offer = OfferType().convert(text, None, None)
        except click.BadParameter as error:
            raise UsageError(f"--price {error.message}") from None
        if offer.kind in offers:
            raise UsageError(f"--price names the kind {offer.kind!r} twice")
        offers[offer.kind] = offer
    made: dict[str, Provider] = {}
    for text in providers:
        kind, found, provider = text.partition("=")
        if not found or kind not in offers or kind in made:
            raise UsageError(f"--provider {text}: write KIND=PROVIDER, once for each KIND of --price")
        made[kind] = provider_of(provider)
    if missing := sorted(offers.keys() - made.keys()):
        raise UsageError(f"the kind {missing[0]!r} has a --price and no --provider")
    return [OfferSource(offer, made[kind]) for kind, offer in offers.items()]


class Target:
    """The rollouts per second that the fleet should make. ``first_per_s``: until the learner has been measured."""

    def __init__(self, first_per_s: float, margin: float) -> None:
        self._per_s, self._margin = first_per_s, margin
        self._unreachable = False

    def per_s(self, document: dict[str, Any]) -> float:
        """Compute the target from the output of `fleet status`. The last target stays while a restarted ledger has
        measured too few steps, and while no capacity keeps the learner busy.
        """
        needed = document["least_rollouts_per_s"]
        if needed is not None and (document["steps"] or 0) >= FIRST_STEPS:
            self._per_s = self._margin * needed
        unreachable = bool(document["why"])
        if unreachable and not self._unreachable:
            log.warning("the target stays at %.4g rollouts/s: %s", self._per_s, document["why"])
        self._unreachable = unreachable
        return self._per_s


async def _operate(operator: FleetOperator, ledger: LedgerWorkers, target: Target, interval_s: float) -> None:
    from p2pcast.process.daemon_process import raise_descriptor_limit

    raise_descriptor_limit()
    loop, known = asyncio.get_running_loop(), False
    while True:
        try:
            per_s = target.per_s(await ledger.refresh())
            known = True
            await operator.adjust(loop.time(), per_s)
        except (RetryableError, LocalError) as error:
            if not known and not isinstance(error, RetryableError):
                raise
            log.warning("the fleet stays as it is: %s", error)
        await asyncio.sleep(interval_s)


async def _preview(operator: FleetOperator, ledger: LedgerWorkers, target: Target) -> None:
    document = await ledger.refresh()
    per_s = target.per_s(document)
    fleet, change = await operator.preview(asyncio.get_running_loop().time(), per_s)
    for line in preview_lines(document, per_s, fleet, change):
        click.echo(line)


def preview_lines(document: dict[str, Any], per_s: float, fleet: FleetState, change: FleetChange) -> list[str]:
    needed = document["least_rollouts_per_s"]
    figure = "not known yet" if needed is None else f"{needed:.4g} rollouts/s"
    running = [
        f"runs {one.name}: {one.rollouts_per_s:.4g} rollouts/s for {one.usd_per_h:.4g} USD/h" for one in fleet.active
    ]
    return [
        f"needed: {figure}; asked for: {per_s:.4g} rollouts/s; present: {fleet.rollouts_per_s:.4g} rollouts/s",
        *running,
        *(f"would start {one.name}" for one in change.activate),
        *(f"would drain {one.name}" for one in change.release),
        *(() if change.activate or change.release else ("would change nothing",)),
    ]


class LedgerWorkers:
    """What the ledger knows of workers, and orders to drain and admit them. ``drain_s``: how long an order lasts."""

    def __init__(
        self, url: str, state: Path | None, bearer_file: Path | None, publish_every: int, drain_s: float
    ) -> None:
        self._url, self._state, self._bearer_file = url, state, bearer_file
        self._publish_every, self._drain_s = publish_every, drain_s
        self._document: dict[str, Any] = {}

    async def refresh(self) -> dict[str, Any]:
        """Fetch the data of `fleet status` from the ledger. Raises P2PCastError."""
        from p2pcast.cli.status_document import StatusObject
        from trainer_node.commands.fleet_status import fleet_document

        found = StatusObject(await self._ask("/status"))
        if found.text("role") != "ledger":
            raise UsageError(f"the daemon at {self._url} is no ledger: see --ledger")
        self._document = fleet_document(found, self._publish_every)
        return self._document

    async def rates(self) -> dict[str, float]:
        """Rollouts per second of each worker, as of the last ``refresh``."""
        from trainer_node.ledger_server.ledger_view import SILENT_S

        return {
            row["name"]: row["rollouts_per_s"]
            for row in self._document["workers"]
            if row["rollouts_per_s"] is not None and row["silent_s"] <= SILENT_S
        }

    async def drain(self, name: str) -> bool:
        """Drain a worker, and return whether it has no leases left. Raises P2PCastError."""
        return not (await self._order(name, self._drain_s))["leases"]

    async def admit(self, name: str) -> None:
        """Let a worker have leases again. Raises P2PCastError."""
        await self._order(name, 0.0)

    async def _order(self, name: str, for_s: float) -> dict[str, Any]:
        return await self._ask("/v1/workers/drain", {"name": name, "for_s": for_s})

    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        from p2pcast.daemon.daemon_requests import ask

        return await asyncio.to_thread(ask, self._url, path, body, state=self._state, bearer_file=self._bearer_file)
