"""A collector of traces: OTLP over HTTP, read with OpenTelemetry's own protobuf types."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

OK, ERROR = 0, 2


class Collector:
    """``spans``: (service, instance, span) in the order of their arrival. ``status``: of its answers."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, Any]] = []
        self.status, self.requests, self.url = 200, 0, ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/traces", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        self.requests += 1
        if self.status != 200:
            return web.Response(status=self.status)
        found = ExportTraceServiceRequest.FromString(await request.read())
        for resource in found.resource_spans:
            facts = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(facts["service.name"], facts["service.instance.id"], span) for span in scope.spans]
        return web.Response()

    def named(self, name: str) -> list[Any]:
        return [span for _, _, span in self.spans if span.name == name]


def attributes(span: Any) -> dict[str, Any]:
    """Texts and numbers."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
