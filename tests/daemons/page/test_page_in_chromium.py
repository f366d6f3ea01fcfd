"""The page in a real Chromium, over a live run in which peers are lost, fail and lag. No console error, and axe finds
nothing, at three sizes.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright, expect

from p2pcast.page import picture_feed

CHROMIUM = "/usr/bin/chromium"
SIZES = [("wide", 1440, 900, "light"), ("dark", 1024, 768, "dark"), ("phone", 390, 844, "light")]
DEADLINE_MS = 120_000
LOADED = """
["resource", "navigation"].flatMap((kind) => performance.getEntriesByType(kind))
  .filter((one) => !one.name.includes("/page/changes")).map((one) => one.encodedBodySize)
"""
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(picture_feed, "INTERVAL_S", 0.2)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        # Chromium's own sandbox does not work for root.
        found = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        await found.close()


class Viewer:
    """One browser window. ``trouble``: console errors, uncaught errors and failed requests."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.trouble: list[str] = []
        page.set_default_timeout(DEADLINE_MS)
        page.on("console", lambda said: self.trouble.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.trouble.append(str(error)))
        # The stream of changes ends with a reload, and for a browser that was too slow for the kept changes.
        page.on("requestfailed", lambda r: None if "/page/changes" in r.url else self.trouble.append(r.url))
        page.on("dialog", lambda dialog: self.trouble.append(dialog.message))

    async def says(self, where: str, text: str) -> None:
        try:
            await expect(self.page.locator(where)).to_contain_text(text, timeout=DEADLINE_MS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.trouble}") from None

    async def is_accessible(self) -> None:
        found = await Axe().run(self.page)
        assert [(one["id"], one["nodes"][0]["html"]) for one in found.response["violations"]] == []


async def opened(browser: Browser, url: str, size: tuple[str, int, int, str] = SIZES[0]) -> Viewer:
    _, width, height, scheme = size
    context = await browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    viewer = Viewer(await context.new_page())
    await viewer.page.goto(url)
    return viewer


def url_of(daemon: Any) -> str:
    return f"http://127.0.0.1:{daemon.http.address[1]}/"


def join_in_a_process(swarm: Any, name: str) -> subprocess.Popen[bytes]:
    """A peer that can be killed."""
    host, port = swarm.address
    words = ["join", f"{host}:{port}", "--plaintext", "--token-file", swarm.folder / "token", "--name", name]
    words += [
        "--state",
        swarm.folder / name,
        "--shadow",
        swarm.tmpfs / name,
        "--install",
        f"safetensors:{swarm.out(name)}",
    ]
    words += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--region", "us"]
    return subprocess.Popen([sys.executable, "-m", "p2pcast.cli", *map(str, words)], stderr=subprocess.DEVNULL)


async def test_versions_and_losses_are_seen_at_once(swarm, states, browser):
    state = states.first()
    swarm.publish(1, state)
    hub = await swarm.hub_up()
    await swarm.peers_up("a", "c", region="eu")
    killable = join_in_a_process(swarm, "b")
    await swarm.live("0.1")
    viewer = await opened(browser, url_of(hub))
    page = viewer.page
    await viewer.says("#headline", "All 3 engines serve 0.1, the newest version.")
    assert await page.locator("#headline").get_attribute("data-level") == "good"
    await expect(page.locator("#peers tbody tr")).to_have_count(3)
    label = await page.locator("#tree").get_attribute("aria-label")
    assert label is not None
    assert "a is fed by" in label
    await viewer.is_accessible()

    swarm.publish(2, states.trained(state, 2))
    await swarm.live("0.2")
    await viewer.says("#headline", "All 3 engines serve 0.2")
    await viewer.says("#versions", "3 of 3 in")
    await viewer.says("#last-facts", "Version 0.2")
    await expect(page.locator("#waterfall li")).to_have_count(3)
    await page.locator("#routine").check()
    await viewer.says("#events", "serves 0.2")
    await page.locator("#routine").uncheck()

    killable.kill()
    await asyncio.to_thread(killable.wait)
    await viewer.says("#alarms", "Lost, and not back: b.")
    await viewer.says("#events", "b was lost")
    await viewer.says("#headline", "Lost: b.")
    await viewer.says("#peers", "lost at")
    await viewer.says("#tree", "lost at")
    await viewer.is_accessible()

    await page.locator("#filter").fill("a")
    await viewer.says("#shown", "peers, worst first")
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.tagName") != "BODY"
    assert viewer.trouble == []


