"""How old a peer's knowledge of the newest version is."""

from __future__ import annotations

from p2pcast.ground.version import Version
from rollout_node.control.freshness import Freshness


def test_nothing_heard_is_older_than_any_limit():
    fresh = Freshness(None, 100.0)
    assert fresh.age_s(100.0) is None
    assert fresh.stale(100.0, None) is None
    assert "has yet said" in (fresh.stale(100.0, 1e9) or "")


def test_saved_knowledge_is_as_old_as_its_file():
    fresh = Freshness((Version(0, 3), 20.0), 100.0)
    assert (fresh.age_s(105.0), fresh.source) == (25.0, "disk")
    assert fresh.stale(105.0, 25.0) is None
    assert "25 s old" in (fresh.stale(105.4, 25.0) or "")


def test_a_clock_that_was_set_back_makes_nothing_come_from_the_future():
    assert Freshness((Version(0, 3), -50.0), 100.0).age_s(101.0) == 1.0


def test_only_a_version_newer_than_all_before_makes_knowledge_fresher():
    """A parent that repeats old records changes nothing."""
    fresh = Freshness((Version(0, 3), 0.0), 100.0)
    fresh.note_version(Version(0, 3), 150.0)
    fresh.note_version(Version(0, 1), 160.0)
    assert fresh.age_s(200.0) == 100.0
    fresh.note_version(Version(0, 4), 170.0)
    assert (fresh.age_s(200.0), fresh.source) == (30.0, "swarm")
    fresh.note_version(Version(0, 4), 190.0)
    assert fresh.age_s(200.0) == 30.0


def test_the_latest_message_counts_from_any_source():
    fresh = Freshness(None, 0.0)
    fresh.note_source("hub", 10.0)
    fresh.note_source("mirror", 20.0)
    fresh.note_source("hub", 15.0)
    assert (fresh.age_s(30.0), fresh.source) == (10.0, "mirror")
