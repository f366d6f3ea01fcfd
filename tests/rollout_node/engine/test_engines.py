from __future__ import annotations

from types import SimpleNamespace

import pytest
from recorder import Recorder

from p2pcast.ground.version import Version
from rollout_node.engine.engines import Engines
from rollout_node.engine.multi_host_installer import MultiHostInstaller
from rollout_node.installers.installer import Abilities

ONE, TWO, THREE = (Version(0, n) for n in (1, 2, 3))


class Runner(Recorder):
    def __init__(self, name, committed=None, *, ready=True, installer=None) -> None:
        super().__init__(
            installer=installer or SimpleNamespace(name=name, committed=committed),
            committed=committed,
            ready=ready,
            started=True,
            commits=1,
            report="a report",
            error=None,
        )
        row = {"name": name, "ready": ready, "committed": None if committed is None else str(committed), "error": None}
        self.answers = {"status": row, "settled": True}


class Peer:
    def __init__(self, *runners, commits="auto", target=None, lead=None, member=None) -> None:
        self.timeline, self.reports = Recorder(), 0
        self.orders = SimpleNamespace(commits=commits, target=target)
        self.engines = Engines(runners, lead, member, self.orders, self.timeline, self.report)

    def report(self) -> None:
        self.reports += 1


@pytest.mark.parametrize(
    ("served", "member", "committed"),
    [
        ((), "none", None),
        ((ONE, TWO), "none", ONE),
        ((ONE, None), "none", None),
        ((TWO,), ONE, ONE),
        ((TWO,), None, None),
        ((), TWO, TWO),
    ],
)
def test_the_peer_is_at_the_oldest_version_that_an_engine_serves(served, member, committed):
    runners = (Runner(str(n), v) for n, v in enumerate(served))
    peer = Peer(*runners, member=None if member == "none" else Recorder(serves=member))
    assert peer.engines.committed == committed


def test_patches_are_needed_from_the_oldest_version_that_is_installed():
    assert Peer().engines.oldest is None
    assert Peer(Runner("a", TWO), Runner("b", ONE), Runner("c")).engines.oldest == ONE
    peer = Peer(Runner("a", TWO), member=Recorder(serves=None))
    assert peer.engines.oldest == Version(0, 0)


def test_with_a_barrier_an_engine_behind_the_target_is_unready():
    peer = Peer(Runner("a", ONE), Runner("b", TWO), Runner("c"), commits="barrier", target=TWO)
    behind, there, empty = peer.engines.rows()
    assert (behind["ready"], behind["error"]) == (False, "version 0.1 while the others are at 0.2")
    assert (there["ready"], there["error"]) == (True, None)
    assert empty["ready"]  # as the runner says: there is no version to compare
    peer.orders.commits = "manual"
    assert all(row["ready"] for row in peer.engines.rows())


def test_a_staged_version_wakes_engines_lead_and_member():
    runner = Runner("a")
    peer = Peer(runner, lead=Recorder(), member=Recorder(serves=None))
    peer.engines.on_staged(TWO)
    assert peer.engines.lead.named("moved") == [TWO]
    assert peer.engines.member.names == ["moved"]
    assert "wake" in runner.names


async def test_a_moved_target_wakes_engines_and_is_reported():
    runner = Runner("a")
    peer = Peer(runner)
    peer.engines.on_target()
    assert "wake" in runner.names
    assert peer.reports == 1
    (((now,), _),) = peer.timeline.named("observe")
    assert (now.row["name"], now.commits, now.report) == ("a", 1, "a report")


async def test_a_change_wakes_waiters_and_tells_the_lead_the_served_version():
    led = MultiHostInstaller(SimpleNamespace(name="vllm", committed=ONE, abilities=Abilities()), Recorder())
    peer = Peer(Runner("folder", TWO), Runner("vllm", ONE, installer=led), lead=Recorder())
    rung = peer.engines.changed._event
    peer.engines.on_changed()
    assert peer.engines.lead.named("set_serving") == [(ONE, True)]
    assert rung.is_set()
    assert peer.reports == 1


def test_distrust_and_settled_ask_every_engine():
    first, second = Runner("a"), Runner("b")
    peer = Peer(first, second)
    peer.engines.distrust()
    assert "distrust" in first.names
    assert "distrust" in second.names
    assert peer.engines.settled(ONE)
    second.answers["settled"] = False
    assert not peer.engines.settled(ONE)
