"""/events, /wait and access rules over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from p2pcast.daemon import http_connections
from p2pcast.daemon import http_server as module
from p2pcast.daemon.http_access import HttpAccess
from p2pcast.daemon.http_connections import HttpLimits
from p2pcast.daemon.http_server import DaemonView, HttpServer, document_route
from p2pcast.daemon.request_body import read_json
from p2pcast.daemon.version_waits import VersionWaits
from p2pcast.ground.errors import LocalError, RefusedError, RetryableError, UsageError
from p2pcast.ground.version import Version
from p2pcast.process.events import Events
from tests.support.until import until

DEADLINE_S = 600.0
FOLDER = Path("/where")


class Daemon(DaemonView):
    """The parts of a daemon that the server needs; the version ``at`` is reached."""

    def __init__(self) -> None:
        self.events = Events()
        self.at = Version(0, 0)
        self.asked: list[float | None] = []
        self.fault: Exception | None = None
        self.http = HttpServer(
            self,
            HttpAccess("secret", FOLDER),
            self.events,
            {"fail": self._fail},
            waits=VersionWaits({"live": self._live}, lambda: self.at),
            routes=[document_route("versions", lambda: {"at": str(self.at)})],
        )

    def status(self) -> dict[str, Any]:
        return {}

    async def _fail(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self.fault is not None
        raise self.fault

    def _live(self, version: Version, fraction: float | None) -> tuple[bool, dict[str, Any]]:
        self.asked.append(fraction)
        return self.at >= version, {"at": str(self.at)}

    def reach(self, step: int) -> None:
        self.at = Version(0, step)
        self.events.emit("live", version=str(self.at))

    def url(self, path: str) -> str:
        host, port = self.http.address
        return f"http://{host}:{port}{path}"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP library closes no idle connection by itself. To be named before ``daemon``."""
    monkeypatch.setattr(module, "KEPT_S", 1e6)


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    daemon = Daemon()
    await daemon.http.start("127.0.0.1", 0)
    yield daemon
    async with asyncio.timeout(DEADLINE_S):
        await daemon.http.stop()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


