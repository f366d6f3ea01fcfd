"""The barrier's rounds in a fleet with delays, deaths and a trainer that never waits, in simulated time."""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.ground.version import Version
from trainer_node.commit.barrier import (
    Barrier,
    BarrierPhase,
    CommitVersion,
    Decision,
    EngineReport,
    Failed,
    HoldShadows,
    Left,
    Opened,
    PeerReported,
    Sealed,
    Tick,
    VersionAborted,
)

TIMEOUT_S = 30.0
DECODE_S = 0.02


class SimulatedPeer:
    """Keeps a real peer's rules: takes versions in order, holds at the ordered version, switches to a commanded version
    that it has staged.
    """

    def __init__(self, fleet: Fleet, name: str, stage_s: float) -> None:
        self.fleet = fleet
        self.name = name
        self.stage_s = stage_s
        self.staged: Version | None = None
        self.committed: Version | None = None
        self.target: Version | None = None
        self.hold: Version | None = None
        self.alive = True
        self.busy = False
        self.stuck = False
        self.history: list[Version] = []

    def hear(self, message: Decision) -> None:
        if not self.alive:
            return
        if isinstance(message, HoldShadows):
            self.hold = message.version
        elif isinstance(message, CommitVersion):
            self.target = message.version
        self.go_on()

    def go_on(self) -> None:
        if self.staged is not None and self.staged == self.target and self.committed != self.target:
            self.committed = self.target
            self.history.append(self.committed)
        self.report()
        sealed = self.fleet.sealed
        ahead = sealed[bisect.bisect(sealed, self.staged or Version(0, 0)) :]
        following = [] if self.hold is None else ahead[: bisect.bisect(ahead, self.hold)]
        if following and not (self.busy or self.stuck):
            self.busy = True
            # Only the last of several is installed; those on the way there are decoded.
            self.fleet.later(self.stage_s if len(following) == 1 else DECODE_S, lambda: self.arrive(following[0]))

    def arrive(self, version: Version) -> None:
        self.busy = False
        if self.alive:
            self.staged = version
            self.go_on()

    def report(self) -> None:
        engine = EngineReport(self.staged, self.committed, self.committed is not None and self.committed == self.target)
        self.fleet.to_hub(self, PeerReported(self.name, {"e": engine}))


