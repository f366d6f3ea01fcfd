"""``p2pcast bench stripes``: links over paths of every round trip and loss, and the stripe counts that p2pcast would
choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from netem.emulation.backend import results
from netem.emulation.streamed_rate import wire_share
from netem.stripes.sweep import Sweep
from p2pcast.relay.active_stripes import initial_stripes
from p2pcast.transport.socket_options import window_bytes
from p2pcast.transport.stripe_count import NetworkPath, stripes

WORK = "netem.stripes.sweep:sweep"


@dataclass(frozen=True, slots=True)
class StripesBench:
    backend: str
    rate_bps: float
    rtts_s: tuple[float, ...]
    losses: tuple[float, ...]
    payload_bytes: int
    stripes: tuple[int, ...]
    congestion: tuple[str, ...]
    buffers: tuple[int | None, ...]
    rounds: int
    limit: float

    def sweeps(self) -> Iterator[Sweep]:
        for rtt_s in self.rtts_s:
            for loss in self.losses:
                yield Sweep(
                    self.rate_bps,
                    rtt_s,
                    loss,
                    self.payload_bytes,
                    self.stripes,
                    self.congestion,
                    self.buffers,
                    self.rounds,
                    self.limit,
                )


Row = dict[str, Any]


def bench_stripes(bench: StripesBench, show: Callable[[Row], None]) -> dict[str, Any]:
    """The report document. ``show`` receives each path's judgement as soon as it is known."""
    ways, rows = [], []
    for sweep in bench.sweeps():
        here: list[Row] = []
        calibrated: Row = {}
        for said in results(bench.backend, WORK, asdict(sweep)):
            if "row" in said:
                here.append(said["row"])
            else:
                calibrated = said
        way = {"rtt_s": sweep.rtt_s, "loss": sweep.loss, **calibrated}
        if here:
            way |= judged(sweep, here)
        ways.append(way)
        rows += here
        show(way)
    return {
        "backend": bench.backend,
        "rate_bps": bench.rate_bps,
        "payload_bytes": bench.payload_bytes,
        "ways": ways,
        "rows": rows,
    }


def judged(sweep: Sweep, rows: Sequence[Row]) -> dict[str, Any]:
    """``best``: the highest goodput of all settings tried. ``choice``: the stripe count that p2pcast chose, and its
    goodput. ``rule``: the stripe count of its initial rule.
    """
    usual = [row for row in rows if row["buffer_bytes"] is None]
    goodput = {(r["congestion"], r["stripes"]): median(r["goodputs_bps"]) for r in usual if not r["chosen"]}
    ceiling = sweep.rate_bps * wire_share(sweep.mtu)
    by_congestion = {}
    for congestion in dict.fromkeys(name for name, _ in goodput):
        of_it = {number: bps for (name, number), bps in goodput.items() if name == congestion}
        rule = initial_stripes(stripes(NetworkPath(sweep.rtt_s, 0.0, congestion, window_bytes())), congestion)
        by_congestion[congestion] = {
            "of_ceiling": {str(n): round(bps / ceiling, 3) for n, bps in of_it.items()},
            "rule": rule,
            "rule_to_best": None if rule not in of_it else round(of_it[rule] / max(of_it.values()), 3),
        }
    best = max(goodput, key=lambda key: goodput[key])
    own = next((row for row in usual if row["chosen"]), None)
    single = goodput.get(("cubic", 1))
    return {
        "by_congestion": by_congestion,
        "single_cubic_bps": single,
        "best": {"congestion": best[0], "stripes": best[1], "bps": round(goodput[best])},
        "choice": None
        if own is None
        else {
            "congestion": own["congestion"],
            "stripes": own["stripes"],
            "to_best": round(median(own["goodputs_bps"]) / goodput[best], 3),
            "to_single_cubic": None if not single else round(median(own["goodputs_bps"]) / single, 2),
        },
    }
