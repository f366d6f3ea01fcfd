"""A run from its recorded events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.ground.errors import UsageError
from p2pcast.page.fleet_history import FleetHistory
from p2pcast.page.fleet_picture import picture
from p2pcast.page.recorded_run import RecordedRun, read_events

SSE = """
: still here

id: 7
event: joined
data: {"time": 10.5, "peer": "a", "node": "00", "region": "eu", "staged": null}

id: 8
event: missed
data: {"since": 1, "to": 2, "restarted": false}

event: sealed
data: {"time": 11.0, "version": "0.1", "bytes": 5}
"""


def recorded() -> RecordedRun:
    run = RecordedRun()
    for name in ("a", "b"):
        run.apply("joined", 1.0, {"peer": name, "region": "eu", "staged": None})
    run.apply("plan", 1.0, {"epoch": [1, 1], "moved": [["a", "hub"], ["b", "a"], ["unknown", "a"]]})
    run.apply("sealed", 1.0, {"version": "0.1", "bytes": 5})
    for name in ("a", "b"):
        run.apply("staged", 1.0, {"peer": name, "version": "0.1", "after_s": 1.0})
        run.apply("committed", 1.0, {"peer": name, "engine": "e", "version": "0.1", "pause_s": 0.1, "after_s": 1.0})
    return run


def test_events_are_read_in_the_form_of_the_route() -> None:
    found = list(read_events(SSE.splitlines()))
    assert [(event.kind, event.time_s) for event in found] == [("joined", 10.5), ("sealed", 11.0)]
    assert found[1].facts == {"version": "0.1", "bytes": 5}


def test_events_are_read_from_lines_of_json() -> None:
    [found] = read_events(['{"id": 1, "kind": "sealed", "time": 3, "facts": {"version": "0.1"}}', ""])
    assert found == ("sealed", 3.0, {"version": "0.1"}, "")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is not a JSON object"),
        ("[" * 100_000, "line 1 is not JSON"),
        ('{"kind": 3, "time": 1}', "line 1 is no event"),
        ('{"kind": "x", "time": 1, "facts": 3}', "line 1 is no event"),
        ('{"kind": "x", "time": "now"}', "line 1 has no time"),
        ('{"kind": "x", "time": NaN}', "line 1 has no time"),
        ('{"kind": "x", "time": true}', "line 1 has no time"),
    ],
)
def test_other_lines_are_refused_by_number(line: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        list(read_events([line]))


def test_the_picture_of_a_recorded_run_is_that_of_a_live_one() -> None:
    found = picture(recorded().status(), FleetHistory(), 1.0)
    assert found["headline"]["text"] == "All 2 engines serve 0.1, the newest version."
    assert {name: row["parent"] for name, row in found["peers"].items()} == {"a": "hub", "b": "a"}


def test_failed_engines_and_lost_peers_are_seen() -> None:
    run = recorded()
    run.apply("unready", 1.0, {"peer": "a", "engine": "e", "version": None, "why": "no room"})
    run.apply("garbled", 1.0, {"peer": "a", "quarantined": True})
    run.apply("left", 1.0, {"peer": "b", "lost": True, "why": "silent"})
    found = picture(run.status(), FleetHistory(), 1.0)
    assert list(found["peers"]) == ["a"]
    assert found["peers"]["a"]["level"] == "alarm"
    assert found["peers"]["a"]["words"] == "other peers blame it: data was wrong or withheld; e: no room"
    assert found["gone"]["b"]["words"] == "lost since 1970-01-01 00:00:01 UTC: silent"
    assert found["headline"]["level"] == "alarm"


def test_a_failing_engine_that_still_serves_is_seen() -> None:
    run = recorded()
    run.apply("trouble", 1.0, {"peer": "a", "engine": "e", "why": "no room"})
    run.apply("trouble", 1.0, {"peer": "b", "engine": None, "why": None, "unready": [{"level": "watch", "words": "x"}]})
    found = picture(run.status(), FleetHistory(), 1.0)
    assert (found["peers"]["a"]["level"], found["peers"]["a"]["words"]) == ("alarm", "e: serves 0.1; no room")
    assert (found["peers"]["b"]["level"], found["peers"]["b"]["words"]) == ("watch", "x")
    run.apply("trouble", 1.0, {"peer": "a", "engine": "e", "why": None})
    assert picture(run.status(), FleetHistory(), 1.0)["peers"]["a"]["level"] == "good"


def test_an_evicted_peer_and_one_that_left_are_told_from_a_lost_one() -> None:
    run = recorded()
    run.apply("joined", 1.0, {"peer": "c", "node": "cc", "region": "", "staged": None})
    run.apply("evicted", 1.0, {"peer": "c", "node": "cc", "undone": False})
    run.apply("left", 1.0, {"peer": "c", "node": "cc", "lost": False, "why": None})
    run.apply("left", 1.0, {"peer": "b", "lost": False, "why": None})
    found = picture(run.status(), FleetHistory(), 1.0)
    assert {name: row["level"] for name, row in found["gone"].items()} == {"b": "gone", "c": "gone"}
    assert found["gone"]["b"]["words"].startswith("left at ")
    assert found["gone"]["c"]["words"].startswith("evicted; ")
    assert found["headline"]["level"] == "good"


facts = st.dictionaries(
    st.sampled_from(
        [
            "peer",
            "version",
            "engine",
            "moved",
            "bytes",
            "pause_s",
            "why",
            "region",
            "quarantined",
            "lost",
            "unready",
            "node",
            "undone",
        ]
    ),
    st.none()
    | st.integers()
    | st.just([{"level": "x", "words": "y"}])
    | st.text(max_size=4)
    | st.lists(st.text(max_size=2), max_size=3),
)
kinds = st.sampled_from(
    ["joined", "left", "plan", "sealed", "staged", "committed", "unready", "garbled", "trouble", "evicted"]
)


@given(st.lists(st.tuples(kinds, facts), max_size=30))
def test_no_event_fails(events: list[tuple[str, dict[str, Any]]]) -> None:
    run = RecordedRun()
    for kind, found in events:
        run.apply(kind, 1.0, found)
    picture(run.status(), FleetHistory(), 1.0)
