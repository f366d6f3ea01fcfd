"""The ledger's summary at the hub, and the errors of a hub that fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from p2pcast.ground.errors import RemoteError, RetryableError
from trainer_node.ledger_server.summary_sender import MAX_ANSWER_BYTES, SummarySender

SUMMARY = {"task": "sums", "workers": 3}


class Hub:
    def __init__(self) -> None:
        self.received: list[tuple[str | None, Any]] = []
        self.status, self.url, self.answer = 200, "", b'{"drains": {"w": 60.0}}'

    async def rollouts(self, request: web.Request) -> web.Response:
        self.received.append((request.headers.get("Authorization"), await request.json()))
        return web.Response(status=self.status, body=self.answer)


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    found, app = Hub(), web.Application()
    app.router.add_post("/rollouts", found.rollouts)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    yield found
    await runner.cleanup()


async def send(url: str) -> list[Any]:
    """The orders of the answer."""
    found: list[Any] = []

    async def ordered(orders: Any) -> None:
        found.append(orders)

    async with aiohttp.ClientSession() as http:
        await SummarySender(http, url, "secret", lambda: SUMMARY, ordered).send()
    return found


async def test_the_hub_gets_the_summary_with_its_token(hub: Hub) -> None:
    assert await send(hub.url) == [{"w": 60.0}]
    assert hub.received == [("Bearer secret", SUMMARY)]


@pytest.mark.parametrize("answer", [b"no", b'{"a": ' + b" " * MAX_ANSWER_BYTES + b"1}"])
async def test_an_answer_of_another_form_is_refused(hub: Hub, answer: bytes) -> None:
    hub.answer = answer
    with pytest.raises(RemoteError, match="/rollouts is"):
        await send(hub.url)


async def test_a_hub_that_refuses_is_asked_again_later(hub: Hub) -> None:
    hub.status = 401
    with pytest.raises(RetryableError, match="/rollouts answered with status 401"):
        await send(hub.url)


async def test_a_hub_that_is_away_is_asked_again_later() -> None:
    with pytest.raises(RetryableError, match=":1/rollouts does not answer"):
        await send("http://127.0.0.1:1")
