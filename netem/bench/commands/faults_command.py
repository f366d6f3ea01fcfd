"""``p2pcast bench faults``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from p2pcast.cli.options import Rate, console, documented, written
from p2pcast.ground.limits import MIB
from p2pcast.process import event_loop

if TYPE_CHECKING:
    from netem.chaos.fault_matrix import Case, Outcome

CHAINS = 2
RUNS = 3
"""Number of undisturbed versions; their median time is the reference."""


@click.command()
@click.option("--payload", type=click.IntRange(1), default=4, help="Size of a version in MiB.")
@click.option(
    "--rate", type=Rate(), default="16mbit", help="Rate of the path between two processes, in bits per second."
)
@click.option(
    "--only",
    multiple=True,
    metavar="WORDS",
    help='First words of the cases to run: "kill", "kill hub" or "kill hub start"; repeatable.',
)
@click.option("--deadline", type=click.FloatRange(1), default=30.0, help="Time limit for a case in seconds.")
@documented
def faults(
    payload: int, rate: float, only: tuple[str, ...], deadline: float, as_json: bool, output: Path | None
) -> None:
    """Measure recovery from each fault: the time until bytes flow again, and until all peers have the version.

    Each fault is caused at each position of a chain of three, at the start, middle and end of a broadcast.

    A hub and five peers in two chains run as processes on this machine. Proxies between them limit the rate and cut
    connections. No privileges needed.
    """
    from netem.chaos.fault_matrix import matrix

    cases = [case for case in matrix() if not only or any(f"{case} ".startswith(f"{words} ") for words in only)]
    if not cases:
        raise click.BadParameter("no case begins with these words", param_hint="--only")
    document = event_loop.run(_measure(payload * MIB, rate / 8, cases, deadline))
    if not written(document, output, as_json=as_json):
        _show(document)


async def _measure(payload_bytes: int, rate_bytes_s: float, cases: list[Case], deadline_s: float) -> dict[str, Any]:
    from netem.chaos.fault_matrix import run_case, undisturbed
    from netem.emulation.loopback import Net
    from netem.fleet.local_fleet import PEERS, Fleet
    from netem.fleet.processes import FleetError

    with tempfile.TemporaryDirectory(prefix="p2pcast-bench-", dir="/dev/shm") as folder:
        async with Fleet(Path(folder), Net(rate_bytes_s), PEERS, CHAINS, payload_bytes, deadline_s) as fleet:
            quiet_s = await undisturbed(fleet, RUNS)
            outcomes, failed = [], []
            for case in cases:
                try:
                    outcomes.append(await run_case(fleet, case))
                except FleetError as error:
                    failed.append(str(case))
                    click.echo(f"{case}: {error}", err=True)
                    await fleet.restart_all()
                else:
                    click.echo(f"{case}: {outcomes[-1].gap_s:.2f} s", err=True)
    return (
        _document(quiet_s, outcomes)
        | {"failed": failed}
        | {"payload_bytes": payload_bytes, "rate_bits_s": rate_bytes_s * 8}
    )


def _document(quiet_s: float, outcomes: list[Outcome]) -> dict[str, Any]:
    from statistics import median

    rows: list[dict[str, Any]] = [
        {
            "fault": o.case.fault,
            "position": o.case.position,
            "moment": o.case.moment,
            "gap_s": round(o.gap_s, 3),
            "all_s": round(o.all_s, 3),
            "outage_s": round(o.outage_s, 3),
            "most_s": round(1.25 * quiet_s + 1 + o.outage_s, 3),
            "bytes_duplicate": o.duplicate_bytes,
            "wrong": list(o.wrong),
        }
        for o in outcomes
    ]
    gaps = [max(0.0, o.gap_s - o.outage_s) for o in outcomes] or [0.0]
    return {
        "undisturbed_s": round(quiet_s, 3),
        "gap_median_s": round(median(gaps), 3),
        "gap_worst_s": round(max(gaps), 3),
        "late": sum(row["all_s"] > row["most_s"] for row in rows),
        "bytes_duplicate": sum(row["bytes_duplicate"] for row in rows),
        "wrong": sum(bool(row["wrong"]) for row in rows),
        "rows": rows,
    }


def _show(document: dict[str, Any]) -> None:
    from netem.chaos.fault_matrix import MOMENTS

    table = Table("fault", "position", *(f"{moment}: flows again · all, s" for moment in MOMENTS), "hub away, s")
    found = {(row["fault"], row["position"], row["moment"]): row for row in document["rows"]}
    for fault, position in dict.fromkeys((row["fault"], row["position"]) for row in document["rows"]):
        cells = [found.get((fault, position, moment)) for moment in MOMENTS]
        away = max(cell["outage_s"] for cell in cells if cell)
        shown = [f"{cell['gap_s']:.2f} · {cell['all_s']:.2f}" if cell else "" for cell in cells]
        table.add_row(fault, position, *shown, f"{away:.1f}" if away else "")
    console().print(table)
    click.echo(
        f"undisturbed {document['undisturbed_s']:.2f} s; bytes flow again after {document['gap_median_s']:.2f} s "
        f"(median) and {document['gap_worst_s']:.2f} s (worst), without the hub's absence; "
        f"{document['late']} of {len(document['rows'])} cases later than 1.25 × undisturbed + 1 s; "
        f"{document['bytes_duplicate']} duplicate bytes; {document['wrong']} cases with wrong bits; "
        f"{len(document['failed'])} cases failed{': ' if document['failed'] else ''}{', '.join(document['failed'])}"
    )