class Reader:
    """Server-sent events, as a client sees them."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer

    async def line(self) -> str:
        async with asyncio.timeout(DEADLINE_S):
            return (await self.answer.content.readline()).decode()

    async def event(self) -> tuple[int, str, dict[str, Any]]:
        """The next event; comments are skipped."""
        fields: dict[str, str] = {}
        while True:
            line = await self.line()
            assert line, "the stream has ended"
            if line == "\n":
                if fields:
                    return int(fields["id"]), fields["event"], json.loads(fields["data"])
            elif not line.startswith(":"):
                name, _, value = line.rstrip("\n").partition(": ")
                fields[name] = value


@contextlib.asynccontextmanager
async def reading(
    client: aiohttp.ClientSession, daemon: Daemon, query: str = "", **headers: str
) -> AsyncIterator[Reader]:
    """Connected: the first line has come."""
    async with client.get(daemon.url(f"/events{query}"), headers=headers) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream"
        yield Reader(answer)


# -- /events


async def test_events_are_streamed_live(daemon, client):
    daemon.events.emit("before")
    async with reading(client, daemon) as reader:
        assert await reader.line() == ": still here\n"
        daemon.reach(7)
        ident, kind, data = await reader.event()
        assert (ident, kind, data["version"]) == (daemon.events.newest, "live", "0.7")
        assert abs(data["time"] * 1e6 - ident) < 60e6
        daemon.reach(8)
        assert (await reader.event())[2]["version"] == "0.8"


async def test_a_returning_reader_resumes_after_its_last_event(daemon, client):
    for step in range(5):
        daemon.reach(step)
    async with reading(client, daemon, "?since=0") as reader:
        assert [(await reader.event())[2]["version"] for _ in range(5)] == [f"0.{n}" for n in range(5)]
    middle = str(daemon.events.newest - 2)
    async with reading(client, daemon, f"?since={middle}") as reader:
        assert (await reader.event())[2]["version"] == "0.3"
    # The header of a browser's EventSource takes precedence over the query.
    async with reading(client, daemon, "?since=0", **{"Last-Event-ID": middle}) as reader:
        assert (await reader.event())[2]["version"] == "0.3"


async def test_a_reader_is_told_the_number_of_missed_events(daemon, client):
    daemon.events = daemon.http._events = Events(kept=4)
    for step in range(10):
        daemon.reach(step)
    since = daemon.events.newest - 8
    async with reading(client, daemon, f"?since={since}") as reader:
        assert await reader.event() == (since + 4, "missed", {"since": since, "to": since + 4, "restarted": False})
        assert (await reader.event())[2]["version"] == "0.6"
    assert daemon.events.dropped == 4


async def test_heartbeats(daemon, client, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.01)
    async with reading(client, daemon) as reader:
        for _ in range(3):
            assert await reader.line() == ": still here\n"
            assert await reader.line() == "\n"


@pytest.mark.parametrize("since", ["x", "-1", "1e3", "9" * 30, "²"])
async def test_an_invalid_event_id_is_refused(daemon, client, since):
    async with client.get(daemon.url("/events"), params={"since": since}) as answer:
        assert answer.status == 400
        assert "event's id" in (await answer.json())["error"]


async def test_readers_are_counted_and_there_are_not_too_many(daemon, client, monkeypatch):
    monkeypatch.setattr(module, "MAX_READERS", 2)
    monkeypatch.setattr(module, "CHECK_S", 0.01)
    async with reading(client, daemon) as one, reading(client, daemon) as two:
        await one.line()
        await two.line()
        assert daemon.events.readers == 2
        async with client.get(daemon.url("/events")) as answer:
            assert answer.status == 503
            assert "2 readers" in (await answer.json())["error"]
    await until(lambda: daemon.events.readers == 0)
    async with reading(client, daemon) as reader:
        await reader.line()


async def test_strangers_leave_places_for_readers_with_the_bearer(daemon, client, monkeypatch):
    monkeypatch.setattr(module, "MAX_READERS", 1)
    monkeypatch.setattr(module, "MAX_WAITERS", 1)
    bearer = {"Authorization": "Bearer secret"}
    async with reading(client, daemon), client.get(daemon.url("/events")) as refused:
        assert refused.status == 503
        async with reading(client, daemon, **bearer) as reader:
            await reader.line()
            async with client.get(daemon.url("/events"), headers=bearer) as refused:
                assert refused.status == 503
    waiting = asyncio.create_task(client.get(daemon.url("/wait?version=0.9")))
    await until(lambda: bool(daemon.asked))
    async with client.get(daemon.url("/wait?version=0.0"), headers=bearer) as answer:
        assert answer.status == 200
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_a_reader_that_takes_nothing_is_dropped(daemon, monkeypatch):
    """Other readers go on, and the sockets' buffers bound the data that waits for it."""
    monkeypatch.setattr(module, "SLOW_S", 0.2)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(daemon.http.address)
    slow.sendall(b"GET /events?since=0 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        await until(lambda: daemon.events.readers == 1)
        for n in range(4096):
            daemon.events.emit("much", n=n, text="x" * 1000, more="y" * 1000)
        await until(lambda: daemon.events.readers == 0)
        assert daemon.events.dropped > 0
    finally:
        slow.close()


async def test_the_daemon_ends_despite_open_requests(daemon, client):
    async with reading(client, daemon) as reader:
        await reader.line()
        asking = asyncio.create_task(client.get(daemon.url("/wait?version=0.9&timeout_s=3000")))
        await until(lambda: bool(daemon.asked))
        async with asyncio.timeout(DEADLINE_S):
            await daemon.http.stop()
            answer = await asking
        assert answer.status == 503
        assert (await answer.json())["error"] == "the daemon is stopping"
        async with asyncio.timeout(DEADLINE_S):
            assert await reader.answer.content.read() == b"\n"


# -- /wait


async def test_wait_answers_at_once_when_reached(daemon, client):
    daemon.reach(3)
    async with client.get(daemon.url("/wait?version=0.2")) as answer:
        assert answer.status == 200
        document = await answer.json()
    assert document.pop("waited_s") < DEADLINE_S
    assert document == {"version": "0.2", "what": "live", "at": "0.3"}
    assert daemon.asked == [None]


async def test_wait_answers_once_reached(daemon, client):
    asking = asyncio.create_task(client.get(daemon.url("/wait?version=0.2&fraction=0.5")))
    await until(lambda: bool(daemon.asked))
    daemon.reach(1)
    daemon.reach(2)
    async with asyncio.timeout(DEADLINE_S):
        answer = await asking
    assert (answer.status, (await answer.json())["at"]) == (200, "0.2")
    assert set(daemon.asked) == {0.5}


async def test_a_step_is_waited_for_on_the_newest_branch(daemon, client):
    daemon.at = Version(2, 3)
    async with client.get(daemon.url("/wait?step=3")) as answer:
        assert (answer.status, (await answer.json())["version"]) == (200, "2.3")
    asking = asyncio.create_task(client.get(daemon.url("/wait?step=7")))
    await until(lambda: len(daemon.asked) > 1)
    daemon.at = Version(3, 1)
    daemon.events.emit("live", version="3.1")
    asked = len(daemon.asked)
    await until(lambda: len(daemon.asked) > asked)
    assert not asking.done()
    daemon.at = Version(3, 8)
    daemon.events.emit("live", version="3.8")
    async with asyncio.timeout(DEADLINE_S):
        answer = await asking
    assert (answer.status, (await answer.json())["version"]) == (200, "3.7")


@pytest.mark.parametrize("timeout", ["0", "0.02"])
async def test_wait_answers_408_after_its_timeout(daemon, client, timeout):
    async with client.get(daemon.url(f"/wait?version=0.2&timeout_s={timeout}")) as answer:
        assert answer.status == 408
        document = await answer.json()
    assert document["error"] == f"version 0.2 is not live after {timeout} s"
    assert document["at"] == "0.0"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("step=x", "is not a number from 0 to"),
        ("step=-1", "is not a number from 0 to"),
        ("step=" + "9" * 19, "is not a number from 0 to"),
        ("step=1&version=0.1", "one of version=BRANCH.STEP, step=STEP"),
        ("", "BRANCH.STEP"),
        ("version=newest", "BRANCH.STEP"),
        ("version=0.1&what=love", "what='love' cannot be waited for: give one of live"),
        ("version=0.1&timeout_s=soon", "timeout_s='soon' is not a number from 0 to 3600"),
        ("version=0.1&timeout_s=nan", "is not a number"),
        ("version=0.1&timeout_s=-1", "is not a number"),
        ("version=0.1&timeout_s=1e9", "is not a number"),
        ("version=0.1&fraction=1.5", "fraction='1.5' is not a number from 0 to 1"),
    ],
)
async def test_nonsense(daemon, client, query, said):
    async with client.get(daemon.url(f"/wait?{query}")) as answer:
        assert answer.status == 400
        assert said in (await answer.json())["error"]
    assert daemon.asked == []


