"""Requests to a vLLM server, against an HTTP server that plays it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from p2pcast.ground.errors import LocalError, P2PCastError, RetryableError
from rollout_node.installers.engine_server import Deadlines
from rollout_node.installers.vllm_server import VllmServer

USAGE = 'vllm:kv_cache_usage_perc{engine="%d",model_name="m"} %s\n'
CONFIG = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0\n'
REPORTS = {"results": [{"rank": 0}, {"rank": 1}, {"resumed": True}]}


class Engine:
    """Records requests, and answers by path: with JSON or text, or with a status and a text."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        """Method, path with query, and body."""
        self.answers: dict[str, Any] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        self.requests.append((request.method, request.path_qs, json.loads(text) if text else None))
        answer = self.answers.get(request.path, "")
        if isinstance(answer, tuple):
            return web.Response(status=answer[0], text=answer[1])
        return web.Response(text=answer if isinstance(answer, str) else json.dumps(answer))


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def server(engine: Engine) -> AsyncIterator[VllmServer]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    found = VllmServer(f"http://{host}:{port}/", "vllm:x", Deadlines())
    found.open()
    yield found
    await found.close()
    await runner.cleanup()


Ask = Callable[[VllmServer], Awaitable[Any]]


@pytest.mark.parametrize(
    ("ask", "path", "answer", "found"),
    [
        (lambda s: s.health(), "/health", "", None),
        (lambda s: s.world_size(), "/get_world_size", {"world_size": 4}, 4),
        (lambda s: s.label(), "/weight_info", {"weight_version": "0.3"}, "0.3"),
        (lambda s: s.is_paused(), "/is_paused", {"is_paused": True}, True),
    ],
    ids=["health", "world_size", "label", "is_paused"],
)
async def test_queries(engine: Engine, server: VllmServer, ask: Ask, path: str, answer: Any, found: Any) -> None:
    engine.answers[path] = answer
    assert await ask(server) == found
    assert engine.requests == [("GET", path, None)]


@pytest.mark.parametrize(
    ("ask", "requests"),
    [
        (lambda s: s.pause(clear_cache=True), [("/pause?mode=keep&clear_cache=true", None)]),
        (lambda s: s.pause(clear_cache=False), [("/pause?mode=keep&clear_cache=false", None)]),
        (lambda s: s.resume(), [("/resume", None)]),
        (
            lambda s: s.clear_caches(),
            [
                ("/reset_prefix_cache?reset_running_requests=true&reset_external=true", None),
                ("/reset_encoder_cache", None),
            ],
        ),
        (lambda s: s.set_label("0.3"), [("/update_weight_version", {"new_version": "0.3"})]),
        (lambda s: s.init({"run": "r"}), [("/init_weight_transfer_engine", {"init_info": {"run": "r"}})]),
        (lambda s: s.begin(), [("/start_weight_update", None)]),
        (lambda s: s.update({"phase": "commit"}, 5.0), [("/update_weights", {"update_info": {"phase": "commit"}})]),
        (lambda s: s.finish(), [("/finish_weight_update", {})]),
    ],
)
async def test_commands(engine: Engine, server: VllmServer, ask: Ask, requests: list[tuple[str, Any]]) -> None:
    await ask(server)
    assert engine.requests == [("POST", path, body) for path, body in requests]


async def test_a_switch_returns_the_ranks_reports_and_the_cores(engine: Engine, server: VllmServer) -> None:
    engine.answers["/collective_rpc"] = REPORTS
    assert await server.switch({"version": "0.3"}, 5.0) == ([{"rank": 0}, {"rank": 1}], {"resumed": True})
    body = {"method": "p2pcast_switch", "kwargs": {"version": "0.3"}}
    assert engine.requests == [("POST", "/collective_rpc", body)]


@pytest.mark.parametrize("answer", ["", "no JSON", "[]", "{}", '{"results": null}', '{"results": []}'])
async def test_a_switch_without_reports_is_refused(engine: Engine, server: VllmServer, answer: str) -> None:
    engine.answers["/collective_rpc"] = answer
    with pytest.raises(LocalError, match="no reports in the answer"):
        await server.switch({}, 5.0)


@pytest.mark.parametrize(
    ("metrics", "tokens"),
    [
        (USAGE % (0, "0.25") + CONFIG, 4000),
        (USAGE % (0, "0.25") + USAGE % (1, "0.5") + CONFIG, 12000),
        (USAGE % (0, "0.0") + CONFIG, 0),
        (CONFIG, None),
        (USAGE % (0, "0.25"), None),
        (USAGE % (0, "0.25") + 'vllm:cache_config_info{block_size="16"} 1.0\n', None),
        ((404, "not found"), None),
        ((500, "broken"), None),
    ],
)
async def test_cached_tokens_are_counted_from_the_metrics(
    engine: Engine, server: VllmServer, metrics: Any, tokens: int | None
) -> None:
    engine.answers["/metrics"] = metrics
    assert await server.cached_tokens() == tokens


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        ((404, "not found"), LocalError, "POST /pause: status 404: not found; start it with VLLM_SERVER_DEV_MODE=1"),
        ((400, "no"), LocalError, "POST /pause: status 400: no"),
        ((500, "x" * 1000), RetryableError, f"POST /pause: status 500: {'x' * 300}; see the server's log"),
        ((503, "dead"), RetryableError, "POST /pause: status 503: dead; see the server's log"),
    ],
)
async def test_a_status_other_than_200_is_an_error(
    engine: Engine, server: VllmServer, answer: Any, kind: type[P2PCastError], text: str
) -> None:
    engine.answers["/pause"] = answer
    with pytest.raises(kind) as raised:
        await server.pause(clear_cache=True)
    assert str(raised.value) == f"vllm:x: {text}"


async def test_an_answer_that_is_not_json_is_refused(engine: Engine, server: VllmServer) -> None:
    engine.answers["/get_world_size"] = "<html>"
    with pytest.raises(LocalError, match="GET /get_world_size: not JSON; is this a vLLM server"):
        await server.world_size()


async def test_a_server_that_is_away_can_be_tried_again(server: VllmServer) -> None:
    away = VllmServer("http://127.0.0.1:1", "vllm:x", Deadlines())
    away.open()
    with pytest.raises(RetryableError, match=r"vllm:x: GET /health: .*is the server up"):
        await away.health()
    await away.close()


async def test_a_command_past_its_deadline_can_be_tried_again(engine: Engine, server: VllmServer) -> None:
    with pytest.raises(RetryableError, match=r"POST /update_weights: .*is the server up"):
        await server.update({}, 1e-6)


async def test_no_request_is_made_before_the_start_or_after_the_end(engine: Engine, server: VllmServer) -> None:
    await server.close()
    with pytest.raises(LocalError, match="not started"):
        await server.health()
    assert engine.requests == []
    server.open()
    server.open()
    await server.health()
    assert len(engine.requests) == 1
