"""How long slowness has to last, and who is taken out of whose way."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from topology.laggards import HOPELESS, SUSTAINED, Laggards, Patience, Stragglers
from topology.rebuild import GAMMA
from topology.tree import ROOT, Plan

MBIT = 1e6
CHAIN = Plan((1, 1), {"a": ROOT, "b": "a", "c": "b"})
FLOWING = {"a", "b", "c"}


def test_a_change_has_to_be_wanted_several_times_in_a_row() -> None:
    patience = Patience()
    wanted = [True] * (SUSTAINED - 1) + [False] + [True] * (2 * SUSTAINED)
    assert [n for n, want in enumerate(wanted) if patience.wanted(want)] == [2 * SUSTAINED - 1, 3 * SUSTAINED - 1]


def test_the_hopeless_are_detached_and_come_back_when_they_keep_up() -> None:
    laggards = Laggards()
    others = dict.fromkeys("abc", 100 * MBIT)
    for bps, detached in ((20, 0), (20, 0), (20, 1), (80, 1), (95, 1), (95, 1), (95, 0), (30, 0)):
        assert len(laggards.look(others | {"x": bps * MBIT})) == detached
    for _ in range(SUSTAINED):
        laggards.look(others | {"x": MBIT})
    assert laggards.detached == {"x"}
    assert laggards.look(others) == frozenset()  # it left


def run(stragglers: Stragglers, **rates: list[float]) -> list[tuple[int, str]]:
    """Reports a second apart, in Mbit/s received since the last: who is found, and when."""
    found, got = [], dict.fromkeys(rates, 0.0)
    for peer in rates:
        stragglers.heard(peer, CHAIN.parent[peer], 0.0, 0)
    stragglers.begin()
    for second in range(len(rates["a"])):
        for peer in rates:
            got[peer] += rates[peer][second] * MBIT / 8
            stragglers.heard(peer, CHAIN.parent[peer], second + 1.0, int(got[peer]))
            if stragglers.found(CHAIN, peer, second + 1.0, FLOWING) is not None:
                found.append((second + 1, peer))
    return found


def test_the_first_that_falls_behind_is_found_and_not_those_behind_it() -> None:
    assert run(Stragglers(), a=[100, 100, 100], b=[100, 30, 30], c=[100, 30, 30]) == [(2, "b")]  # then two of three are as slow


def test_a_tail_holds_nobody_up_and_a_slow_fleet_has_no_stragglers() -> None:
    assert run(Stragglers(), a=[100, 100], b=[100, 100], c=[30, 30]) == []
    assert run(Stragglers(), a=[100, 20, 20], b=[100, 20, 20], c=[100, 20, 20]) == []


def test_a_slow_head_is_found_if_others_are_faster() -> None:
    two = Plan((1, 1), {"a": ROOT, "b": "a", "c": ROOT, "d": "c", "e": "d"})
    stragglers = Stragglers()
    found = []
    for second, (slow, fast) in enumerate(((0, 0), (3, 12), (6, 24))):
        for peer in two.order:
            stragglers.heard(peer, two.parent[peer], float(second), 1_000_000 * (slow if peer in "ab" else fast))
        found.append([p for p in two.order if stragglers.found(two, p, float(second), set(two.order)) is not None])
        if second == 0:
            stragglers.begin()
    assert found == [[], [], ["a"]]


def test_who_was_moved_came_later_or_is_done_is_left_alone() -> None:
    stragglers = Stragglers()
    for peer in "ac":
        stragglers.heard(peer, CHAIN.parent[peer], 0.0, 0)
    stragglers.begin()
    for second in (1.0, 2.0):
        for peer, mb in (("a", 12), ("b", 3), ("c", 3)):
            stragglers.heard(peer, CHAIN.parent[peer], second, int(mb * second * 1e6))
    assert stragglers.found(CHAIN, "b", 2.0, FLOWING) is None  # first heard after the beginning
    stragglers.begin()
    for second in (3.0, 4.0):
        stragglers.heard("a", ROOT, second, int(12e6 * second))
        stragglers.heard("b", "a" if second < 4 else "elsewhere", second, int(3e6 * second))
    assert stragglers.found(CHAIN, "b", 4.0, FLOWING) is None  # moved
    stragglers.heard("a", ROOT, 5.0, int(60e6))
    stragglers.heard("b", "elsewhere", 5.0, int(15e6))
    assert stragglers.found(CHAIN, "b", 5.0, {"a", "c"}) is None  # done
    assert stragglers.found(CHAIN, "b", 5.0, FLOWING) is not None


class Detaching(RuleBasedStateMachine):
    """Nobody is detached, or put back, without having earned it `SUSTAINED` times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.laggards = Laggards()
        self.before: frozenset[str] = frozenset()
        self.history: dict[str, list[float]] = {}

    @rule(rates=st.dictionaries(st.sampled_from("pqrs"), st.sampled_from([1.0, 20.0, 60.0, 95.0, 100.0])))
    def plan(self, rates: dict[str, float]) -> None:
        bps = {"a": 100.0, "b": 100.0, "c": 100.0, "d": 100.0, "e": 100.0, **rates}
        self.before = self.laggards.detached
        self.laggards.look(bps)
        self.history = {p: [*self.history.get(p, []), rate] for p, rate in bps.items()}

    @invariant()
    def earned(self) -> None:
        for peer in self.laggards.detached - self.before:
            newest = self.history[peer][-SUSTAINED:]
            assert len(newest) == SUSTAINED
            assert all(rate * HOPELESS < 100.0 for rate in newest)
        for peer in self.before - self.laggards.detached:
            assert peer not in self.history or all(rate * GAMMA >= 100.0 for rate in self.history[peer][-SUSTAINED:])


Detaching.TestCase.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
TestDetaching = Detaching.TestCase
