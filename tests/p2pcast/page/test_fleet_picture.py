"""The picture of a run, its alarms, and what changes between two pictures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.page.fleet_history import FleetHistory
from p2pcast.page.fleet_picture import apply, changes, picture

NOW = 1000.0


def engine(**other: Any) -> dict[str, Any]:
    return {"name": "vllm:x", "ready": True, "committed": "0.3", "pause_s": 0.01, "error": None} | other


def peer(name: str, *engines: dict[str, Any], **other: Any) -> dict[str, Any]:
    row = {
        "name": name,
        "region": "eu",
        "staged": "0.3",
        "parent": "hub",
        "reachable": True,
        "engines": list(engines or [engine()]),
    }
    return row | other


def run(*peers: dict[str, Any], **other: Any) -> dict[str, Any]:
    artifacts = [{"version": f"0.{n}", "kind": "delta" if n else "anchor", "bytes": 10 * n} for n in range(4)]
    return {"version": "0.3", "artifacts": artifacts, "peers": list(peers), "failures": []} | other


def seen(status: dict[str, Any]) -> dict[str, Any]:
    return picture(status, FleetHistory(), NOW)


def texts(status: dict[str, Any]) -> list[str]:
    return [alarm["text"] for alarm in seen(status)["alarms"]]


def test_a_healthy_run_says_so() -> None:
    found = seen(run(peer("a"), peer("b")))
    assert found["headline"] == {
        "level": "good",
        "text": "All 2 engines serve 0.3, the newest version.",
        "current": 2,
        "engines": 2,
        "peers": 2,
    }
    assert (found["alarms"], found["peers"]["a"]["behind"], found["peers"]["a"]["level"]) == ([], 0, "good")


def test_the_headline_names_peers_with_older_versions() -> None:
    found = seen(run(peer("a"), peer("b", engine(committed="0.2")), peer("c", engine(ready=False))))["headline"]
    assert found["level"] == "watch"
    assert found["text"] == (
        "1 of 3 peers needs a look: c. 2 of 3 engines do not serve 0.3, the newest version, at b, c."
    )
    found = seen(run(peer("a"), peer("b", engine(committed="0.2"))))["headline"]
    assert found["level"] == "moving"
    assert found["text"] == "1 of 2 engines does not serve 0.3, the newest version, at b."


def test_versions_behind_are_counted_by_the_slowest_engine() -> None:
    row = seen(run(peer("a", engine(), engine(committed="0.1"))))["peers"]["a"]
    assert row["behind"] == 2
    assert seen(run(peer("a", engine(committed="9.9"))))["peers"]["a"]["behind"] is None


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"failures": [{"task": "planning", "why": "x"}]}, "The hub's task planning has failed."),
        ({"skipped": {"step_7": "two files"}}, "Folder step_7 was not published: two files"),
        ({"waiting_for": ["a", "b", "c", "d", "e"]}, "The next version waits for a, b, c and 2 more."),
        ({"mirror": {"error": "denied"}}, "The mirror fails: denied"),
        ({"rollouts": {"age_s": 99.0}}, "The ledger has been silent for a while."),
        ({"rollouts": {"age_s": 1.0, "silent_workers": 3}}, "3 workers are silent."),
        ({"version": None}, "No version has been published yet."),
    ],
)
def test_each_trouble_of_the_hub_is_an_alarm_in_words(other: dict[str, Any], text: str) -> None:
    assert texts(run(peer("a"), **other)) == [text]
    found = seen(run(peer("a"), **other))["headline"]
    assert found["level"] in ("watch", "alarm")
    assert other.get("version", "0.3") is None or found["text"].startswith(text)


def test_a_run_without_peers_says_how_one_joins() -> None:
    found = seen(run())
    assert "p2pcast join" in found["alarms"][0]["do"]
    assert found["headline"]["text"] == "No engine serves 0.3 yet."


def test_alarms_come_before_passing_troubles() -> None:
    found = seen(run(peer("a", reachable=False), peer("b", quarantined=True)))
    assert [alarm["level"] for alarm in found["alarms"]] == ["alarm", "watch"]


@pytest.mark.parametrize(
    ("pieces", "of", "found"), [(3, 8, ("0.4", 0.375)), (0, 8, ("0.4", 0.0)), (8, 8, None), (0, 0, None), (9, 8, None)]
)
def test_progress_is_shown_until_a_version_is_whole(pieces: int, of: int, found: Any) -> None:
    row = peer("a", progress={"version": "0.4", "pieces": pieces, "of": of})
    assert seen(run(row))["peers"]["a"]["progress"] == found


rows = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2).map(lambda n: {"staged": n}))
pictures = st.builds(lambda peers, version: {"peers": peers, "version": version, "time": 1}, rows, st.integers(0, 2))


@given(pictures, pictures)
def test_changes_make_the_new_picture_of_the_old(old: dict[str, Any], new: dict[str, Any]) -> None:
    change = json.loads(json.dumps(changes(old, new)))
    assert apply(old, change) == new
    assert changes(new, new) == {"set": {}, "peers": {}}
