from __future__ import annotations

from rollout_node.control.activity import Activity


def test_a_change_of_state_is_announced_once():
    changes = []
    activity = Activity(lambda: changes.append(activity.state))
    for state in ("joining", "waiting", "waiting", "staged"):
        activity.enter(state)
    assert changes == ["waiting", "staged"]


def test_a_peer_that_is_ending_shows_that():
    activity = Activity(lambda: None)
    assert activity.shown == "joining"
    activity.draining = True
    assert activity.shown == "draining"
