"""Time of one optimiser step's weights over one p2pcast link between ``parent`` and ``child``. They are sent as a whole
state, and as deltas of several formats, over several stripe counts.

Sizes come from encoding real weights under real AdamW steps; the payload is random bytes of that size, which cannot be
compressed. The formats:

- ``dense``: the whole state in bf16.
- ``naive``: a 32-bit index and the value of each changed word.
- ``sparrowrl``: SparrowRL section 5.1, as in ``netem.bench.codec_comparison.sparrowrl_format``.
- ``ours``: ``context``, with every byte decoded again and compared.

A row for each of ``sends``: ``seconds`` (the median), ``predicted_s``, and ``to_first`` (÷ the seconds of the first
one). The prediction is topology's model; with packet loss it uses the window that ``striping`` expects of the
congestion control. With a paper's scale also ``at_scale_s``: seconds times the payload's scale ÷ the rate's scale.
``simulated`` rows are the model's at the paper's own sizes and rates.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil
from statistics import median
from typing import Any, Final

from netem.emulation.streamed_rate import wire_share
from netem.emulation.tables import bounded, filled, not_empty
from netem.lab.case_network import emulated
from netem.lab.network_tables import network_of
from netem.stripes.sweep import Sweep, ends, link
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import MAX_STRIPES, PIECE_BYTES
from p2pcast.transport.socket_options import choose_sockets, own_congestion, window_bytes
from p2pcast.transport.stripe_count import LOSS_BLIND, SEGMENT_BYTES, NetworkPath, lossy_window
from topology.broadcast_time import chain_time_s

ENDS: Final = ("parent", "child")
FORMATS: Final = ("dense", "naive", "sparrowrl", "ours")
INDEX_BYTES: Final = 4
VALUE_BYTES: Final = 2
LEAST_S: Final = 5.0
"""Least time for any version, however small."""
ENOUGH_S: Final = 10.0
"""A transfer of at least this time is not repeated."""
GIGA: Final = 1e9


@dataclass(frozen=True, slots=True)
class Parameters:
    """``sends``: a format, optionally with a number of stripes and a congestion control; otherwise the peer's own
    choice. ``steps``: number of deltas in one payload. ``gbps``: the paper's rate; the child's link gets it ÷
    ``rate_scale``; 0 keeps the scenario's rate. ``paper_dense_gb``: the paper's dense payload.
    """

    sends: tuple[str, ...]
    learning_rate: float = 1e-6
    steps: int = 1
    rounds: int = 3
    limit: float = 3.0
    gbps: float = 0.0
    rate_scale: float = 1.0
    paper_dense_gb: float = 0.0
    sizes: tuple[int, ...] = ()
    """Sizes of the formats, in their order; set by ``prepared``."""

    def check(self) -> None:
        not_empty(self, "sends")
        list(map(_send, self.sends))
        bounded(self, learning_rate=(1e-9, 1), steps=(1, 1000), rounds=(1, 1000), limit=(1, 10_000))
        bounded(self, gbps=(0, 1e6), rate_scale=(1e-6, 1e6), paper_dense_gb=(0, 1e6))


@dataclass(frozen=True, slots=True)
class TransferCase:
    """``stripes``, ``congestion``: None for the peer's own choice."""

    payload: str
    stripes: int | None = None
    congestion: str | None = None


@dataclass(frozen=True, slots=True)
class Payloads:
    """``sizes``: bytes by format, of all steps together. ``changed_share``: changed share of the words in one step."""

    sizes: dict[str, int]
    changed_share: float


@cache
def measured(learning_rate: float, steps: int) -> Payloads:
    """Sizes over ``steps`` consecutive steps of a running training. Takes some seconds; needs torch, transformers and
    the pretrained weights. Raises LocalError.
    """
    from netem.bench.codec_comparison.comparison import sizes, trained_datasets

    (dataset,) = trained_datasets((learning_rate,), steps)
    row = sizes(dataset, "context")
    return Payloads(
        {
            "dense": row["dense_bytes"],
            "naive": row["changed"] * (INDEX_BYTES + VALUE_BYTES),
            "sparrowrl": row["sparrowrl_bytes"],
            "ours": row["bytes"],
        },
        row["changed"] / row["params"],
    )


def prepared(argument: Mapping[str, Any]) -> dict[str, Any]:
    """The argument with the sizes, whose training needs a whole machine, and with the rate scaled from the paper's.
    Raises UsageError, LocalError.
    """
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    ready = copy.deepcopy(dict(argument))
    ready["parameters"]["sizes"] = [measured(given.learning_rate, given.steps).sizes[name] for name in FORMATS]
    if given.gbps:
        hosts = [host for host in ready["network"]["hosts"] if host["name"] == ENDS[1]]
        for host in hosts:
            host["rate"] = f"{given.gbps * GIGA / given.rate_scale:.0f}bit"
    return ready


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Parameters, argument["parameters"], "parameters")
    network = network_of(argument)
    if {host.name for host in network.hosts} != set(ENDS):
        raise UsageError(f"the experiment transfer needs two hosts, {' and '.join(ENDS)}")
    there = network.way(*ENDS)
    if there.rate_bps is None:
        raise UsageError("the experiment transfer needs a path with a rate")
    way = NetworkPath(
        there.delay_s + network.way(*reversed(ENDS)).delay_s,
        there.rate_bps,
        _own(network.congestion),
        window_bytes(),
        there.loss,
    )
    sizes = dict(zip(FORMATS, given.sizes, strict=True))
    share = wire_share(network.mtu)
    yield from ({"row": row} for row in _at_paper_scale(given, sizes, share))
    with emulated(argument) as (net, calibrated):
        yield calibrated
        if calibrated["off"]:
            return
        with ends(net) as agents:
            first_s = None
            for words in given.sends:
                send = _send(words)
                sweep = _sweep(given, send, sizes, way)
                row = _row(
                    given, send, sizes, way, share, link(net, agents, sweep, send.stripes, sweep.congestion[0], None)
                )
                first_s = first_s or row["seconds"]
                yield {"row": {"send": words, **row, "to_first": round(row["seconds"] / first_s, 4)}}


