"""The table of ``p2pcast bench codec``: time until a peer has a version of a large model, by link, computed from
measured costs.

Nothing is measured here. Every format is assumed to scale over all cores. Formats whose systems overlap encoding,
transfer and decoding use ``choice.predict``; the others use PULSE's sequential model. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from netem.bench.codec_comparison.formats import DeltaFormat
from p2pcast.codec.codec_prediction import (
    PEER_CORES,
    BroadcastPath,
    StateSize,
    choose,
    crossover_bps,
    overlapped_crossover_bps,
    predict,
    sequential_s,
)
from p2pcast.ground.limits import CELL_WORDS

GBIT_S = (0.1, 0.2, 0.4, 1.0, 2.5, 10.0, 25.0, 100.0)
MODELS = {"8B": 8_000_000_000, "70B": 70_000_000_000}
"""Parameters, bf16."""
WORD_BYTES = 2


def end_to_end(
    formats: Sequence[DeltaFormat], *, encode_cores: int = PEER_CORES, decode_cores: int = PEER_CORES
) -> dict[str, Any]:
    """A part of the document: seconds by model and format, the best format at each rate, and the rates at which it
    changes.
    """
    states = {name: StateSize(params * WORD_BYTES, CELL_WORDS * WORD_BYTES) for name, params in MODELS.items()}
    ours = {f.name: f.cost for f in formats if f.ours}

    def way(gbit_s: float, *, proof: bool) -> BroadcastPath:
        return BroadcastPath(gbit_s * 1e9, encode_cores, decode_cores, proof)

    rows, chosen, crossovers = [], [], []
    for model, state in states.items():
        for one in formats:
            overlapped = [predict(one.cost, way(g, proof=one.ours), state).whole_s for g in GBIT_S]
            apart = [sequential_s(one.cost, way(g, proof=one.ours), state) for g in GBIT_S]
            seconds = overlapped if one.overlaps else apart
            rows.append(
                {
                    "model": model,
                    "format": one.name,
                    "payload_bytes": round(state.nbytes * one.cost.share),
                    "seconds": _rounded(seconds),
                    "sequential_seconds": _rounded(apart),
                    "overlaps": one.overlaps,
                }
            )
        for g in GBIT_S:
            link = way(g, proof=True)
            by_pulse = min(ours, key=lambda name: sequential_s(ours[name], link, state))
            chosen.append({"model": model, "gbit_s": g, "codec": choose(ours, link, state).codec, "by_pulse": by_pulse})
        by_size = sorted((f for f in formats if f.ours), key=lambda f: f.cost.share)
        for at, small in enumerate(by_size):
            for quick in by_size[at + 1 :]:
                pair = (small.cost, quick.cost, way(1, proof=True), state)
                crossovers.append(
                    {
                        "model": model,
                        "small": small.name,
                        "quick": quick.name,
                        "overlapped_gbit_s": _gbit_s(overlapped_crossover_bps(*pair)),
                        "pulse_gbit_s": _gbit_s(crossover_bps(*pair)),
                    }
                )
    return {
        "encode_cores": encode_cores,
        "decode_cores": decode_cores,
        "gbit_s": list(GBIT_S),
        "rows": rows,
        "chosen": chosen,
        "crossovers": crossovers,
    }


def _rounded(seconds: Sequence[float]) -> list[float]:
    return [float(f"{s:.4g}") for s in seconds]


def _gbit_s(bps: float) -> float | None:
    """None: never."""
    return float(f"{bps / 1e9:.4g}") if math.isfinite(bps) else None
