"""Spans of a version, from the events of hub, peer and ledger: their times, and one trace without any exchange."""

from __future__ import annotations

from typing import Any

import pytest

from p2pcast.process.trace_ids import job_trace, span_id, version_trace
from p2pcast.telemetry.span import TraceSpan
from p2pcast.telemetry.version_spans import BEGUN_KEPT, Role, VersionSpans

RUN = "ab" * 16
TRACE = version_trace(RUN, "0.3")


def spans_of(role: Role, *events: tuple[str, float, dict[str, Any]], name: str = "a") -> list[TraceSpan]:
    made = VersionSpans(role, name, lambda: RUN)
    return [span for kind, time_s, facts in events if (span := made.take(kind, time_s, facts)) is not None]


def test_the_hub_tells_of_publishing_delivery_and_switches() -> None:
    publish, deliver, serve = spans_of(
        "hub",
        ("opened", 10.0, {"version": "0.3"}),
        ("sealed", 11.0, {"version": "0.3", "bytes": 5}),
        ("staged", 12.0, {"version": "0.3", "peer": "a", "after_s": 2.0}),
        ("committed", 13.0, {"version": "0.3", "peer": "a", "engine": "e", "after_s": 3.0, "pause_s": 0.25}),
    )
    assert {one.trace for one in (publish, deliver, serve)} == {TRACE}
    assert [(one.name, one.start_s, one.end_s) for one in (publish, deliver, serve)] == [
        ("publish", 10.0, 11.0),
        ("deliver", 10.0, 12.0),
        ("serve", 12.75, 13.0),
    ]
    assert (publish.parent, deliver.parent, serve.parent) == (None, publish.span, deliver.span)
    assert publish.attributes == {"p2pcast.run": RUN, "p2pcast.version": "0.3", "p2pcast.bytes": 5}
    assert serve.attributes["p2pcast.engine"] == "e"


def test_a_peer_continues_the_trace_of_the_hub() -> None:
    (deliver,) = spans_of("hub", ("staged", 12.0, {"version": "0.3", "peer": "a", "after_s": 2.0}))
    receive, stage, install, failed, refused = spans_of(
        "peer",
        ("received", 11.0, {"version": "0.3", "took_s": 0.5}),
        ("staged", 11.5, {"version": "0.3", "after_s": 1.0}),
        ("committed", 12.0, {"version": "0.3", "engine": "e", "pause_s": 0.1, "after_s": 0.5}),
        ("install_failed", 12.5, {"version": "0.3", "engine": "f", "why": "no memory"}),
        ("refused", 13.0, {"version": "0.4", "why": "corrupt"}),
    )
    assert {one.trace for one in (receive, stage, install, failed)} == {TRACE}
    assert {one.parent for one in (receive, stage, install, failed)} == {deliver.span}
    assert [(one.start_s, one.end_s) for one in (receive, stage, install)] == [(10.5, 11.0), (11.0, 11.5), (11.5, 12.0)]
    assert (failed.start_s, failed.end_s, failed.error) == (11.5, 12.5, "no memory")
    assert (refused.trace, refused.error) == (version_trace(RUN, "0.4"), "corrupt")


def test_the_ledger_tells_of_the_step_that_made_the_version() -> None:
    (train,) = spans_of(
        "ledger",
        ("learner_resumed", 1.0, {"epoch": 1, "branch": 0, "step": 2}),
        ("batch_taken", 5.0, {"batch": "b", "step": 2, "groups": 4, "groups_played": 6, "mean_reward": 0.5}),
        ("batch_applied", 9.0, {"batch": "b", "step": 3}),
    )
    assert (train.trace, train.start_s, train.end_s) == (TRACE, 5.0, 9.0)
    assert train.attributes["p2pcast.mean_reward"] == 0.5


def test_an_aborted_version_is_an_error() -> None:
    (publish,) = spans_of("hub", ("opened", 1.0, {"version": "0.3"}), ("aborted", 2.0, {"version": "0.3"}))
    assert (publish.start_s, publish.end_s, publish.error) == (1.0, 2.0, "aborted")


def test_events_before_the_run_is_known_make_no_span() -> None:
    run: list[str | None] = [None]
    made = VersionSpans("hub", "h", lambda: run[0])
    event = ("sealed", 1.0, {"version": "0.3", "bytes": 5})
    assert made.take(*event) is None
    run[0] = RUN
    assert made.take(*event) is not None


@pytest.mark.parametrize(
    "facts",
    [{}, {"version": "0.3"}, *({"version": "0.3", "peer": "a", "after_s": one} for one in (None, "x", float("nan")))],
)
def test_an_event_of_another_form_makes_no_span(facts: dict[str, Any]) -> None:
    assert spans_of("hub", ("staged", 1.0, facts), ("no_such_kind", 1.0, facts)) == []


def test_memory_of_versions_without_an_end_is_bounded() -> None:
    made = VersionSpans("hub", "h", lambda: RUN)
    for step in range(10 * BEGUN_KEPT):
        made.take("opened", 1.0, {"version": f"0.{step}"})
    assert len(made._begun) == BEGUN_KEPT


def test_ids_are_valid_and_differ() -> None:
    found = {version_trace(RUN, f"0.{step}") for step in range(1000)} | {version_trace("cd" * 16, "0.1")}
    assert len(found) == 1001
    assert version_trace("a", "b0.1") != version_trace("ab", "0.1")
    assert all(0 < one < 1 << 128 for one in found)
    assert 0 < span_id(TRACE, "publish") < 1 << 64
    assert job_trace(b"\x01" * 16) == int("01" * 16, 16)
    assert job_trace(bytes(16)) == 1
