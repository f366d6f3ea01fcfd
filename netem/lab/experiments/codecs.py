"""Finds, for each link rate, the format that gets one step's weights across soonest, encoding and decoding included.

The question is PULSE's (section 4.3, appendix E.4.5, Figure 13). Both ends are processes with one coding thread, on a
real link; the weights are real, one AdamW step apart. Each format's costs are measured first in the same run. From
these costs p2pcast's rule (``p2pcast.codec.codec_prediction``) predicts times and chooses among p2pcast's codecs.
Transfers predicted to exceed ``limit_s`` are not run; their rows are computed (``simulated``), as are the rows for the
paper's model with ``paper_cores`` at either end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from netem.broadcast.agents import ANSWER_S, Agents
from netem.emulation.description import HUB, EmulatedLink
from netem.emulation.namespaces import Namespaces, namespaces
from netem.emulation.streamed_rate import streamed, wire_share
from netem.emulation.tables import bounded, filled, not_empty, rates_of
from netem.fleet.saved_weights import Tensors, trained
from netem.fleet.workspace import TMPFS, own_folder
from netem.lab.coded_transfer import OURS, PORT, write
from netem.lab.scenario import network_of
from p2pcast.codec.codec_prediction import PEER_CORES, BroadcastPath, Cost, StateSize, choose, predict, sequential_s
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import UsageError
from p2pcast.ground.limits import CELL_WORDS

MODULE: Final = "netem.lab.coded_transfer"
THEIRS: Final = ("pulse zstd-1", "pulse zstd-3", "sparrowrl", "xor + zstd-1")
FORMATS: Final = (*OURS, *THEIRS)
ENOUGH_S: Final = 3.0
"""Time after which a format at one rate gets no further rounds."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """``formats``: names from FORMATS. ``rounds``: transfers per format; the fastest counts. ``limit_s``: transfers
    with a longer prediction are not run.
    """

    rates: tuple[str, ...]
    formats: tuple[str, ...] = FORMATS
    learning_rate: float = 1e-6
    copies: int = 4
    rounds: int = 7
    limit_s: float = 4.0
    paper_bytes: float = 14e9
    paper_cores: int = PEER_CORES

    def check(self) -> None:
        not_empty(self, "rates", "formats")
        rates_of(self.rates, "rates")
        if strange := [name for name in self.formats if name not in FORMATS]:
            raise UsageError(f"parameters.formats: there is no {strange[0]!r}, but {', '.join(FORMATS)}")
        bounded(self, learning_rate=(1e-9, 1), copies=(1, 64), rounds=(1, 1000), limit_s=(0, ANSWER_S / 2))
        bounded(self, paper_bytes=(1, 1e15), paper_cores=(1, 1024))


def results(argument: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    given = filled(Parameters, argument["parameters"], "parameters")
    given.check()
    rates = rates_of(given.rates, "rates")
    versions = trained(given.learning_rate, given.copies)
    layout, old = _flat(next(versions))
    _, new = _flat(next(versions))
    network = network_of(argument)
    with own_folder(TMPFS) as folder, namespaces(network) as net, Agents(net, MODULE) as agents:
        write(folder, layout, old, new)
        peer = _started(net, agents, folder)
        costs = {name: _cost(agents, name, old.nbytes) for name in given.formats}
        for name, cost in costs.items():
            yield {
                "note": (
                    f"{name}: {1 / cost.share:.0f} × smaller, encodes {cost.encode_bytes_s / 1e9:.2f} GB/s, "
                    f"decodes {cost.decode_bytes_s / 1e9:.2f} GB/s"
                )
            }
        for rate in rates:
            net.reshape(peer, EmulatedLink(rate, rate))
            calibration = streamed(net, [(HUB, peer)])
            yield calibration
            if calibration["off"]:
                continue
            state = StateSize(old.nbytes, max(cell.nbytes for cell in layout.cells))
            way = BroadcastPath(rate * wire_share(network.mtu), 1, 1, proof=False)
            measured = {
                name: None if expected_s(name, cost, way, state) > given.limit_s else _times(agents, name, given.rounds)
                for name, cost in costs.items()
            }
            yield from rows(costs, way, state, rate, measured)
    for rate in rates:
        way = BroadcastPath(rate * wire_share(network.mtu), given.paper_cores, given.paper_cores)
        yield from rows(costs, way, StateSize(round(given.paper_bytes), 2 * CELL_WORDS), rate, {})


def _flat(tensors: Tensors) -> tuple[Layout, Any]:
    layout = Layout(Tensor(name, dtype, tuple(shape)) for name, (dtype, shape, _) in tensors.items())
    return layout, np.concatenate([tensors[tensor.name][2].reshape(-1) for tensor in layout.tensors])


def _started(net: Namespaces, agents: Agents, folder: Path) -> str:
    peers = net.network.peers
    if len(peers) != 1:
        raise UsageError("hosts: this experiment needs a hub and one peer")
    agents.start(HUB, "sender", {"folder": str(folder)})
    agents.start(peers[0], "receiver", {"folder": str(folder)})
    agents.answers("ready")
    agents.agents[HUB].send_order(connect=[net.network.address(peers[0]), PORT])
    agents.agents[HUB].answer("connected")
    return peers[0]


def _cost(agents: Agents, name: str, state_bytes: int) -> Cost:
    agents.agents[HUB].send_order(costs=name)
    found = agents.agents[HUB].answer("costs")
    return Cost(state_bytes / found["encode_s"], state_bytes / found["decode_s"], found["bytes"] / state_bytes)


def _times(agents: Agents, name: str, rounds: int) -> float:
    """Return the best time over several rounds, after one warm-up: other load on the machine can only make a round
    slower. Slow rounds are repeated fewer times.
    """
    taken: list[float] = []
    hub = agents.agents[HUB]
    (peer,) = (agent for host, agent in agents.agents.items() if host != HUB)
    while len(taken) < (rounds + 1 if sum(taken) < ENOUGH_S else 2):
        peer.send_order(receive=name)
        hub.send_order(send=name)
        began_s = hub.answer("began_s")
        taken.append(peer.answer("done_s") - began_s)
    return min(taken[1:])


def expected_s(name: str, cost: Cost, way: BroadcastPath, state: StateSize) -> float:
    """Return the expected time. Only p2pcast's formats overlap encoding, sending and decoding."""
    return predict(cost, way, state).whole_s if name in OURS else sequential_s(cost, way, state)


