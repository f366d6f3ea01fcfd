"""Peers that are too far behind are found, and waited for no longer than needed."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.version import Version
from p2pcast.process.events import Events
from trainer_node.membership.engine_reports import EngineRow
from trainer_node.publish.backpressure import DETACHED, NO_ENGINE, Backpressure, PeersBehind, laggards

VERSION = st.builds(Version, st.integers(0, 2), st.integers(0, 9))


def engine(committed: Version | None, *, started: bool = True) -> EngineRow:
    return EngineRow("e", started=started, ready=committed is not None, staged=None, committed=committed)


@dataclass
class Follower:
    name: str
    engines: list[EngineRow]

    @property
    def ident(self) -> str:
        return self.name * 2


def follower(name: str, committed: Version | None) -> Follower:
    return Follower(name, [engine(committed)])


def late(*args) -> list[str]:
    return list(laggards(*args).late.values())


@given(st.lists(VERSION, max_size=9), st.none() | VERSION, st.integers(0, 10))
def test_versions_after_the_committed_one_are_counted_once_each(versions, committed, most):
    behind = len({v for v in versions if committed is None or v > committed})
    assert late([follower("a", committed)], versions, most) == (["a"] if behind > most else [])


def test_a_few_by_hand():
    versions = [Version(0, 1), Version(0, 2), Version(1, 2), Version(1, 2)]
    peers = [
        follower("none", None),
        follower("old", Version(0, 1)),
        follower("near", Version(0, 2)),
        follower("there", Version(1, 2)),
    ]
    assert late(peers, versions, 0) == ["none", "old", "near"]
    assert late(peers, versions, 1) == ["none", "old"]
    assert late(peers, versions, 2) == ["none"]
    assert late(peers, versions, 3) == []
    assert late(peers, [], 0) == []


def behind(names: list[str]) -> PeersBehind:
    return PeersBehind({f"id of {name}": name for name in names})


def test_peers_without_reachable_engines_and_detached_peers_are_not_waited_for():
    versions = [Version(0, n) for n in range(5)]
    peers = [
        Follower("relay", []),
        Follower("dead", [engine(None, started=False)]),
        Follower("half", [engine(None, started=False), engine(Version(0, 1))]),
        follower("slow", Version(0, 0)),
        follower("late", Version(0, 1)),
        follower("there", Version(0, 4)),
    ]
    lag = laggards(peers, versions, 1, {"slowslow"})
    assert list(lag.late.values()) == ["half", "late"]
    assert list(lag.excused.values()) == [("dead", NO_ENGINE), ("slow", DETACHED)]


async def test_no_peer_is_waited_for_for_ever(caplog):
    """A peer that holds back versions for too long is left out, until it has come near once more."""
    events = Events()
    far = ["a", "b"]
    pace = Backpressure(1, lambda most: behind(far), 0.05, events)
    async with asyncio.timeout(600):
        await pace.until_caught_up()
        assert pace.not_waited_for == {"a": "held back versions for 0.05 s", "b": "held back versions for 0.05 s"}
        await pace.until_caught_up()
        far = ["b"]
        await pace.until_caught_up()
    assert list(pace.not_waited_for) == ["b"]
    far = ["a", "b"]
    waiting = asyncio.ensure_future(pace.until_caught_up())
    await asyncio.sleep(0)
    assert pace.waiting_for == ["a"]
    async with asyncio.timeout(600):
        await waiting
    said = [r.getMessage() for r in caplog.records if "does not wait for" in r.getMessage()]
    assert [text.split()[5] for text in said] == ["a,", "b,", "a,"]


async def test_a_version_waits_until_every_engine_is_near_or_gone(caplog):
    caplog.set_level(logging.INFO, "p2pcast.hub")
    late = ["b", "a"]
    pace = Backpressure(2, lambda most: behind(late) if most == 2 else PeersBehind(), 0.0, Events())
    waiting = asyncio.ensure_future(pace.until_caught_up())
    await asyncio.sleep(0)
    assert pace.waiting_for == ["b", "a"]
    late = ["b"]
    pace.recheck()
    for _ in range(3):
        await asyncio.sleep(0)
    assert pace.waiting_for == ["b"]
    assert not waiting.done()
    late = []
    pace.recheck()
    async with asyncio.timeout(600):
        await waiting
    assert pace.waiting_for == []
    assert [r.getMessage() for r in caplog.records] == ["publishing waits: more than 2 versions behind: a, b"]


async def test_without_a_limit_no_peer_is_looked_at():
    def ask(most: int) -> PeersBehind:
        raise AssertionError

    await Backpressure(None, ask, 1.0, Events()).until_caught_up()


async def test_a_cancelled_wait_names_no_peer():
    pace = Backpressure(0, lambda most: behind(["a"]), 300.0, Events())
    waiting = asyncio.ensure_future(pace.until_caught_up())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pace.waiting_for == []
