"""The page's routes at a real hub with real peers."""

from __future__ import annotations

import gzip
import json
from typing import Any

import aiohttp
import pytest

from p2pcast.page import page_routes, picture_feed
from p2pcast.page.fleet_picture import apply
from p2pcast.page.page_routes import COOKIE


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(picture_feed, "INTERVAL_S", 0.02)


def url_of(hub) -> str:
    return f"http://127.0.0.1:{hub.http.address[1]}"


async def follow(http: aiohttp.ClientSession, url: str, until) -> dict[str, Any]:
    """The picture, changed until it fulfils a condition; every change follows the one before."""
    async with http.get(f"{url}/page/picture") as answer:
        picture = await answer.json()
    number = picture["number"]
    async with http.get(f"{url}/page/changes?after={number}") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        while not until(picture):
            line = (await answer.content.readline()).decode()
            if line.startswith("id: "):
                number += 1
                assert int(line.removeprefix("id: ")) == number
            if line.startswith("data: "):
                picture = apply(picture, json.loads(line.removeprefix("data: ")))
    return picture


async def test_a_viewer_sees_versions_spread_and_peers_go(swarm, states):
    state = states.first()
    swarm.publish(1, state)
    hub = await swarm.hub_up()
    await swarm.peers_up("a", "b")
    await swarm.live("0.1")
    async with aiohttp.ClientSession() as http:
        found = await follow(http, url_of(hub), lambda p: p["headline"]["level"] == "good")
        assert found["headline"]["text"] == "All 2 engines serve 0.1, the newest version."
        assert {row["parent"] for row in found["peers"].values()} <= {"hub", "a", "b"}
        swarm.publish(2, states.trained(state, 2))
        found = await follow(http, url_of(hub), lambda p: p["headline"]["text"].startswith("All 2 engines serve 0.2"))
        spread = found["versions"]["0.2"]
        assert (spread["kind"], spread["live"]["count"]) == ("delta", 2)
        await swarm.down(swarm.peer_daemons["b"])
        found = await follow(http, url_of(hub), lambda p: "b" not in p["peers"])
        assert found["headline"]["engines"] == 1
    await swarm.until(lambda: hub.control.feed.viewers == 0, "the viewer is missed")


async def test_without_viewers_no_picture_is_made(swarm, states):
    swarm.publish(1, states.first())
    hub = await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    assert hub.control.feed.number == 0
    await swarm.down(peer)
    assert hub.control.feed.number == 0


async def test_files_are_sent_compressed_once_and_without_rights_over_the_run(swarm, states):
    hub = await swarm.hub_up()
    total = 0
    async with aiohttp.ClientSession(auto_decompress=False, headers={"Accept-Encoding": "gzip"}) as http:
        async with http.get(url_of(hub) + "/") as answer:
            text, policy = gzip.decompress(await answer.read()).decode(), answer.headers["Content-Security-Policy"]
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        for name, file in page_routes.page_files().items():
            async with http.get(f"{url_of(hub)}/page/{name}") as answer:
                total += len(await answer.read())
                assert (answer.status, answer.headers["Content-Encoding"]) == (200, "gzip")
            async with http.get(f"{url_of(hub)}/page/{name}", headers={"If-None-Match": file.tag}) as answer:
                assert (answer.status, await answer.read()) == (304, b"")
        for name in ("nothing.js", "..%2fpage_routes.py", "licences"):
            async with http.get(f"{url_of(hub)}/page/{name}") as answer:
                assert answer.status == 404
    assert total < 100_000
    assert "<script>" not in text


async def test_a_caller_without_gzip_gets_plain_answers(swarm):
    hub = await swarm.hub_up()
    async with aiohttp.ClientSession(headers={"Accept-Encoding": "identity"}) as http:
        for path, begins in [("/", b"<!doctype html>"), ("/page/picture", b'{"number":')]:
            async with http.get(url_of(hub) + path) as answer:
                assert "Content-Encoding" not in answer.headers
                assert (await answer.read()).startswith(begins)


async def test_a_link_lets_one_browser_read_and_command_nothing(swarm, states, monkeypatch):
    swarm.publish(1, states.first())
    hub = await swarm.hub_up()
    url, bearer = url_of(hub), {"Authorization": f"Bearer {hub.http.access.bearer}"}
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as http:
        async with http.post(url + "/page/link", json={}, headers=bearer) as answer:
            secret = (await answer.json())["path"].removeprefix("/#")
        async with http.post(url + "/page/link", json={}) as answer:
            assert answer.status == 401
        monkeypatch.setattr("p2pcast.daemon.http_access.is_loopback", lambda host: False)
        for path in ("/page/picture", "/page/changes?after=0", "/status", "/events"):
            async with http.get(url + path) as answer:
                assert answer.status == 401
        async with http.post(url + "/page/enter", json={"link": secret}) as answer:
            assert answer.status == 200
            cookie = answer.cookies[COOKIE]
        assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "Strict", "/page")
        async with http.post(url + "/page/enter", json={"link": secret}) as answer:
            assert (answer.status, "used" in (await answer.json())["error"]) == (409, True)
        with_cookie = {"Cookie": f"{COOKIE}={cookie.value}"}
        async with http.get(url + "/page/picture", headers=with_cookie) as answer:
            assert answer.status == 200
        async with http.get(url + "/page/picture", headers={"Cookie": f"{COOKIE}={secret}"}) as answer:
            assert answer.status == 401
        for path, body in [("/evict", {"peer": "a"}), ("/token/create", {}), ("/page/link", {}), ("/commit", {})]:
            async with http.post(url + path, json=body, headers=with_cookie) as answer:
                assert answer.status == 401


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"link": 3}', '{"link": "' + "x" * 300 + '"}', '{"link": null}'])
async def test_no_other_body_enters(swarm, body):
    hub = await swarm.hub_up()
    async with aiohttp.ClientSession() as http, http.post(url_of(hub) + "/page/enter", data=body) as answer:
        assert answer.status in (400, 409)
        assert not answer.cookies


async def test_a_viewer_that_missed_changes_begins_again(swarm, states, monkeypatch):
    hub = await swarm.hub_up()
    async with aiohttp.ClientSession() as http:
        for after in ("99", "7"):
            async with http.get(f"{url_of(hub)}/page/changes?after={after}") as answer:
                assert (await answer.content.read()).startswith(b"event: again\n")
        async with http.get(f"{url_of(hub)}/page/changes?after=x") as answer:
            assert answer.status == 400
        monkeypatch.setattr(page_routes, "MOST_VIEWERS", 0)
        async with http.get(f"{url_of(hub)}/page/changes?after=0") as answer:
            assert answer.status == 503


async def test_a_number_that_json_lacks_spoils_no_picture(swarm, states, monkeypatch):
    hub = await swarm.hub_up()
    monkeypatch.setattr(hub.control.feed, "_status", lambda: {"version": None, "rollouts": {"age_s": float("nan")}})
    async with aiohttp.ClientSession() as http, http.get(f"{url_of(hub)}/page/picture") as answer:
        assert (await answer.json())["rollouts"] == {"age_s": None}
