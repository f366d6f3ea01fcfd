from __future__ import annotations

from types import SimpleNamespace

import pytest

from p2pcast.ground.version import Version
from rollout_node.engine.commit_permission import CommitPermission, CommitRequests

ONE, TWO, THREE = (Version(0, n) for n in (1, 2, 3))


class Peer:
    def __init__(self, *, commits="auto", target=None, driver="peer", newest=None, listed=True, known=()) -> None:
        self.requests = CommitRequests()
        self.policy = CommitPermission(
            SimpleNamespace(commits=commits, target=target),
            SimpleNamespace(listed=listed, states=lambda: dict.fromkeys(known, 0)),
            SimpleNamespace(newest=newest),
            driver,
            self.requests,
        )

    def allowed(self, *versions) -> list[bool]:
        return [self.policy.may_commit(v) for v in versions]


def test_by_default_every_staged_version_is_committed():
    assert Peer().allowed(ONE, TWO) == [True, True]


@pytest.mark.parametrize("commits", ["manual", "barrier"])
def test_by_the_hubs_order_only_the_target_is_committed(commits):
    assert Peer(commits=commits).allowed(ONE, TWO) == [False, False]
    assert Peer(commits=commits, target=TWO).allowed(ONE, TWO, THREE) == [False, True, False]


def test_with_an_external_driver_only_requested_versions_are_committed():
    peer = Peer(driver="external", target=TWO)
    assert peer.allowed(ONE, TWO) == [False, False]
    with peer.requests.waiting_for(ONE):
        assert peer.allowed(ONE, TWO) == [True, False]
    assert peer.allowed(ONE, TWO) == [False, False]


def test_a_request_lasts_until_the_last_caller_has_left():
    requests = CommitRequests()
    with requests.waiting_for(ONE):
        with requests.waiting_for(ONE):
            pass
        assert requests.requested(ONE)
    assert not requests.requested(ONE)
    with pytest.raises(ZeroDivisionError), requests.waiting_for(ONE):
        _ = 1 / 0
    assert not requests.requested(ONE)


@pytest.mark.parametrize(
    ("newest", "listed", "known", "regression"),
    [
        (None, True, (), False),  # nothing was staged before
        (ONE, True, (), False),
        (TWO, True, (), False),  # the same version again
        (THREE, False, (), True),  # the hub has not listed its versions yet
        (THREE, True, (ONE, TWO), False),  # the run has lost it
        (THREE, True, (TWO, THREE), True),  # the run still has it
        (THREE, True, (Version(1, 0),), True),  # the run has a newer one
    ],
)
def test_no_engine_goes_back_for_versions_lost_by_this_peer_alone(newest, listed, known, regression):
    peer = Peer(newest=newest, listed=listed, known=known)
    assert peer.policy.is_regression(TWO) is regression
    assert peer.allowed(TWO) == [not regression]


def test_no_request_takes_an_engine_back_either():
    peer = Peer(driver="external", newest=THREE, known=(THREE,))
    with peer.requests.waiting_for(TWO):
        assert peer.allowed(TWO) == [False]