def _own(congestion: str | None) -> str:
    """The congestion control of p2pcast's sockets by default."""
    return choose_sockets(None).congestion or congestion or own_congestion()


def _send(words: str) -> TransferCase:
    """Raises UsageError."""
    payload, *rest = words.split() or [""]
    if payload not in FORMATS:
        raise UsageError(f"parameters.sends: {payload!r} is not a format; the formats are {', '.join(FORMATS)}")
    if not rest:
        return TransferCase(payload)
    if len(rest) != 2 or not rest[0].isdigit() or not 1 <= int(rest[0]) <= MAX_STRIPES:
        raise UsageError(
            f"parameters.sends: {words!r}; write 'FORMAT' or 'FORMAT STRIPES CONGESTION', with 1 to {MAX_STRIPES} "
            "stripes"
        )
    choose_sockets(rest[1])
    return TransferCase(payload, int(rest[0]), rest[1])


def _sweep(given: Parameters, send: TransferCase, sizes: Mapping[str, int], way: NetworkPath) -> Sweep:
    size = sizes[send.payload]
    limit = max(given.limit, LEAST_S * way.rate_bps / (8 * size))
    rounds = min(given.rounds, ceil(ENOUGH_S * way.rate_bps / (8 * size)))
    congestion = send.congestion or way.congestion
    return Sweep(way.rate_bps, way.rtt_s, way.loss, size, (), (congestion,), (None,), rounds, limit)


def _row(
    given: Parameters,
    send: TransferCase,
    sizes: Mapping[str, int],
    way: NetworkPath,
    share: float,
    carried: Mapping[str, Any],
) -> dict[str, Any]:
    """``share``: payload's share of the bytes on the wire."""
    size = sizes[send.payload]
    goodput_bps = median(carried["goodputs_bps"])
    stripes, congestion = carried["stripes"], carried["congestion"]
    seconds, predicted_s = 8 * size / goodput_bps, _predicted_s(size, stripes, congestion, way, share)
    row = {
        "payload": send.payload,
        "stripes": stripes,
        "congestion": congestion,
        "simulated": False,
        "rate_mbps": round(way.rate_bps / 1e6, 3),
        "rtt_ms": round(way.rtt_s * 1e3, 3),
        "loss": round(way.loss, 6),
        "bytes": size,
        "of_dense": round(size / sizes["dense"], 5),
        "seconds": round(seconds, 4),
        "slowest_s": round(8 * size / min(carried["goodputs_bps"]), 4),
        "of_ceiling": round(goodput_bps / way.rate_bps / share, 4),
        "predicted_s": round(predicted_s, 4),
        "predicted_over_measured": round(predicted_s / seconds, 4),
        "retransmitted": round(carried["retransmitted"], 5),
        "whole": carried["whole"],
    }
    if given.paper_dense_gb:
        row["at_scale_s"] = round(seconds * given.paper_dense_gb * GIGA / sizes["dense"] / given.rate_scale, 4)
    return row


def _predicted_s(size: int, stripes: int, congestion: str, way: NetworkPath, share: float) -> float:
    rate_bps = way.rate_bps * share
    if way.loss and way.rtt_s and congestion not in LOSS_BLIND:
        window = lossy_window(congestion, way.rtt_s, way.loss) * SEGMENT_BYTES
        rate_bps = min(rate_bps, stripes * 8 * window / way.rtt_s)
    return chain_time_s(size, [rate_bps], PIECE_BYTES, [way.rtt_s])


def _at_paper_scale(given: Parameters, sizes: Mapping[str, int], share: float) -> Iterator[dict[str, Any]]:
    if not given.paper_dense_gb or not given.gbps:
        return
    for payload in dict.fromkeys(_send(words).payload for words in given.sends):
        size = given.paper_dense_gb * GIGA * sizes[payload] / sizes["dense"]
        seconds = chain_time_s(size, [given.gbps * GIGA * share], PIECE_BYTES, [0.0])
        yield {
            "send": payload,
            "payload": payload,
            "simulated": True,
            "rate_mbps": given.gbps * 1e3,
            "bytes": round(size),
            "of_dense": round(sizes[payload] / sizes["dense"], 5),
            "seconds": round(seconds, 4),
            "at_scale_s": round(seconds, 4),
        }
