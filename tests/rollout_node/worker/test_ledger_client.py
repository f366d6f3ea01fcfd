"""Answers of a ledger that are malformed, too large, or slow to come."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgpack
import numpy as np
import pytest
from aiohttp import web

from p2pcast.ground.errors import P2PCastError, RefusedError, RemoteError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.worker_api import Registration
from p2pcast.rollouts.result import Result
from rollout_node.worker import ledger_client
from rollout_node.worker.engine_versions import Served
from rollout_node.worker.ledger_client import REQUEST_S, LedgerClient


def made_result() -> Result:
    return Result(
        job=bytes(16), lease=bytes(16), task_hash=bytes(32), token_ids=np.zeros(1, "<u4"), mask=np.ones(1, "u1"),
        logprobs=np.zeros(1, "<f4"), spans=[], temperature=1.0, reward=0.0, stop="end",
    )  # fmt: skip


NODE = "ab" * 16
SESSION = bytes(range(16))
ABOUT = Registration("w", 1, "sums", bytes(32))
REGISTERED = {"session": SESSION.hex(), "worker": "ab" * 16}
SERVED = Served(Version(0, 1), bytes(32), None, NODE, "e")
ANSWERS: list[Any] = [
    None,
    [],
    {},
    7,
    {"leases": 3},
    {"leases": [3]},
    {"leases": [{}]},
    {"results": [None]},
    {"session": 1},
]


class Ledger:
    """Gives one answer to everything."""

    def __init__(self) -> None:
        self.status, self.body, self.kind = 200, b"", "application/json"
        self.bodies: list[bytes] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        return web.Response(status=self.status, body=self.body, content_type=self.kind)


@pytest.fixture
async def ledger() -> Ledger:  # type: ignore[override]
    return Ledger()


@pytest.fixture
async def client(ledger: Ledger) -> AsyncIterator[LedgerClient]:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/{path:.*}", ledger.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    async with aiohttp.ClientSession() as http:
        yield LedgerClient(http, f"http://{host}:{port}")
    await runner.cleanup()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_malformed_answer_is_one_of_our_errors(
    ledger: Ledger, client: LedgerClient, answer: Any, packed: bool
) -> None:
    ledger.body = msgpack.packb(answer) if packed else json.dumps(answer).encode()
    ledger.kind = "application/x-msgpack" if packed else "application/json"
    for asked in (
        client.register(ABOUT),
        client.lease(SESSION, 1, SERVED, 0.0),
        client.hand_in(SESSION, []),
    ):
        with pytest.raises(P2PCastError):
            await asked


async def test_an_answer_above_the_limit_is_not_read_to_its_end(
    ledger: Ledger, client: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_client, "MAX_ANSWER_BYTES", 1 << 20)
    ledger.body = bytes(1 << 24)
    with pytest.raises(RemoteError, match="larger than"):
        await client.lease(SESSION, 1, SERVED, 0.0)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refusal_carries_the_ledgers_text(ledger: Ledger, client: LedgerClient, status: int) -> None:
    ledger.status, ledger.body = status, b'{"error": "no such worker"}'
    with pytest.raises(RefusedError, match="no such worker"):
        await client.register(ABOUT)


async def test_results_have_time_for_their_checks(
    ledger: Ledger, client: LedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s = []

    class Recorded(aiohttp.ClientTimeout):
        def __init__(self, total: float) -> None:
            super().__init__(total)
            limits_s.append(total)

    monkeypatch.setattr(aiohttp, "ClientTimeout", Recorded)
    ledger.body = json.dumps(REGISTERED | {"heartbeat_s": 1, "check_s": 60}).encode()
    await client.register(ABOUT)
    ledger.body = b'{"results": []}'
    await client.hand_in(SESSION, [made_result()] * 3)
    await client.hand_in(SESSION, [])
    assert limits_s == [REQUEST_S, REQUEST_S + 2 * 3 * 60, REQUEST_S]


@pytest.mark.parametrize(("stated", "kept"), [("7.5", 7.5), ("0", 0.1), ("1e99", 600.0), ("-1", 0.1)])
async def test_heartbeats_follow_the_newest_interval(
    ledger: Ledger, client: LedgerClient, stated: str, kept: float
) -> None:
    ledger.body = json.dumps(REGISTERED | {"heartbeat_s": 3}).encode()
    await client.register(ABOUT)
    assert client.heartbeat_s == 3.0
    ledger.body = b'{"leases": [], "heartbeat_s": %s}' % stated.encode()
    await client.heartbeat(SESSION, {})
    assert client.heartbeat_s == kept
    ledger.body = b'{"leases": []}'
    await client.heartbeat(SESSION, {})
    assert client.heartbeat_s == kept, "a ledger that states none"


@pytest.mark.parametrize("interval", [b'"soon"', b"{}", b"NaN"])
async def test_an_interval_that_is_no_number_is_refused(ledger: Ledger, client: LedgerClient, interval: bytes) -> None:
    ledger.body = b'{"leases": [], "heartbeat_s": %s}' % interval
    with pytest.raises(RemoteError, match="v1/heartbeat"):
        await client.heartbeat(SESSION, {})


async def test_a_lease_request_names_the_engines_weights(ledger: Ledger, client: LedgerClient) -> None:
    ledger.body, ledger.kind = msgpack.packb({"leases": [], "finished": True, "retry_s": 1}), "application/x-msgpack"
    found = await client.lease(SESSION, 100, Served(Version(1, 7), b"\x01" * 32, Version(1, 8), NODE, "vllm:url"), 2.0)
    assert (found.finished, found.retry_s) == (True, 1.0)
    assert json.loads(ledger.bodies[0]) == {
        "session": SESSION.hex(),
        "slots": 32,
        "served": "1.7",
        "manifest": "01" * 32,
        "staged": "1.8",
        "engine": {"node": NODE, "name": "vllm:url"},
        "wait_s": 2.0,
    }
