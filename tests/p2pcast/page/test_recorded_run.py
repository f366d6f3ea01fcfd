"""A run from its recorded events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcast.errors import UsageError
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
        run.apply("joined", {"peer": name, "region": "eu", "staged": None})
    run.apply("plan", {"epoch": [1, 1], "moved": [["a", "hub"], ["b", "a"], ["unknown", "a"]]})
    run.apply("sealed", {"version": "0.1", "bytes": 5})
    for name in ("a", "b"):
        run.apply("staged", {"peer": name, "version": "0.1", "after_s": 1.0})
        run.apply("committed", {"peer": name, "engine": "e", "version": "0.1", "pause_s": 0.1, "after_s": 1.0})
    return run


def test_events_are_read_in_the_form_of_the_route() -> None:
    found = list(read_events(SSE.splitlines()))
    assert [(event.kind, event.time_s) for event in found] == [("joined", 10.5), ("sealed", 11.0)]
    assert found[1].facts == {"version": "0.1", "bytes": 5}


def test_events_are_read_from_lines_of_json() -> None:
    [found] = read_events(['{"id": 1, "kind": "sealed", "time": 3, "facts": {"version": "0.1"}}', ""])
    assert found == ("sealed", 3.0, {"version": "0.1"})


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
    run.apply("unready", {"peer": "a", "engine": "e", "version": None, "why": "no room"})
    run.apply("garbled", {"peer": "a", "quarantined": True})
    run.apply("left", {"peer": "b", "lost": True})
    found = picture(run.status(), FleetHistory(), 1.0)
    assert list(found["peers"]) == ["a"]
    assert found["peers"]["a"]["marks"] == ["quarantined", "failed"]


facts = st.dictionaries(
    st.sampled_from(["peer", "version", "engine", "moved", "bytes", "pause_s", "why", "region", "quarantined"]),
    st.none() | st.integers() | st.text(max_size=4) | st.lists(st.text(max_size=2), max_size=3),
)
kinds = st.sampled_from(["joined", "left", "plan", "sealed", "staged", "committed", "unready", "garbled"])


@given(st.lists(st.tuples(kinds, facts), max_size=30))
def test_no_event_fails(events: list[tuple[str, dict[str, Any]]]) -> None:
    run = RecordedRun()
    for kind, found in events:
        run.apply(kind, found)
    picture(run.status(), FleetHistory(), 1.0)
