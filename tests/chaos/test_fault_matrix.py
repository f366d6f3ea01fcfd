"""Faults in real processes during a broadcast: every survivor ends bit for bit, no peer receives a byte twice, and
disturbed processes rejoin.

Each fault occurs once, every position and every moment several times; ``python -m tests.chaos.faults`` runs all cases
and reports their times.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from netem.bench.model_agreement import learn, measure, simulated_s
from netem.emulation.description import HUB
from netem.emulation.loopback import Net
from netem.fleet.local_fleet import PEERS, LocalFleet
from p2pcast.artifact.piece_size import piece_bytes
from p2pcast.process import event_loop
from tests.chaos.daemon_logs import print_all
from tests.chaos.faults import FAULTS, MOMENTS, POSITIONS, PROGRAM, Case, matrix, run_case

CASES = [
    Case("garbage", "head", "start"),
    Case("mute", "head", "middle"),
    Case("one-way", "middle", "last"),
    Case("half-open", "tail", "middle"),
    Case("flap", "tail", "start"),
    Case("stop", "middle", "middle"),
    Case("kill", "head", "last"),
    Case("several", HUB, "last"),
]


class Stage:
    """A fleet, and the loop that runs the fleet and its network."""

    def __init__(self, fleet: LocalFleet, runner: asyncio.Runner) -> None:
        self.fleet = fleet
        self._runner = runner

    def play(self, act: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(act)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with (
        tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as folder,
        asyncio.Runner(loop_factory=event_loop.new_event_loop) as runner,
    ):
        fleet = LocalFleet(Path(folder), Net(2e6), PEERS, 2, 2_000_000, 900.0, PROGRAM)
        stage = Stage(fleet, runner)
        try:
            stage.play(fleet.__aenter__())
            yield stage
            stage.play(fleet.__aexit__())
        finally:
            print_all(fleet)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fault_in_mid_broadcast(stage, case):
    outcome = stage.play(run_case(stage.fleet, case))
    assert outcome.wrong == ()
    assert outcome.duplicate_bytes == 0


def test_a_broadcast_is_measured_although_the_middle_is_killed(stage):
    found = stage.play(measure(stage.fleet, "kill middle"))
    assert found.victim == found.chains[0][1]
    assert all(stage.fleet.exact(name) for name in stage.fleet.names)


@pytest.mark.prove
@pytest.mark.parametrize("scenario", ["undisturbed", "kill middle", "slow middle"])
def test_measured_and_simulated_broadcasts_take_similar_times(stage, scenario):
    """The bench reports how closely they agree, on an idle machine; here the ratio only has to be plausible."""
    first = stage.play(measure(stage.fleet, "undisturbed"))
    rate_bytes_s = stage.fleet.net.rate_bytes_s
    costs = learn(first.chains[0], first.times_s, first.payload_bytes, rate_bytes_s)
    assert 0.1 < costs.share < 1.1
    found = stage.play(measure(stage.fleet, scenario))
    assert (found.victim is None) == (scenario == "undisturbed")
    assert 0.2 < simulated_s(found, scenario, costs, 8 * rate_bytes_s) / found.last_s < 5
    assert all(stage.fleet.exact(name) for name in stage.fleet.names)


def test_swarm_completes_a_version_without_its_hub(stage):
    stage.play(_without_hub(stage.fleet))


async def _without_hub(fleet: LocalFleet) -> None:
    """The first chain has the whole version when the hub is killed for good: the other chain gets the rest from it."""
    first, second, *_ = await fleet.chains()
    before = {n: (await fleet.answers(n))["bytes_duplicate"] for n in fleet.names}
    fleet.net.rates[HUB, second[0]] = fleet.net.rate_bytes_s / 4
    fleet.net.reset()
    fleet.publish()
    await fleet.live(*first)
    await fleet.kill(HUB)
    assert fleet.net.flows[second[-1]].bytes < fleet.payload_bytes, "the kill came too late: the payload is too small"
    await fleet.live(*fleet.names)
    assert all(fleet.exact(n) for n in fleet.names)
    assert before == {n: (await fleet.answers(n))["bytes_duplicate"] for n in fleet.names}


def test_costs_follow_from_an_undisturbed_chain():
    costs = learn(["a", "b", "c"], {"a": 1.0, "b": 1.1, "c": 1.2}, 1_000_000, 1_250_000)
    assert costs.share == pytest.approx(0.8)
    assert costs.hop_s == pytest.approx(0.1 - piece_bytes(1_000_000) / 1e6)


def test_cases_cover_all_faults_positions_and_moments():
    assert set(CASES) < set(matrix())
    assert {c.fault for c in CASES} == set(FAULTS)
    assert {c.position for c in CASES} == set(POSITIONS)
    assert {c.moment for c in CASES} == set(MOMENTS)
