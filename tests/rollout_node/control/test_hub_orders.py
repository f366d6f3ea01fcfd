from __future__ import annotations

from recorder import Recorder

from p2pcast.ground.version import Version
from rollout_node.control.hub_orders import HubOrders

ONE, TWO = Version(0, 1), Version(0, 2)


def orders() -> tuple[HubOrders, Recorder]:
    saved = Recorder(commit="barrier", target=ONE, hold=TWO)
    return HubOrders(saved), saved


def test_without_any_order_engines_switch_by_themselves():
    made, saved = orders()
    assert (made.commits, made.target, made.hold) == ("auto", None, None)
    assert saved.calls == []


def test_orders_of_an_earlier_process_are_recalled():
    made, _ = orders()
    made.recall()
    assert (made.commits, made.target, made.hold) == ("barrier", ONE, TWO)


def test_every_order_is_saved():
    made, saved = orders()
    made.welcome("barrier", None)
    made.hold_at(TWO)
    made.commit_to(TWO)
    assert [facts for _, _, facts in saved.calls] == [
        {"commit": "barrier", "target": None, "hold": None},
        {"commit": "barrier", "target": None, "hold": "0.2"},
        {"commit": "barrier", "target": "0.2", "hold": "0.2"},
    ]


def test_only_a_barrier_holds_shadows_back():
    made, _ = orders()
    made.hold_at(TWO)
    made.welcome("barrier", ONE)
    assert made.hold == TWO
    made.welcome("auto", ONE)
    assert made.hold is None


def test_a_new_target_is_announced():
    made, _ = orders()
    seen = []
    made.target_observers.add(lambda: seen.append(made.target))
    made.hold_at(ONE)
    made.commit_to(ONE)
    assert seen == [ONE]
