"""A request is done for a caller that has the role when its body has come, not for one that had it before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from p2pcast.daemon.http_connections import CONNECTIONS, HttpConnections, HttpLimits
from p2pcast.ground.errors import RefusedError
from p2pcast.ledger_api import worker_api as workers
from p2pcast.ledger_api.api_route import ApiRoute
from p2pcast.rollouts.result import Result
from p2pcast.trust.dial_permissions import Certified
from trainer_node.ledger_server.api_server import ApiServer
from trainer_node.ledger_server.callers import Callers

ID, HASH = bytes(16), bytes(32)


class Stage:
    """A ledger's server whose requests do nothing but count, and whose one worker may be evicted."""

    def __init__(self) -> None:
        self.evicted, self.done, self.received = False, 0, asyncio.Event()
        server = ApiServer(Callers("bearer", self._certified))
        app = web.Application()
        app[CONNECTIONS] = HttpConnections(HttpLimits())
        app.add_routes(
            [
                server.on(workers.REGISTER, self._register),
                server.on_records(workers.RESULTS, "results", Result, self._results),
            ]
        )
        self.http = TestServer(app)

    def _certified(self, request: web.Request) -> Certified:
        self.received.set()
        if self.evicted:
            raise RefusedError("the worker was evicted")
        return Certified(ID, ID, "worker")

    async def _register(self, asked: workers.Registration) -> workers.Registered:
        self.done += 1
        return workers.Registered(ID, ID)

    async def _results(self, asked: workers.ResultsRequest, results: list[Result]) -> workers.ResultsAnswer:
        self.done += 1
        return workers.ResultsAnswer([])

    async def asked_in_halves(self, route: ApiRoute[Any, Any], body: bytes, *, evict: bool) -> int:
        """Status of the answer to a request between whose halves its caller may be evicted."""

        async def halves() -> Any:
            yield body[: len(body) // 2]
            await self.received.wait()
            self.evicted = evict
            yield body[len(body) // 2 :]

        headers = {"Content-Length": str(len(body)), "Content-Type": route.request_type}
        url = self.http.make_url(route.path)
        async with ClientSession() as http, http.post(url, data=halves(), headers=headers) as answer:
            return answer.status


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize(
    ("route", "asked"),
    [
        (workers.REGISTER, workers.Registration("w", 1, "sums", HASH)),
        (workers.RESULTS, workers.ResultsRequest(ID, [])),
    ],
    ids=["JSON", "records"],
)
async def test_nothing_is_done_for_a_caller_that_was_evicted_before_its_body_came(
    route: ApiRoute[Any, Any], asked: Any, evict: bool
) -> None:
    stage = Stage()
    async with stage.http:
        status = await stage.asked_in_halves(route, route.request(asked), evict=evict)
    assert (status, stage.done) == ((403, 0) if evict else (200, 1))
