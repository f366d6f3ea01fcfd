"""What one p2pcast link carries over the way between ``parent`` and ``child``, by congestion control and number of stripes, and what a peer would choose by itself.

A row for each: ``goodput_bps`` (the median), ``of_ceiling`` (of what the way carries after headers), ``to_single_cubic``, ``to_best`` (of all that was tried),
``chosen``: whether it is what a peer takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from netem.description import Way
from netem.lab.emulated import emulated
from netem.lab.networks import network_of
from netem.lab.tables import filled
from netem.stripes.run import judged
from netem.stripes.sweep import ENDS, Sweep, ends, link
from p2pcast.errors import UsageError
from p2pcast.limits import MAX_STRIPES, MIB
from p2pcast.transport.sockets import settled


@dataclass(frozen=True, slots=True)
class Parameters:
    """``limit``: a version is cut off after so many times what it takes at the full rate."""

    payload_mib: float = 12.0
    stripes: tuple[int, ...] = (1, 2, 4, 8)
    congestion: tuple[str, ...] = ("cubic", "bbr")
    rounds: int = 3
    limit: float = 4.0


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = _sweep(argument)
    for name in given.congestion:
        settled(name)
    rows: list[dict[str, Any]] = []
    with emulated(argument) as (net, calibrated):
        yield calibrated
        if calibrated["off"]:
            return
        with ends(net) as agents:
            for congestion in given.congestion:
                for stripes in given.stripes:
                    yield {"note": f"{stripes} × {congestion}"}
                    rows.append(link(net, agents, given, stripes, congestion, None))
    judgement = judged(given, rows)
    for row in rows:
        yield {"row": _row(row, judgement)}


def _sweep(argument: Mapping[str, Any]) -> Sweep:
    """Raises UsageError."""
    parameters = filled(Parameters, argument["parameters"], "parameters")
    network = network_of(argument)
    if {host.name for host in network.hosts} != set(ENDS):
        raise UsageError(f"the experiment stripes has two hosts, {' and '.join(ENDS)}")
    there: Way = network.way(*ENDS)
    if there.rate_bps is None:
        raise UsageError("the experiment stripes needs a way with a rate")
    if not all(1 <= number <= MAX_STRIPES for number in parameters.stripes) or parameters.rounds < 1 or parameters.limit < 1:
        raise UsageError(f"parameters.stripes must be from 1 to {MAX_STRIPES}, rounds and limit 1 or more")
    rtt_s = there.delay_s + network.way(*reversed(ENDS)).delay_s
    return Sweep(
        there.rate_bps, rtt_s, there.loss, round(parameters.payload_mib * MIB), parameters.stripes, parameters.congestion, (None,),
        parameters.rounds, parameters.limit,
    )  # fmt: skip


def _row(row: Mapping[str, Any], judgement: Mapping[str, Any]) -> dict[str, Any]:
    of = judgement["by_congestion"][row["congestion"]]["of_ceiling"][str(row["stripes"])]
    goodput_bps = median(row["goodputs_bps"])
    single = judgement["single_cubic_bps"]
    choice = judgement["choice"]
    return {
        "rtt_ms": round(row["rtt_s"] * 1e3, 3), "loss": round(row["loss"], 6), "congestion": row["congestion"], "stripes": row["stripes"],
        "goodput_bps": goodput_bps, "of_ceiling": of, "retransmitted": round(row["retransmitted"], 5),
        "to_single_cubic": None if not single else round(goodput_bps / single, 3),
        "to_best": round(goodput_bps / judgement["best"]["bps"], 3),
        "chosen": (row["congestion"], row["stripes"]) == (choice["congestion"], choice["stripes"]),
        "whole": row["whole"], "rounds": len(row["goodputs_bps"]),
    }  # fmt: skip
