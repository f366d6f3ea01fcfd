"""Versions of the hub: learnt once each, and no answer of a hub harms the ledger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from p2pcast.ground.errors import P2PCastError, RefusedError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from trainer_node.ledger_server import version_follower
from trainer_node.ledger_server.version_follower import VersionFollower
from trainer_node.scheduling.served_versions import EngineId, KnownEngine

RUN, HASH, NODE = "ab" * 16, "cd" * 32, "ef" * 16
SCHEDULE = "5c" * 32
GOOD = {
    "run": RUN, "head": "0.1", "manifests": {"0.0": HASH, "0.1": HASH}, "schedules": {"0.1": SCHEDULE}, "engines": {},
    "evicted": [NODE],
}  # fmt: skip


class Hub:
    def __init__(self) -> None:
        self.answer: bytes = json.dumps(GOOD).encode()
        self.status, self.asked, self.url = 200, 0, ""

    async def versions(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(body=self.answer, status=self.status)


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    found, app = Hub(), web.Application()
    app.router.add_get("/versions", found.versions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


class Followed:
    def __init__(self, http: aiohttp.ClientSession, url: str, run: str | None) -> None:
        self.learnt: list[tuple[Version, bytes, bytes | None]] = []
        self.fresh: list[str] = []
        """Versions that were learnt after the follower had caught up."""
        self.fails, self.moved, self.now_s = 0, 0, 0.0
        self.follower = VersionFollower(http, url, None, self._learn, self._move, run, lambda: self.now_s)

    def _move(self) -> None:
        self.moved += 1

    async def _learn(self, version: Version, manifest: bytes, schedule: bytes | None) -> None:
        if self.fails:
            self.fails -= 1
            raise RetryableError("the database failed")
        self.learnt.append((version, manifest, schedule))
        if self.follower.caught_up:
            self.fresh.append(str(version))


@pytest.fixture
async def followed(hub: Hub) -> AsyncIterator[Followed]:
    async with aiohttp.ClientSession() as http:
        yield Followed(http, hub.url, None)


async def test_each_version_is_learnt_once_and_in_order(hub: Hub, followed: Followed) -> None:
    followed.fails = 1
    with pytest.raises(RetryableError):
        await followed.follower.refresh()
    assert not followed.follower.reached
    for _ in range(2):
        await followed.follower.refresh()
    assert [str(version) for version, *_ in followed.learnt] == ["0.0", "0.1"]
    assert [schedule for *_, schedule in followed.learnt] == [None, bytes.fromhex(SCHEDULE)]
    assert followed.follower.evicted == {bytes.fromhex(NODE)}
    assert followed.follower.reached


async def test_concurrent_results_of_an_unknown_version_ask_the_hub_once(hub: Hub, followed: Followed) -> None:
    await asyncio.gather(*(followed.follower.ensure([Version(0, 1)]) for _ in range(20)))
    await followed.follower.ensure([Version(0, 0)])
    assert hub.asked == 1


async def test_versions_from_before_the_first_answer_are_no_news(hub: Hub, followed: Followed) -> None:
    await followed.follower.refresh()
    hub.answer = json.dumps(GOOD | {"manifests": GOOD["manifests"] | {"0.2": HASH}}).encode()
    await followed.follower.refresh()
    assert followed.fresh == ["0.2"]


@pytest.mark.parametrize(
    ("answer", "status", "kind"),
    [
        (b"", 200, RemoteError),
        (b"[]", 200, RemoteError),
        (b"null", 200, RemoteError),
        (json.dumps(GOOD | {"manifests": {"0.0": "cd"}}).encode(), 200, RemoteError),
        (json.dumps(GOOD | {"manifests": {"newest": HASH}}).encode(), 200, RemoteError),
        (json.dumps(GOOD | {"manifests": [HASH]}).encode(), 200, RemoteError),
        (json.dumps({k: v for k, v in GOOD.items() if k != "schedules"}).encode(), 200, RemoteError),
        (json.dumps(GOOD | {"schedules": {"0.1": "5c"}}).encode(), 200, RemoteError),
        (json.dumps(GOOD | {"schedules": {"0.1": None}}).encode(), 200, RemoteError),
        (json.dumps(GOOD | {"engines": []}).encode(), 200, RemoteError),
        (json.dumps(GOOD | {"engines": {NODE: {"engines": {"e": "0.1"}}}}).encode(), 200, RemoteError),
        (json.dumps(GOOD | {"engines": {NODE: {"staged": None, "engines": {"e": 1}}}}).encode(), 200, RemoteError),
        (json.dumps(GOOD | {"engines": {NODE: {"staged": "new", "engines": {"e": None}}}}).encode(), 200, RemoteError),
        (json.dumps(GOOD | {"evicted": [5]}).encode(), 200, RemoteError),
        (b" " * (version_follower.MAX_ANSWER_BYTES + 1), 200, RemoteError),
        (b"", 500, RetryableError),
        (b"", 401, RetryableError),
        (json.dumps(GOOD | {"run": "00" * 16}).encode(), 200, RefusedError),
    ],
)
async def test_a_bad_answer_teaches_nothing(hub: Hub, answer: bytes, status: int, kind: type[P2PCastError]) -> None:
    hub.answer, hub.status = answer, status
    async with aiohttp.ClientSession() as http:
        followed = Followed(http, hub.url, RUN)
        with pytest.raises(kind):
            await followed.follower.refresh()
        assert followed.learnt == []
        assert followed.follower.evicted == frozenset()


async def test_a_hub_out_of_reach_may_be_asked_again() -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(RetryableError, match="does not answer"):
            await Followed(http, "http://127.0.0.1:9", RUN).follower.refresh()


E = EngineId(NODE, "e")


def engines(served: str | None, staged: str | None = "0.1") -> bytes:
    return json.dumps(GOOD | {"engines": {NODE: {"staged": staged, "engines": {"e": served}}}}).encode()


async def test_engines_are_known_as_the_hub_says(hub: Hub) -> None:
    async with aiohttp.ClientSession() as http:
        followed = Followed(http, hub.url, None)
        follower = followed.follower
        assert follower.engine(E) is None
        for answer, known in (
            (engines("0.0"), KnownEngine(Version(0, 0), Version(0, 1))),
            (engines("0.1"), KnownEngine(Version(0, 1), Version(0, 1))),
            (engines(None, None), KnownEngine(None, None)),
            (json.dumps(GOOD).encode(), None),
        ):
            hub.answer = answer
            await follower.refresh()
            assert follower.engine(E) == known
            assert follower.engine(EngineId(NODE, "another")) is None
            assert follower.engine(EngineId("aa" * 16, "e")) is None


async def test_waiting_workers_are_told_once_of_each_change(hub: Hub) -> None:
    async with aiohttp.ClientSession() as http:
        followed = Followed(http, hub.url, None)
        for answer, told in ((engines("0.0"), 1), (engines("0.0"), 1), (engines("0.1"), 2), (engines("0.1"), 2)):
            hub.answer = answer
            await followed.follower.refresh()
            assert followed.moved == told


async def test_knowledge_of_engines_ends_while_the_hub_is_away(hub: Hub) -> None:
    async with aiohttp.ClientSession() as http:
        followed = Followed(http, hub.url, None)
        hub.answer = engines("0.0")
        await followed.follower.refresh()
        hub.status = 500
        followed.now_s = version_follower.KNOWN_S - 0.1
        with pytest.raises(RetryableError):
            await followed.follower.refresh()
        assert followed.follower.engine(E) is not None
        followed.now_s = version_follower.KNOWN_S
        assert followed.follower.engine(E) is None
        hub.status = 200
        await followed.follower.refresh()
        assert followed.follower.engine(E) is not None
