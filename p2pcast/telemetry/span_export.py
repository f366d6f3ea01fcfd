"""Sends spans to a collector by OTLP over HTTP, as OpenTelemetry's environment variables say. Needs the extra ``otel``.

Guarantees: without ``OTEL_EXPORTER_OTLP_ENDPOINT`` or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` nothing is imported and
nothing is sent. A collector that is slow or away holds nothing up: spans are sent from a thread, the newest ``KEPT``
wait, and the others are dropped. Nothing else depends on a collector.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from p2pcast.ground.release import RELEASE
from p2pcast.ground.wakeup import Wakeup
from p2pcast.process.events import Events
from p2pcast.telemetry.span import TraceSpan
from p2pcast.telemetry.version_spans import Role, VersionSpans

logger = logging.getLogger("p2pcast.telemetry")

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
KEPT: Final = 4096
AT_ONCE: Final = 512
"""Maximum number of spans per request."""
EXPORT_S: Final = 1.0
"""Interval in seconds between two requests."""
TIMEOUT_S: Final = 10
"""Of one request with its repetitions, in seconds, unless OTEL_EXPORTER_OTLP_TIMEOUT says otherwise."""
END_S: Final = 2.0
"""Time in seconds for the last spans at the daemon's end."""


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether OpenTelemetry's environment variables request spans."""
    off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return not off and any(environment.get(name, "").strip() for name in ENDPOINTS)


class SpanExport:
    """Made by ``opened``. ``add`` from the event loop; ``run`` until cancelled, then ``close``."""

    def __init__(self, role: str, name: str) -> None:
        """Raises ImportError if the extra is not installed."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource

        self._exporter = OTLPSpanExporter(timeout=None if "OTEL_EXPORTER_OTLP_TIMEOUT" in os.environ else TIMEOUT_S)
        service = os.environ.get("OTEL_SERVICE_NAME") or f"p2pcast-{role}"
        self._resource = Resource.create(
            {"service.name": service, "service.version": RELEASE, "service.instance.id": name}
        )
        # The exporter logs every attempt; this module logs the first failure.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self._waiting: deque[TraceSpan] = deque(maxlen=KEPT)
        self._wakeup = Wakeup()
        self._failing = False
        self.dropped = 0
        """Number of spans that could not be delivered to a collector."""

    def add(self, span: TraceSpan) -> None:
        if len(self._waiting) == KEPT:
            self.dropped += 1
        self._waiting.append(span)
        self._wakeup.notify()

    async def follow(self, events: Events, spans: VersionSpans) -> None:
        """Add the spans of a daemon's events. Runs until cancelled."""
        seen = 0
        while True:
            missed, batch = events.after(seen)
            if missed is not None:
                seen = missed.to
            for event in batch:
                if (span := spans.take(event.kind, event.time_s, event.facts)) is not None:
                    self.add(span)
                seen = event.id
            if not batch:
                await events.wakeup.wait()

    async def run(self) -> None:
        """Send queued spans. Runs until cancelled."""
        while True:
            while not self._waiting:
                await self._wakeup.wait()
            await self._send()
            await asyncio.sleep(EXPORT_S)

    async def close(self) -> None:
        """Send the last spans, for at most END_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                while self._waiting:
                    await self._send()
        # Ends the repetitions of a request that still runs.
        threading.Thread(target=self._exporter.shutdown, name="p2pcast telemetry end", daemon=True).start()

    async def _send(self) -> None:
        batch = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
        took = await _in_daemon_thread(self._export, batch)
        if not took:
            self.dropped += len(batch)
        if took == self._failing:
            self._failing = not took
            if self._failing:
                logger.warning("the collector of OTEL_EXPORTER_OTLP_ENDPOINT takes no spans: they are dropped")
            else:
                logger.info("the collector takes spans; %d were dropped so far", self.dropped)

    def _export(self, batch: Sequence[TraceSpan]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        result = self._exporter.export([_read(span, self._resource) for span in batch])
        return bool(result is SpanExportResult.SUCCESS)


async def export_events(role: Role, name: str, events: Events) -> None:
    """Send the spans of a daemon's events until cancelled. Returns at once if no collector's address is set."""
    export = opened(role, name)
    if export is None:
        return
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(export.follow(events, VersionSpans(role, name, lambda: events.run)), name="spans")
            group.create_task(export.run(), name="collector")
    finally:
        await export.close()


def opened(role: str, name: str) -> SpanExport | None:
    """Return an export, or None if no collector's address is set or the extra is missing, which logs a warning."""
    if not is_wanted():
        return None
    try:
        return SpanExport(role, name)
    except ImportError as error:
        variables = " and ".join(ENDPOINTS)
        logger.warning("no spans are sent (%s): pip install 'p2pcast[otel]', or unset %s", error, variables)
        return None


async def _in_daemon_thread(call: Any, batch: Sequence[TraceSpan]) -> bool:
    """Call in a daemon thread. A process would wait for the threads of the loop's executor before it exits."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def answer(value: bool) -> None:
        if not done.done():
            done.set_result(value)

    def work() -> None:
        try:
            value = call(batch)
        except Exception as error:  # noqa: BLE001 - a fault of the exporter is one of the collector's
            logger.debug("spans were not sent: %r", error)
            value = False
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answer, value)

    threading.Thread(target=work, name="p2pcast telemetry", daemon=True).start()
    return bool(await done)


def _read(span: TraceSpan, resource: Any) -> Any:
    """Convert a span to the form that OpenTelemetry's exporter accepts."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

    def context(trace: int, one: int) -> SpanContext:
        return SpanContext(trace, one, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    return ReadableSpan(
        name=span.name,
        context=context(span.trace, span.span),
        parent=None if span.parent is None else context(span.trace, span.parent),
        resource=resource,
        attributes=dict(span.attributes),
        links=[Link(context(*link)) for link in span.links],
        kind=SpanKind.INTERNAL,
        status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=round(span.start_s * 1e9),
        end_time=round(span.end_s * 1e9),
    )