class Fleet:
    def __init__(self, seed: int, quorum: float, timeout_s: float) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.barrier = Barrier(timeout_s, quorum)
        self.quorum = quorum
        self.peers: dict[str, SimulatedPeer] = {}
        self.sealed: list[Version] = []
        self.log: list[Decision] = []
        self._queue: list[tuple[float, int, Callable[[], Any]]] = []
        self._order = itertools.count()
        self.counted: dict[Version, set[str]] = {}
        """Committed version → the peers that were counted as having staged it."""
        self._clear: dict[tuple[str, str], float] = {}

    def later(self, delay_s: float, what: Callable[[], Any]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._order), what))

    def carry(self, way: tuple[str, str], what: Callable[[], Any]) -> None:
        """A message with its own delay, but never past an earlier one on the same path."""
        arrives = max(self.now + self.draw.uniform(0.0, 0.3), self._clear.get(way, 0.0))
        self._clear[way] = arrives
        self.later(arrives - self.now, what)

    def to_hub(self, peer: SimulatedPeer, event: PeerReported) -> None:
        self.carry((peer.name, "hub"), lambda: self.happen(event) if peer.alive else None)

    def happen(self, event: Any) -> None:
        for decision in self.barrier.handle(event, self.now):
            self.check(decision)
            self.log.append(decision)
            if isinstance(decision, HoldShadows | CommitVersion):
                for peer in list(self.peers.values()):
                    self.carry(("hub", peer.name), lambda p=peer, d=decision: p.hear(d))

    def check(self, decision: Decision) -> None:
        if isinstance(decision, CommitVersion):
            assert decision.version in self.sealed
            before = [d.version for d in self.log if isinstance(d, CommitVersion)]
            assert all(v < decision.version for v in before)
            assert decision.staged == decision.ready - len(decision.late)
            assert decision.staged >= max(1, self.quorum * decision.ready - 1e-9)
            if self.barrier.phase is BarrierPhase.SWITCHING:
                self.counted[decision.version] = {name for name, _ in self.barrier._round.waited}
                assert len(self.counted[decision.version]) <= decision.staged
        if isinstance(decision, Failed):
            assert decision.staged < decision.needed <= decision.ready

    def join(self, name: str, stage_s: float) -> SimulatedPeer:
        peer = self.peers[name] = SimulatedPeer(self, name, stage_s)
        peer.target, peer.hold = self.barrier.target, self.barrier.hold
        peer.go_on()
        return peer

    def die(self, name: str) -> None:
        peer = self.peers.pop(name)
        peer.alive = False
        self.happen(Left(name))

    def publish(self, version: Version) -> None:
        self.happen(Opened(version))

        def seal() -> None:
            self.sealed.append(version)
            self.happen(Sealed(version))
            for peer in list(self.peers.values()):
                peer.go_on()

        self.later(0.2, seal)

    def run(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.now, _, what = heapq.heappop(self._queue)
            what()
        self.now = until_s

    def every(self, period_s: float, what: Callable[[], Any], until_s: float) -> None:
        at_s = self.now + period_s
        while at_s < until_s:
            self.later(at_s - self.now, what)
            at_s += period_s


def fast_trainer(fleet: Fleet, period_s: float, until_s: float) -> None:
    steps = itertools.count(1)
    fleet.every(period_s, lambda: fleet.publish(Version(0, next(steps))), until_s)
    fleet.every(1.0, lambda: fleet.happen(Tick()), until_s + 1000)


def commits(fleet: Fleet) -> list[Version]:
    return [d.version for d in fleet.log if isinstance(d, CommitVersion)]


@pytest.mark.parametrize("seed", range(5))
def test_a_trainer_that_never_waits_starves_no_peer(seed):
    """Versions come ten times as fast as the fleet stages: rounds go on being committed, whole, and every peer goes
    through the very same versions.
    """
    fleet = Fleet(seed, 0.9, TIMEOUT_S)
    for name in "abcde":
        fleet.join(name, stage_s=fleet.draw.uniform(0.5, 3.0))
    fleet.run(1.0)
    fast_trainer(fleet, 0.3, 200.0)
    fleet.run(200.0)
    assert len(commits(fleet)) > 5
    assert not [d for d in fleet.log if isinstance(d, Failed)]
    fleet.run(1000.0)
    assert {tuple(p.history) for p in fleet.peers.values()} == {tuple(commits(fleet))}
    assert commits(fleet)[-1] == fleet.sealed[-1]


@pytest.mark.parametrize("seed", range(3))
def test_a_peer_that_cannot_keep_up_does_not_delay_the_others(seed):
    fleet = Fleet(seed, 0.7, 5.0)
    for name in "abcd":
        fleet.join(name, stage_s=0.5)
    fleet.run(1.0)
    fast_trainer(fleet, 1.0, 300.0)
    fleet.run(20.0)
    fleet.peers["d"].stage_s = 40.0
    fleet.run(350.0)
    assert len(commits(fleet)) > 30
    for name in "abc":
        assert fleet.peers[name].history == commits(fleet)
    late = fleet.peers["d"].history
    assert late == [v for v in commits(fleet) if v in late]


@given(
    seed=st.integers(0, 1 << 32),
    quorum=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    period_s=st.sampled_from([0.25, 1.0, 7.0]),
    happenings=st.lists(
        st.tuples(st.sampled_from(["join", "die", "stick", "free", "abort"]), st.floats(0.0, 120.0)), max_size=25
    ),
)
@settings(max_examples=60, deadline=None)
def test_rounds_are_sound_and_the_newest_version_is_committed_in_any_history(seed, quorum, period_s, happenings):
    """The invariants are in ``Fleet.check``; and a peer that was counted as having staged a version switches to that
    one, never past it.
    """
    fleet = Fleet(seed, quorum, 10.0)
    names = (f"p{n}" for n in itertools.count())
    for _ in range(3):
        fleet.join(next(names), fleet.draw.uniform(0.1, 4.0))

    def happen(what: str) -> None:
        chosen = fleet.draw.choice(sorted(fleet.peers)) if fleet.peers else None
        if what == "join":
            fleet.join(next(names), fleet.draw.uniform(0.1, 30.0))
        elif what == "abort" and fleet.barrier._opening is not None:
            fleet.happen(VersionAborted(fleet.barrier._opening))
        elif chosen is not None and what == "die":
            fleet.die(chosen)
        elif chosen is not None and what in ("stick", "free"):
            fleet.peers[chosen].stuck = what == "stick"
            fleet.peers[chosen].go_on()

    fast_trainer(fleet, period_s, 120.0)
    for what, when_s in happenings:
        fleet.later(when_s, lambda w=what: happen(w))
    fleet.run(130.0)
    for peer in fleet.peers.values():
        peer.stuck, peer.stage_s = False, 0.1
        peer.go_on()
    if not fleet.peers:
        fleet.join(next(names), 0.1)
    fleet.run(1000.0)
    done = commits(fleet)
    assert done[-1] == fleet.sealed[-1]
    for peer in fleet.peers.values():
        assert peer.committed == done[-1]
        assert peer.history == [v for v in done if v in peer.history]
        assert [v for v, names in fleet.counted.items() if peer.name in names and v not in peer.history] == []
