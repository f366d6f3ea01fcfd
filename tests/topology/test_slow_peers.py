"""How long a peer must be slow before the planner reacts, and which peer moves."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from topology.plan_changes import GAMMA
from topology.plan_tree import ROOT, Plan
from topology.slow_peers import HOPELESS, SLOW_HEAD_REPORTS, SLOW_REPORTS, SUSTAINED, Laggards, Patience, Stragglers

MBIT = 1e6
TWO = Plan((1, 1), {"a": ROOT, "b": "a", "c": "b", "d": ROOT, "e": "d"})


def test_a_change_has_to_be_wanted_several_times_in_a_row() -> None:
    patience = Patience()
    wanted = [True] * (SUSTAINED - 1) + [False] + [True] * (2 * SUSTAINED)
    assert [n for n, want in enumerate(wanted) if patience.wanted(want)] == [2 * SUSTAINED - 1, 3 * SUSTAINED - 1]


def test_hopeless_peers_are_detached_and_return_after_recovery() -> None:
    laggards = Laggards()
    others = dict.fromkeys("abc", 100 * MBIT)
    for bps, detached in ((20, 0), (20, 0), (20, 1), (80, 1), (95, 1), (95, 1), (95, 0), (30, 0)):
        assert len(laggards.update(others | {"x": bps * MBIT})) == detached
    for _ in range(SUSTAINED):
        laggards.update(others | {"x": MBIT})
    assert laggards.detached == {"x"}
    assert laggards.update(others) == frozenset()  # the laggard left


def run(
    stragglers: Stragglers, plan: Plan, looks: int, mbit: dict[str, float], behind_s: dict[str, float]
) -> list[tuple[int, str]]:
    """Reports of the same in a row, the parents' before their children's: the peers found, and at which report.
    `behind_s`: at 100 Mbit/s, more with each look.
    """
    return [
        (look, peer)
        for look in range(looks)
        for peer in plan.order
        if stragglers.found(
            plan, peer, float(look), mbit[peer] * MBIT, int(behind_s.get(peer, 0.0) * (look + 1) * 12.5e6)
        )
    ]


def test_only_the_first_slow_peer_of_a_chain_is_found() -> None:
    rates = {"a": 100.0, "b": 30.0, "c": 30.0, "d": 100.0, "e": 100.0}
    assert run(Stragglers(), TWO, 3, rates, {"b": 0.2, "c": 0.01}) == [(1, "b"), (2, "b")], (
        "not before it is well behind"
    )


def test_tails_and_uniformly_slow_fleets_are_no_stragglers() -> None:
    rates = dict.fromkeys("abde", 100.0)
    assert run(Stragglers(), TWO, 2, rates | {"c": 30.0}, {"c": 9.0}) == []
    assert run(Stragglers(), TWO, 2, dict.fromkeys("abcde", 20.0), {"b": 9.0}) == []


@pytest.mark.parametrize(("uplink", "looks"), [(200 * MBIT, SLOW_REPORTS), (130 * MBIT, SLOW_HEAD_REPORTS)])
def test_a_slow_head_is_found_if_others_are_faster(uplink: float, looks: int) -> None:
    """The hub is always ahead of it. While the uplink is full it may have got an uneven share, and is looked at
    longer.
    """
    heads = Plan((1, 1), {"a": ROOT, "b": "a", "c": ROOT, "d": "c", "e": "d"})
    stragglers, found = Stragglers(), []
    for look in range(SLOW_HEAD_REPORTS + 1):
        for peer in heads.order:
            mbit = 30 if peer in "ab" else 100
            if stragglers.found(heads, peer, float(look), mbit * MBIT, 10**9 if peer in "ac" else 0, uplink):
                found.append((look, peer))
    assert found[0] == (looks, "a")
    assert {peer for _, peer in found} == {"a"}


def test_a_peer_that_receives_nothing_is_no_straggler() -> None:
    assert run(Stragglers(), TWO, 3, dict.fromkeys("acde", 100.0) | {"b": 0.0}, {"b": 9.0}) == []


def test_over_a_long_way_a_move_costs_more_and_so_does_falling_behind() -> None:
    stragglers, found = Stragglers(), []
    for look in range(8):
        for peer in TWO.order:
            mbit = 30 if peer in "bc" else 100
            behind_bytes = look * 2_500_000 if peer == "b" else 0  # 0.2 s more at each look
            if stragglers.found(TWO, peer, float(look), mbit * MBIT, behind_bytes, span_s=1.1):
                found.append((look, peer))
    assert found[0] == (6, "b")


def test_reports_of_one_version_do_not_count_for_the_next() -> None:
    stragglers = Stragglers()
    run(stragglers, TWO, 1, dict.fromkeys("abcde", 100.0), {})
    stragglers.begin()
    assert not stragglers.found(TWO, "b", 5.0, 30 * MBIT, 10**9)


class Detaching(RuleBasedStateMachine):
    """A peer is detached, or returns, only after `SUSTAINED` plannings in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.laggards = Laggards()
        self.before: frozenset[str] = frozenset()
        self.history: dict[str, list[float]] = {}

    @rule(rates=st.dictionaries(st.sampled_from("pqrs"), st.sampled_from([1.0, 20.0, 60.0, 95.0, 100.0])))
    def plan(self, rates: dict[str, float]) -> None:
        bps = {"a": 100.0, "b": 100.0, "c": 100.0, "d": 100.0, "e": 100.0, **rates}
        self.before = self.laggards.detached
        self.laggards.update(bps)
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
