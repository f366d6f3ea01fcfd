"""A ledger in memory that speaks the ledger's HTTP form: leases, heartbeats, returns and results of one task."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
from aiohttp import web

from p2pcast.daemon.http_caller import certified_caller
from p2pcast.ground.errors import P2PCastError
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import Result
from p2pcast.rollouts.return_reason import ReturnReason
from p2pcast.trust.dial_permissions import Certified

BEARER = "secret"
LEASE_S, LATEST_S = 30.0, 600.0


class MemoryLedger:
    def __init__(self) -> None:
        self.pool: deque[Job] = deque()
        self.leases: dict[bytes, Job] = {}
        self.tokens: dict[bytes, list[int]] = {}
        """Counts that heartbeats gave for each lease."""
        self.aborting: set[bytes] = set()
        self.returned: list[bytes] = []
        self.rejects = False
        """A job that was its own return's reason is leased no more."""
        self.reasons: list[tuple[str, str]] = []
        """Reason and detail of each lease that came back."""
        self.results: dict[tuple[bytes, bytes], Result] = {}
        self.settled: dict[bytes, Result] = {}
        self.bodies = 0
        """Results that came, repeated ones included."""
        self.finish_when_empty = False
        self.heartbeat_s = 0.1
        self.registrations: list[dict[str, Any]] = []
        self.heartbeats: list[dict[str, Any]] = []
        self.engines: list[dict[str, Any]] = []
        self.fails: Callable[[str], int | None] = lambda path: None
        """Path of a request → the status with which it fails before it acts; -1: it acts, and the answer is lost."""
        self.probe_sequences: list[list[int]] = []
        """The learner's probe set; empty: no learner probes."""
        self.probed: list[dict[str, Any]] = []
        self.session = 0
        self._number = 0
        self.run: bytes | None = None
        """The run whose workers' certificates admit; None: the bearer admits."""
        self.evicted: set[bytes] = set()
        self.callers: list[Certified] = []
        self.changed = asyncio.Condition()

    def add(self, jobs: Iterable[Job]) -> None:
        self.pool += jobs

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(condition)

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 30)
        app.router.add_post("/v1/workers", self._register)
        app.router.add_post("/v1/lease", self._lease)
        app.router.add_post("/v1/heartbeat", self._heartbeat)
        app.router.add_post("/v1/return", self._return)
        app.router.add_post("/v1/results", self._results)
        app.router.add_post("/v1/probes/take", self._take_probe)
        app.router.add_post("/v1/probes/report", self._report_probe)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"{'http' if tls is None else 'https'}://{host}:{port}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if (refused := self._refusal(request)) is not None:
            return refused
        fails = self.fails(request.path)
        if fails is not None and fails > 0:
            return web.json_response({"error": "as the test wants"}, status=fails)
        answer: web.StreamResponse = await handler(request)
        async with self.changed:
            self.changed.notify_all()
        if fails == -1:
            assert request.transport is not None
            request.transport.abort()
        return answer

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self.run is None:
            if request.headers.get("Authorization") != f"Bearer {BEARER}":
                return web.json_response({"error": "no bearer"}, status=401)
            return None
        try:
            found = certified_caller(request, self.run, self.evicted)
        except P2PCastError as error:
            return web.json_response({"error": str(error)}, status=403)
        if found is None or found.role != "worker":
            return web.json_response({"error": "no worker"}, status=401)
        assert "Authorization" not in request.headers
        self.callers.append(found)
        return None

    def _known(self, session: str) -> bool:
        return session == f"{self.session:032x}"

    async def _register(self, request: web.Request) -> web.Response:
        self.registrations.append(await request.json())
        self.session += 1
        return web.json_response(
            {"worker": "ab" * 16, "heartbeat_s": self.heartbeat_s, "session": f"{self.session:032x}"}
        )

    async def _take_probe(self, request: web.Request) -> web.Response:
        if not self.probe_sequences:
            return web.json_response({"error": "no learner probes"}, status=404)
        found = {} if self.probed else {"sequences": self.probe_sequences}
        return web.Response(body=msgpack.packb(found), content_type="application/x-msgpack")

    async def _report_probe(self, request: web.Request) -> web.Response:
        self.probed.append(await request.json())
        return web.json_response({"wanted": True})

    async def _lease(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self._known(body["session"]):
            return web.json_response({"error": "no such session"}, status=404)
        self.engines.append(body["engine"])
        rows = []
        while self.pool and len(rows) < body["slots"]:
            job, self._number = self.pool.popleft(), self._number + 1
            lease = self._number.to_bytes(16, "big")
            self.leases[lease] = job
            rows.append({"lease": lease, "job": job.to_bytes(), "expires_in_s": LEASE_S, "latest_in_s": LATEST_S})
        finished = self.finish_when_empty and not rows and not self.leases
        packed = msgpack.packb({"leases": rows, "finished": finished, "retry_s": 0.05})
        return web.Response(body=packed, content_type="application/x-msgpack")

    async def _heartbeat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self._known(body["session"]):
            return web.json_response({"error": "no such session"}, status=404)
        self.heartbeats.append(body)
        rows = []
        for row in body["leases"]:
            lease = bytes.fromhex(row["lease"])
            self.tokens.setdefault(lease, []).append(row["tokens"])
            state = "abort" if lease in self.aborting else "held" if lease in self.leases else "unknown"
            rows.append({"lease": row["lease"], "state": state, "expires_in_s": LEASE_S})
            if state == "abort":
                self.leases.pop(lease, None)
        return web.json_response({"leases": rows})

    async def _return(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self._known(body["session"]):
            return web.json_response({"error": "no such session"}, status=404)
        stated = {row["lease"]: (row["reason"], row["detail"]) for row in body["reasons"]}
        for text in body["leases"]:
            lease = bytes.fromhex(text)
            self.reasons.append(stated[text])
            if (job := self.leases.pop(lease, None)) is not None:
                self.returned.append(lease)
                if not (self.rejects and ReturnReason(stated[text][0]).fails_job):
                    self.pool.append(job)
        return web.json_response({})

    async def _results(self, request: web.Request) -> web.Response:
        body = msgpack.unpackb(await request.read())
        if not self._known(body["session"].hex()):
            return web.json_response({"error": "no such session"}, status=404)
        results = [Result.from_bytes(packed) for packed in body["results"]]
        self.bodies += len(results)
        if any(self.results.get((r.job, r.lease), r) != r for r in results):
            return web.json_response({"error": "another body"}, status=409)
        rows = []
        for result in results:
            key = (result.job, result.lease)
            self.leases.pop(result.lease, None)
            first = self.settled.setdefault(result.job, result)
            self.results[key] = result
            reason = None if first == result else "duplicate"
            verdict = "accepted" if reason is None else "rejected"
            rows.append({
                "job": result.job.hex(), "lease": result.lease.hex(), "verdict": verdict, "reason": reason,
                "detail": None,
            })  # fmt: skip
        return web.json_response({"results": rows})
