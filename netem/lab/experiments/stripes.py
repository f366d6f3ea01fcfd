"""Goodput of one p2pcast link between ``parent`` and ``child``, by congestion control and number of stripes, and with
the choice left to both ends.

Every setting gets ``links`` links, in turns. So neither a busy moment of the machine nor the state that TCP keeps of
one link decides. A row for each setting: ``goodput_bps`` (the median of all versions over all its links),
``of_ceiling`` (share of the path's capacity after headers), ``to_single_cubic`` and ``to_best`` (of all settings).
``goodputs_bps`` lists each version. ``chosen``: whether p2pcast chose the stripes; ``stripes`` is then the final
number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from netem.emulation.description import EmulatedPath
from netem.emulation.streamed_rate import wire_share
from netem.emulation.tables import bounded, filled, not_empty
from netem.lab.case_network import emulated
from netem.lab.network_tables import network_of
from netem.stripes.stripes_comparison import judged
from netem.stripes.sweep import ENDS, Sweep, ends, link, settings
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_STRIPES, MIB
from p2pcast.transport.socket_options import choose_sockets


@dataclass(frozen=True, slots=True)
class Parameters:
    """``rounds``: versions over a link. ``limit``: a version is cut off after this multiple of its time at the full
    rate.
    """

    payload_mib: float = 12.0
    stripes: tuple[int, ...] = (1, 2, 4, 8)
    congestion: tuple[str, ...] = ("cubic", "bbr")
    links: int = 1
    rounds: int = 3
    limit: float = 4.0

    def check(self) -> None:
        not_empty(self, "stripes", "congestion")
        bounded(
            self,
            stripes=(1, MAX_STRIPES),
            links=(1, 1000),
            rounds=(1, 10_000),
            limit=(1, 10_000),
            payload_mib=(0.01, 1024),
        )


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given, links = _sweep(argument)
    for name in given.congestion:
        choose_sockets(name)
    made: list[dict[str, Any]] = []
    with emulated(argument) as (net, calibrated):
        yield calibrated
        if calibrated["off"]:
            return
        with ends(net) as agents:
            for turn in range(1, links + 1):
                for congestion, stripes in settings(given):
                    yield {"note": f"{stripes or 'own choice'} × {congestion}, link {turn} of {links}"}
                    made.append(link(net, agents, given, stripes, congestion, None))
    rows = together(made)
    judgement = judged(given, rows)
    for row in rows:
        yield {"row": _row(row, judgement, wire_share(given.mtu) * given.rate_bps)}


def together(links: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each setting over all its links. Links may differ in the chosen number; such a setting is one row with
    the largest number.
    """
    of: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {}
    for row in links:
        of.setdefault((row["congestion"], None if row["chosen"] else row["stripes"]), []).append(row)
    return [
        {
            **rows[0],
            "stripes": max(row["stripes"] for row in rows),
            "goodputs_bps": [bps for row in rows for bps in row["goodputs_bps"]],
            "retransmitted": fmean(row["retransmitted"] for row in rows),
            "whole": all(row["whole"] for row in rows),
        }
        for rows in of.values()
    ]


def _sweep(argument: Mapping[str, Any]) -> tuple[Sweep, int]:
    """The sweep, and the number of links for each setting. Raises UsageError."""
    parameters = filled(Parameters, argument["parameters"], "parameters")
    parameters.check()
    network = network_of(argument)
    if {host.name for host in network.hosts} != set(ENDS):
        raise UsageError(f"the experiment stripes needs two hosts, {' and '.join(ENDS)}")
    there: EmulatedPath = network.way(*ENDS)
    if there.rate_bps is None:
        raise UsageError("the experiment stripes needs a path with a rate")
    rtt_s = there.delay_s + network.way(*reversed(ENDS)).delay_s
    sweep = Sweep(
        there.rate_bps,
        rtt_s,
        there.loss,
        round(parameters.payload_mib * MIB),
        parameters.stripes,
        parameters.congestion,
        (None,),
        parameters.rounds,
        parameters.limit,
        network.mtu,
    )
    return sweep, parameters.links


def _row(row: Mapping[str, Any], judgement: Mapping[str, Any], ceiling_bps: float) -> dict[str, Any]:
    goodput_bps = median(row["goodputs_bps"])
    single = judgement["single_cubic_bps"]
    return {
        "rtt_ms": round(row["rtt_s"] * 1e3, 3),
        "loss": round(row["loss"], 6),
        "congestion": row["congestion"],
        "stripes": row["stripes"],
        "goodput_bps": goodput_bps,
        "of_ceiling": round(goodput_bps / ceiling_bps, 3),
        "retransmitted": round(row["retransmitted"], 5),
        "to_single_cubic": None if not single else round(goodput_bps / single, 3),
        "to_best": round(goodput_bps / judgement["best"]["bps"], 3),
        "chosen": row["chosen"],
        "whole": row["whole"],
        "rounds": len(row["goodputs_bps"]),
        "goodputs_bps": row["goodputs_bps"],
    }