async def test_waiting_requests_are_bounded(daemon, client, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITERS", 1)
    monkeypatch.setattr(module, "CHECK_S", 0.01)
    first = asyncio.create_task(client.get(daemon.url("/wait?version=0.9")))
    await until(lambda: bool(daemon.asked))
    async with client.get(daemon.url("/wait?version=0.9")) as answer:
        assert answer.status == 503
    # A disconnected request no longer counts.
    first.cancel()
    await asyncio.wait([first])
    await until(lambda: daemon.http._waiting == 0)


# -- permissions and errors


@pytest.mark.parametrize("path", ["/events", "/wait"])
@pytest.mark.parametrize(("token", "code"), [(None, 401), ("Bearer wrong", 401), ("Bearer secret", 200)])
async def test_remote_callers_need_the_token(daemon, path, token, code):
    elsewhere = SimpleNamespace(
        path=path,
        method="GET",
        headers={} if token is None else {"Authorization": token},
        remote="192.0.2.7",
        protocol=None,
        transport=None,
    )

    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=200)

    assert (await daemon.http._guard(elsewhere, handler)).status == code


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (UsageError("nonsense"), 400),
        (RefusedError("not staged"), 409),
        (RetryableError("no answer in time"), 504),
        (LocalError("disk full"), 500),
    ],
)
async def test_each_kind_of_error_has_its_http_status(daemon, client, fault, code):
    daemon.fault = fault
    async with client.post(daemon.url("/fail"), json={}, headers={"Authorization": "Bearer secret"}) as answer:
        assert (answer.status, await answer.json()) == (code, {"error": str(fault)})


