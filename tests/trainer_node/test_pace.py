"""Who is too far behind, and that nobody is waited for longer than need be."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.version import Version
from trainer_node.pace import Pace, laggards

VERSION = st.builds(Version, st.integers(0, 2), st.integers(0, 9))


@dataclass
class Follower:
    name: str
    committed: Version | None


@given(st.lists(VERSION, max_size=9), st.none() | VERSION, st.integers(0, 10))
def test_versions_after_the_committed_one_are_counted_once_each(versions, committed, most):
    behind = len({v for v in versions if committed is None or v > committed})
    assert laggards([Follower("a", committed)], versions, most) == (["a"] if behind > most else [])


def test_a_few_by_hand():
    versions = [Version(0, 1), Version(0, 2), Version(1, 2), Version(1, 2)]
    peers = [
        Follower("none", None),
        Follower("old", Version(0, 1)),
        Follower("near", Version(0, 2)),
        Follower("there", Version(1, 2)),
    ]
    assert laggards(peers, versions, 0) == ["none", "old", "near"]
    assert laggards(peers, versions, 1) == ["none", "old"]
    assert laggards(peers, versions, 2) == ["none"]
    assert laggards(peers, versions, 3) == []
    assert laggards(peers, [], 0) == []


async def test_it_waits_until_the_last_has_come_near_or_left(caplog):
    caplog.set_level(logging.INFO, "p2pcast.hub")
    late = ["b", "a"]
    pace = Pace(2, lambda most: late if most == 2 else [])
    waiting = asyncio.ensure_future(pace.until_near())
    await asyncio.sleep(0)
    assert pace.waiting_for == ["b", "a"]
    late = ["b"]
    pace.moved()
    for _ in range(3):
        await asyncio.sleep(0)
    assert pace.waiting_for == ["b"]
    assert not waiting.done()
    late = []
    pace.moved()
    async with asyncio.timeout(10):
        await waiting
    assert pace.waiting_for == []
    assert [r.getMessage() for r in caplog.records] == ["publishing waits: more than 2 versions behind: a, b"]


async def test_without_a_limit_nobody_is_asked():
    def ask(most: int) -> list[str]:
        raise AssertionError

    await Pace(None, ask).until_near()


async def test_who_is_cancelled_waits_for_nobody():
    pace = Pace(0, lambda most: ["a"])
    waiting = asyncio.ensure_future(pace.until_near())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pace.waiting_for == []