async def test_texts_of_peers_stay_texts(swarm, states, browser, monkeypatch):
    swarm.publish(1, states.first())
    hub = await swarm.hub_up()
    await swarm.peer_up("a")
    await swarm.live("0.1")
    real = hub.control.view.status()
    engine = {"name": HOSTILE, "ready": False, "committed": "0.1", "pause_s": None, "error": HOSTILE}
    row = real["peers"][0] | {"name": HOSTILE, "region": HOSTILE, "parent": HOSTILE, "engines": [engine]}
    others = [row | {"name": "__proto__"}, row | {"name": "hub", "parent": "hub"}, row | {"name": "x", "parent": "y"}]
    others.append(row | {"name": "y", "parent": "x"})
    rollouts = {"task": HOSTILE, "jobs": {HOSTILE: 3}}
    document = real | {"peers": [row, *others], "rollouts": rollouts, "skipped": {HOSTILE: HOSTILE}}
    monkeypatch.setattr(hub.control.feed, "_status", lambda: document)
    hub.events.emit("skipped", folder=HOSTILE, why=HOSTILE)
    viewer = await opened(browser, url_of(hub))
    await viewer.says("#alarms", HOSTILE)
    await viewer.says("#peers", HOSTILE)
    await viewer.says("#tree", HOSTILE)
    await viewer.says("#rollouts", HOSTILE)
    await viewer.says("#events", HOSTILE)
    assert await viewer.page.locator("img").count() == 0
    assert viewer.trouble == []


async def test_a_link_opens_the_page_in_one_browser(swarm, states, browser, monkeypatch):
    swarm.publish(1, states.first())
    hub = await swarm.hub_up()
    await swarm.peer_up("a")
    await swarm.live("0.1")
    link = (await hub.control.page.link({}))["path"]
    monkeypatch.setattr("p2pcast.daemon.http_server.is_loopback", lambda host: False)
    first = await opened(browser, url_of(hub) + link.removeprefix("/"))
    await first.says("#headline", "The engine serves 0.1")
    assert first.page.url == url_of(hub), "the link is not left in the address"
    await first.page.reload()
    await first.says("#headline", "The engine serves 0.1")
    assert first.trouble == []
    second = await opened(browser, url_of(hub) + link.removeprefix("/"))
    await second.says("#connection", "this link was used")


async def test_commands_need_the_bearer_and_a_yes(swarm, states, browser):
    swarm.publish(1, states.first())
    hub = await swarm.hub_up()
    peer = await swarm.peer_up("a")
    await swarm.live("0.1")
    viewer = await opened(browser, url_of(hub))
    page = viewer.page
    evict, answer = page.locator('button[data-command="evict"]'), page.locator("#answer")
    await evict.click()
    await expect(answer).to_contain_text("Choose a peer")
    await page.locator("#operate-peer").select_option("a")
    await evict.click()
    await page.locator('#confirm button[value="no"]').click()
    await expect(answer).to_contain_text("Choose a peer")
    await evict.click()
    await page.locator('#confirm button[value="yes"]').click()
    await expect(answer).to_contain_text("a bearer token is needed")
    assert hub.control.view.status()["evicted"] == []
    assert [text for text in viewer.trouble if "401" not in text] == []
    await page.locator("#bearer").fill(hub.http.bearer)
    await evict.click()
    await viewer.is_accessible()
    await page.locator('#confirm button[value="yes"]').click()
    await expect(answer).to_contain_text("Done", timeout=DEADLINE_MS)
    assert hub.control.view.status()["evicted"] == [peer.ident.hex()]
    assert "evicted" in str(await swarm.ended(peer))


@pytest.mark.parametrize("size", SIZES, ids=[name for name, *_ in SIZES])
async def test_a_thousand_peers_fit_every_size(swarm, states, browser, monkeypatch, size):
    swarm.publish(1, states.first())
    hub = await swarm.hub_up()
    await swarm.peer_up("a")
    await swarm.live("0.1")
    real = hub.control.view.status()
    row = real["peers"][0]
    many = [
        row | {"name": f"peer{n:04}", "region": f"region {n % 7}", "parent": f"peer{n // 2:04}"} for n in range(1, 1001)
    ]
    monkeypatch.setattr(hub.control.feed, "_status", lambda: real | {"peers": many})
    viewer = await opened(browser, url_of(hub), size)
    await viewer.says("#headline", "All 1000 engines serve 0.1")
    await viewer.says("#tree", "region 3")
    await viewer.says("#shown", "200 of 1000 peers")
    await viewer.is_accessible()
    wide = await viewer.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0, "the page scrolls sideways"
    loaded = await viewer.page.evaluate(LOADED)
    assert 0 < sum(loaded) <= 200_000
    assert viewer.trouble == []
