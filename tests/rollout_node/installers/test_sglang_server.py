"""Requests to a SGLang server, against an HTTP server that plays it. ``tests/rollout_node/sglang`` has the real one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from p2pcast.ground.errors import LocalError, P2PCastError, RetryableError
from rollout_node.installers.install_state import StillRunningError
from rollout_node.installers.sglang_server import SglangServer
from rollout_node.sglang_plugin import PREFIX

STATE = {"ranks": 4, "groups": 1, "stages": 1, "paused": True, "version": "0.3"}


class Engine:
    """``said``: the plugin's answer, or a whole answer with its status; ``first``: those before. ``shown``: the front
    end's version.
    """

    def __init__(self) -> None:
        self.shown = "0.3"
        self.requests: list[tuple[str, Any]] = []
        self.said: Any = {}
        self.first: list[Any] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if await request.read() else None
        if request.path == "/model_info":
            return web.json_response({"weight_version": self.shown})
        if request.path != "/weights_checker":
            self.requests.append((request.path, body))
            return web.json_response({"success": True})
        assert body["action"].startswith(PREFIX)
        self.requests.append(("command", json.loads(body["action"].removeprefix(PREFIX))))
        said = self.first.pop(0) if self.first else self.said
        if isinstance(said, tuple):
            return web.Response(status=said[0], text=said[1])
        return web.json_response({"success": True, "message": json.dumps(said)})


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def server(engine: Engine) -> AsyncIterator[SglangServer]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    found = SglangServer(f"http://{host}:{port}/", "sglang:x")
    found.open()
    yield found
    await found.close()
    await runner.cleanup()


Ask = Callable[[SglangServer], Awaitable[Any]]


@pytest.mark.parametrize(
    ("ask", "found"),
    [
        (lambda s: s.health(), None),
        (lambda s: s.world_size(), 4),
        (lambda s: s.label(), "0.3"),
        (lambda s: s.is_paused(), True),
    ],
    ids=["health", "world_size", "label", "is_paused"],
)
async def test_queries(engine: Engine, server: SglangServer, ask: Ask, found: Any) -> None:
    engine.said = STATE
    assert await ask(server) == found
    assert engine.requests == [("command", {"do": "state"})]


@pytest.mark.parametrize(
    ("ask", "requests"),
    [
        (lambda s: s.pause(clear_cache=True), [("/pause_generation", {"mode": "retract"}), ("/flush_cache", None)]),
        (lambda s: s.pause(clear_cache=False), [("/pause_generation", {"mode": "in_place"})]),
        (lambda s: s.resume(), [("/continue_generation", {"torch_empty_cache": False})]),
        (lambda s: s.clear_caches(), [("/flush_cache", None)]),
        (
            lambda s: s.set_label("0.3"),
            [
                ("command", {"do": "label", "version": "0.3"}),
                ("/update_weight_version", {"new_version": "0.3", "abort_all_requests": False}),
            ],
        ),
        (lambda s: s.init({"run": "r"}), [("command", {"do": "introduce", "run": "r"})]),
        (lambda s: s.begin(), [("command", {"do": "begin"})]),
        (lambda s: s.update({"phase": "commit"}, 5.0), [("command", {"do": "obey", "phase": "commit"})]),
        (lambda s: s.finish(), [("command", {"do": "finish"})]),
    ],
)
async def test_commands(engine: Engine, server: SglangServer, ask: Ask, requests: list[tuple[str, Any]]) -> None:
    await ask(server)
    assert engine.requests == requests


async def test_a_label_that_a_dead_peer_left_behind_is_found(engine: Engine, server: SglangServer) -> None:
    engine.said, engine.shown = STATE, "0.2"
    assert await server.label() == "0.3, and 0.2 at the front end"
    engine.said = STATE | {"version": "none"}
    assert await server.label() == "none, and 0.2 at the front end", "a scheduler that was started again"


async def test_a_switch_ends_the_pause_of_the_front_end(engine: Engine, server: SglangServer) -> None:
    engine.said = STATE
    assert await server.is_paused()
    engine.requests.clear()
    engine.said = {"reports": [], "core": {"switched": True, "resumed": True, "pause_us": 7}}
    for _ in range(2):
        await server.switch({"version": "0.3"}, 5.0)
    assert [path for path, _ in engine.requests] == [
        "command", "/continue_generation", "/update_weight_version", "command", "/update_weight_version"
    ]  # fmt: skip


@pytest.mark.parametrize("switched", [True, False])
async def test_a_switch_names_the_version_after_proofs_by_all_ranks(
    engine: Engine, server: SglangServer, switched: bool
) -> None:
    core = {"switched": switched, "resumed": switched, "pause_us": 7}
    engine.said = {"reports": [{"rank": 0}], "core": core}
    assert await server.switch({"version": "0.3"}, 5.0) == ([{"rank": 0}], core)
    label = [("/update_weight_version", {"new_version": "0.3", "abort_all_requests": False})]
    assert engine.requests == [("command", {"do": "switch", "version": "0.3"}), *(label if switched else [])]


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        ((200, '{"success": true, "message": "Success."}'), LocalError, "start the server with P2PCAST_SOCK"),
        ((200, "[]"), LocalError, "plugin does not answer"),
        ((200, ""), LocalError, "plugin does not answer"),
        ((200, '{"message": "[]"}'), LocalError, "plugin does not answer"),
        ((200, '{"message": "{}"}'), LocalError, "plugin does not answer"),
        ((400, '{"message": "p2pcast: RuntimeError: x"}'), LocalError, "status 400.*RuntimeError: x"),
        ((404, ""), LocalError, "is this a SGLang server of release"),
        ((503, "busy"), RetryableError, "see the server's log"),
        ({**STATE, "stages": 2}, LocalError, "--pp-size 2: SGLang cannot pause pipeline stages"),
        (
            (200, json.dumps({"message": " | ".join([json.dumps({**STATE, "groups": 2})] * 2)})),
            LocalError,
            "--dp-size 2: run one server for each group",
        ),
    ],
)
async def test_other_answers_are_clear_errors(
    engine: Engine, server: SglangServer, said: Any, kind: type[P2PCastError], text: str
) -> None:
    engine.said = said
    with pytest.raises(kind, match=text):
        await server.world_size()


async def test_a_drain_asks_until_running_requests_have_ended(engine: Engine, server: SglangServer) -> None:
    engine.first, engine.said = [{"over": False}] * 2, {"over": True}
    await server.drain(60.0)
    assert engine.requests == [("command", {"do": "hold"})] * 3


async def test_a_drain_ends_at_its_deadline(engine: Engine, server: SglangServer) -> None:
    engine.said = {"over": False}
    with pytest.raises(RetryableError, match=r"running requests did not end within 0\.01 s"):
        await server.drain(0.01)


async def test_a_busy_cache_is_no_failed_commit(engine: Engine, server: SglangServer) -> None:
    engine.said = {"reports": [], "core": {"switched": False, "resumed": True, "busy": True}}
    with pytest.raises(StillRunningError, match="cannot drop its cache now"):
        await server.switch({"version": "0.3"}, 5.0)
    assert engine.requests == [("command", {"do": "switch", "version": "0.3"})]