# -- web pages


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 401),
        ({"Host": "localhost:7078"}, 401),
        ({"Host": "[::1]:7078"}, 401),
        ({"Host": f"{socket.gethostname()}:7078"}, 401),
        ({"Host": "127.0.0.1:7078", "Origin": "http://127.0.0.1:7078"}, 401),
        ({"Origin": "https://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "127.0.0.1:7078", "Origin": "http://127.0.0.1:8000"}, 403),
        ({"Host": "rebound.example:7078"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "127.0.0.1.rebound.example"}, 403),
        ({"Host": "[::1].rebound.example"}, 403),
        ({"Host": "127.0.0.1:7078@rebound.example"}, 403),
        ({"Host": "rebound.example", "Authorization": "Bearer secret"}, 409),
    ],
)
async def test_web_pages_of_other_origins_are_refused(daemon, client, headers, code):
    daemon.fault = RefusedError("reached")
    async with client.post(daemon.url("/fail"), data="{}", headers=headers) as answer:
        assert answer.status == code


@pytest.mark.parametrize(
    ("headers", "code"),
    [({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Bearer secret"}, 409)],
)
async def test_a_command_needs_the_bearer_on_loopback_too(daemon, client, headers, code):
    daemon.fault = RefusedError("reached")
    async with client.post(daemon.url("/fail"), json={}, headers=headers) as answer:
        assert answer.status == code
        said = (await answer.json())["error"]
    assert (str(FOLDER / "http.token") in said) == (code == 401)
    async with client.get(daemon.url("/status")) as answer:  # reading needs none
        assert answer.status == 200


@pytest.mark.parametrize(
    ("host", "code"), [("127.0.0.1:7078", 200), ("rebound.example:7078", 403), ("[::1].rebound.example", 403)]
)
async def test_dns_rebinding_to_loopback_reads_nothing(daemon, client, host, code):
    async with client.get(daemon.url("/status"), headers={"Host": host}) as answer:
        assert answer.status == code


# -- connections that are held open


async def connected(daemon: Daemon) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*daemon.http.address)


@pytest.mark.parametrize("sent", [b"", b"GET /status HTT", b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
async def test_a_connection_without_a_request_is_closed(patient, daemon, monkeypatch, sent):
    monkeypatch.setattr(http_connections, "SILENT_S", 0.2)
    reader, writer = await connected(daemon)
    writer.write(sent)
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()


async def test_a_missing_body_times_out(daemon, monkeypatch):
    monkeypatch.setattr(module, "BODY_S", 0.1)
    reader, writer = await connected(daemon)
    writer.write(
        b"POST /fail HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\nContent-Length: 100\r\n\r\n{"
    )
    async with asyncio.timeout(DEADLINE_S):
        assert b" 400 " in await reader.readline()
    writer.close()


@pytest.mark.parametrize(
    "sent", [b"\0" * 99 + b"\r\n\r\n", b"GET /" + b"a" * 100_000, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 9999]
)
async def test_malformed_http_is_answered_and_not_logged(daemon, caplog, sent):
    reader, writer = await connected(daemon)
    writer.write(sent)
    async with asyncio.timeout(DEADLINE_S):
        assert b" 400 " in await reader.readline()
    writer.close()
    assert caplog.records == []


HALF_SENT = b"POST /enter HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"


class Crowded(Daemon):
    """A daemon with twelve places for connections, and a route that any caller may send a body to."""

    def __init__(self) -> None:
        super().__init__()
        self.http = HttpServer(
            self,
            HttpAccess("secret", admits=lambda request: request.path == "/enter"),
            self.events,
            {"fail": self._fail},
            routes=[web.post("/enter", self._enter)],
            limits=HttpLimits(most=12),
        )

    async def _enter(self, request: web.Request) -> web.Response:
        return web.json_response(await read_json(request, 20_000, 1e6))


@pytest.fixture
async def crowded(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Crowded]:
    """No connection of this daemon ends by a time limit."""
    monkeypatch.setattr(module, "KEPT_S", 1e6)
    monkeypatch.setattr(module, "BODY_S", 1e6)
    monkeypatch.setattr(http_connections, "SILENT_S", 1e6)
    monkeypatch.setattr(http_connections, "MIN_HTTP_CONNECTIONS", 1)
    daemon = Crowded()
    await daemon.http.start("127.0.0.1", 0)
    yield daemon
    async with asyncio.timeout(DEADLINE_S):
        await daemon.http.stop()


async def closed(reader: asyncio.StreamReader) -> None:
    """The server closes a connection, after any answer."""
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass


@pytest.mark.parametrize("sent", [b"", b"GET /he", HALF_SENT, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_a_flood_of_connections_closes_its_own(crowded, client, caplog, sent):
    held = []
    for _ in range(40):
        held.append(await connected(crowded))
        held[-1][1].write(sent)
    async with client.get(crowded.url("/healthz")) as answer:
        assert answer.status == 200
    async with client.get(crowded.url("/status")) as answer:
        assert answer.status == 200
    for reader, _ in held[:25]:
        await closed(reader)
    await until(lambda: len(crowded.http._connections.places) <= 12)
    for _, writer in held:
        writer.close()
    await until(lambda: len(crowded.http._connections.places) <= 1)
    assert [record.levelname for record in caplog.records if record.name == "p2pcast.http"] == ["WARNING"]


async def test_a_flood_ends_no_request_of_a_caller_with_the_bearer(crowded, client):
    crowded.fault = RefusedError("reached")
    reader, writer = await connected(crowded)
    writer.write(HALF_SENT.replace(b"/enter", b"/fail").replace(b"Host", b"Authorization: Bearer secret\r\nHost"))
    async with reading(client, crowded) as events:
        await events.line()
        held = [await connected(crowded) for _ in range(40)]
        for flood, _ in held[:25]:
            await closed(flood)
        crowded.events.emit("still_read")
        assert (await events.event())[1] == "still_read"
    writer.write(b"}" + b" " * 98)
    async with asyncio.timeout(DEADLINE_S):
        assert b" 409 " in await reader.readline()
    for each in [writer, *(other for _, other in held)]:
        each.close()


async def test_a_caller_that_goes_away_is_not_logged(crowded, caplog):
    for sent in (HALF_SENT, HALF_SENT.replace(b"{", b"")):
        _, writer = await connected(crowded)
        writer.write(sent)
        await until(lambda: len(crowded.http._connections.places) == 1)
        writer.transport.abort()
        await until(lambda: len(crowded.http._connections.places) == 0)
    await asyncio.sleep(0)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (b"[" * 20_000, {}, 400),
        (b"[" * 20_001, {}, 413),
        (b"\xff\xfe\xff", {}, 400),
        (b"1" * 99, {"Content-Type": "application/json; charset=none"}, 200),
        (b"no gzip", {"Content-Encoding": "gzip"}, 400),
    ],
)
async def test_bodies_that_make_no_sense_are_refused(crowded, client, caplog, body, headers, code):
    async with client.post(crowded.url("/enter"), data=body, headers=headers) as answer:
        assert answer.status == code
    assert caplog.records == []


async def test_a_body_of_chunks_is_bounded_and_may_be_malformed(crowded, caplog):
    for chunks, code in [(b"4e21\r\n" + b"[" * 20_001 + b"\r\n0\r\n\r\n", b" 413 "), (b"zz\r\n{}\r\n", b" 400 ")]:
        reader, writer = await connected(crowded)
        writer.write(HALF_SENT.partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
        async with asyncio.timeout(DEADLINE_S):
            assert code in await reader.readline()
        writer.close()
    assert caplog.records == []


# -- documents


async def test_a_document_is_read_without_the_bearer_on_loopback(daemon, client):
    async with client.get(daemon.url("/versions")) as answer:
        assert (answer.status, await answer.json()) == (200, {"at": "0.0"})
    async with client.get(daemon.url("/versions"), headers={"Origin": "http://elsewhere.example"}) as answer:
        assert answer.status == 403
