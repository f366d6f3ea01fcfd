"""Spans at a collector that speaks OTLP, one that fails, and one that is away: nothing waits for any of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from p2pcast.process.events import Events
from p2pcast.process.trace_ids import version_trace
from p2pcast.telemetry import span_export
from p2pcast.telemetry.span import TraceSpan
from tests.p2pcast.telemetry.collector import ERROR, Collector, attributes
from tests.support.until import until

RUN = "ab" * 16
DEADLINE_S = 120.0


@pytest.fixture
async def collector(monkeypatch) -> AsyncIterator[Collector]:
    monkeypatch.setattr(span_export, "EXPORT_S", 0.01)
    found = Collector()
    await found.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
    yield found
    await found.stop()


def span(number: int = 1) -> TraceSpan:
    trace = version_trace(RUN, f"0.{number}")
    return TraceSpan(name="publish", trace=trace, span=number, start_s=10.0, end_s=11.5, error="aborted")


async def test_events_of_a_daemon_reach_the_collector(collector: Collector) -> None:
    events = Events()
    events.run = RUN
    events.emit("opened", version="0.3")
    task = asyncio.create_task(span_export.export_events("hub", "h", events))
    events.emit("sealed", version="0.3", bytes=7)
    async with asyncio.timeout(DEADLINE_S):
        await until(lambda: collector.spans)
        events.emit("sealed", version="0.4", bytes=8)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    (service, instance, first) = collector.spans[0]
    assert (service, instance, first.name) == ("p2pcast-hub", "h", "publish")
    assert first.trace_id == version_trace(RUN, "0.3").to_bytes(16, "big")
    assert first.end_time_unix_nano > first.start_time_unix_nano > 1e18
    assert attributes(first) == {"p2pcast.run": RUN, "p2pcast.version": "0.3", "p2pcast.bytes": 7}


async def test_the_last_spans_are_sent_at_the_end(collector: Collector) -> None:
    export = span_export.opened("worker", "w")
    assert export is not None
    for number in range(1, 1001):
        export.add(span(number))
    await export.close()
    assert [one.span_id for _, _, one in collector.spans] == [n.to_bytes(8, "big") for n in range(1, 1001)]
    (_, _, one), *_ = collector.spans
    assert (one.start_time_unix_nano, one.end_time_unix_nano) == (10_000_000_000, 11_500_000_000)
    assert (one.status.code, one.status.message) == (ERROR, "aborted")


async def test_a_collector_that_refuses_is_told_of_once(collector: Collector, caplog, monkeypatch) -> None:
    caplog.set_level(logging.INFO)
    collector.status = 400
    export = span_export.opened("hub", "h")
    assert export is not None
    task = asyncio.create_task(export.run())

    def told() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name == "p2pcast.telemetry"]

    async with asyncio.timeout(DEADLINE_S):
        for refused in (1, 2, 3):
            export.add(span())
            await until(lambda: export.dropped, holds=refused.__le__)
        collector.status = 200
        export.add(span())
        await until(lambda: collector.spans)
        await until(lambda: len(told()) >= 2)
    task.cancel()
    await export.close()
    assert told() == [
        "the collector of OTEL_EXPORTER_OTLP_ENDPOINT takes no spans: they are dropped",
        "the collector takes spans; 3 were dropped so far",
    ]


async def test_a_collector_that_is_away_costs_spans_alone(monkeypatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    export = span_export.opened("hub", "h")
    assert export is not None
    for number in range(1, 2 * span_export.KEPT + 1):
        export.add(span(number))
    assert len(export._waiting) == span_export.KEPT
    assert export.dropped == span_export.KEPT
    async with asyncio.timeout(DEADLINE_S):
        await export.close()


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_environment_variables_ask_for_spans(variables: dict[str, str], wanted: bool) -> None:
    assert span_export.is_wanted(variables) is wanted


def test_a_missing_extra_is_named_in_a_warning(monkeypatch, caplog) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")

    def missing(self: object, role: str, name: str) -> None:
        raise ImportError("No module named 'opentelemetry'")

    monkeypatch.setattr(span_export.SpanExport, "__init__", missing)
    assert span_export.opened("hub", "h") is None
    assert "pip install 'p2pcast[otel]'" in caplog.text