def rows(
    costs: Mapping[str, Cost],
    way: BroadcastPath,
    state: StateSize,
    rate_bps: float,
    measured: Mapping[str, float | None],
) -> Iterator[dict[str, Any]]:
    """One row per format. ``measured``: seconds, if it was run. ``chosen``: whether p2pcast's rule chooses this format.
    ``to_best``: if it does, its time relative to the best p2pcast format's.
    """
    ours = {name: cost for name, cost in costs.items() if name in OURS}
    chosen = choose(ours, way, state).codec if ours else None
    predicted = {name: expected_s(name, cost, way, state) for name, cost in costs.items()}
    taken = {name: predicted[name] if (s := measured.get(name)) is None else s for name in costs}
    best = min(taken, key=lambda name: taken[name])
    for name, cost in costs.items():
        real = measured.get(name) is not None
        yield {"row": {
            "format": name, "rate_mbit_s": round(rate_bps / 1e6, 3), "simulated": not real, "state_bytes": state.nbytes,
            "bytes": round(state.nbytes * cost.share), "times_smaller": round(1 / cost.share, 1),
            "encode_gb_s": round(cost.encode_bytes_s / 1e9, 3), "decode_gb_s": round(cost.decode_bytes_s / 1e9, 3),
            "seconds": round(taken[name], 5), "predicted_s": round(predicted[name], 5),
            "predicted_over_measured": round(predicted[name] / taken[name], 4) if real else None,
            "chosen": name == chosen, "fastest": name == best,
            "to_best": round(taken[name] / min(taken[each] for each in ours), 4) if name == chosen else None,
            "to_best_of_all": round(taken[name] / taken[best], 4) if name == chosen else None,
        }}  # fmt: skip
