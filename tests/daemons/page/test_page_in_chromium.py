"""The page in a real Chromium, over a live run in which peers are lost, fail and lag. No console error, and axe finds
nothing, at three sizes.
"""

from __future__ import annotations

import asyncio
import io
import shutil
import signal
import subprocess
import sys
from typing import Any

import pytest
from playwright.async_api import expect
from rich.console import Console

from p2pcast.cli.status import table
from p2pcast.fleet_verdict import RANK
from tests.daemons.page.page_viewer import DEADLINE_MS, SIZES, Viewer, browser, opened, quick_pictures, url_of

__all__ = ["browser", "quick_pictures"]

LOADED = """
["resource", "navigation"].flatMap((kind) => performance.getEntriesByType(kind))
  .filter((one) => !one.name.includes("/page/changes")).map((one) => one.encodedBodySize)
"""
PAINTED = """colour => {
  const made = document.body.appendChild(document.createElement("i"));
  made.style.color = colour;
  const found = getComputedStyle(made).color;
  made.remove();
  return found;
}"""
HOSTILE = "<img src=x onerror=alert(1)>"


async def shows_the_same(swarm: Any, hub: Any, viewer: Viewer, name: str, level: str, words: str) -> None:
    """Document, printed table and metric of the hub, and the page's table, in the colour of the level."""
    status, out = await swarm.status(hub), io.StringIO()
    [verdict] = [row["verdict"] for row in (*status["peers"], *status["gone"]) if row["name"] == name]
    assert (verdict["level"], words in verdict["words"]) == (level, True)
    Console(file=out, width=2000).print(table(status))
    assert verdict["words"] in out.getvalue()
    assert f'p2pcast_hub_peer_level{{peer="{name}"}} {RANK[level]}.0' in (await swarm.get(hub, "/metrics"))[1]
    cell = viewer.page.locator(f'#peers tbody tr:has(td:first-child:text-is("{name}")) td:nth-child(2)')
    await expect(cell).to_have_text(verdict["words"], timeout=DEADLINE_MS)
    await expect(cell).to_have_css("color", await viewer.page.evaluate(PAINTED, f"var(--{level})"))


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
    await viewer.says("#headline", "Lost: b. Each joined engine serves 0.2, the newest version.")
    assert await page.locator("#headline").get_attribute("data-level") == "watch"
    await viewer.says("#peers", "lost since")
    await viewer.says("#tree", "lost since")
    await viewer.is_accessible()
    await shows_the_same(swarm, hub, viewer, "b", "watch", "lost since 20")
    await shows_the_same(swarm, hub, viewer, "a", "good", "serves 0.2, the newest version")
    await viewer.says("#regions", "us")
    await swarm.down(swarm.peer_daemons["c"])
    await viewer.says("#peers", "left at")
    await viewer.says("#headline", "Lost: b. The joined engine")

    await page.locator("#filter").fill("a")
    await viewer.says("#shown", "peers, worst first")
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.tagName") != "BODY"
    assert viewer.trouble == []


class Holds:
    """Defers each switch of an engine while ``held``."""

    held = False

    def before_commit(self, version: str) -> float:
        return 0.05 if self.held else 0.0


async def test_a_laggard_a_rejected_install_and_a_cut_site_are_named(swarm, states, browser, monkeypatch):
    monkeypatch.setattr("trainer_node.hub.SILENCE_S", 5.0)  # the cut site's links end
    state, holds = states.first(), Holds()
    swarm.publish(1, state)
    hub = await swarm.hub_up()
    await swarm.peer_up("slow", region="eu", callbacks=holds, max_defer_s=3600.0)
    await swarm.peer_up("full", region="eu")
    site = [join_in_a_process(swarm, name) for name in ("west", "east")]
    await swarm.live("0.1")
    viewer = await opened(browser, url_of(hub))
    await viewer.says("#headline", "All 4 engines serve 0.1")

    # The folder of a reader becomes a file: versions cannot be installed any more.
    shutil.rmtree(swarm.out("full"))
    swarm.out("full").write_bytes(b"")
    holds.held = True
    for number in range(2, 6):
        state = states.trained(state, number)
        swarm.publish(number, state)
        await swarm.until(lambda n=number: str(hub.publishing.pipeline.head) == f"0.{n}", "the version is sealed")
    await viewer.says("#alarms", "Behind by more than 2 versions: slow")
    await viewer.says("#alarms", "Installs fail at full:")
    await viewer.says("#headline", "1 of 4 peers is in trouble: full. 1 of 4 peers needs a look: slow.")
    await viewer.says("#headline", "2 of 4 engines do not serve 0.5, the newest version, at full, slow.")
    assert await viewer.page.locator("#headline").get_attribute("data-level") == "alarm"
    await shows_the_same(swarm, hub, viewer, "full", "alarm", f"cannot create {swarm.out('full')}")
    await shows_the_same(swarm, hub, viewer, "slow", "watch", "serves 0.1, 4 versions behind 0.5")
    full = swarm.peers["full"]
    assert await swarm.get(full, "/readyz") == (503, f"not ready: {(await swarm.status(full))['verdict']['words']}\n")
    await viewer.says("#peers", str(swarm.out("full")))
    await viewer.is_accessible()
    swarm.out("full").unlink()
    holds.held = False
    await viewer.says("#headline", "All 4 engines serve 0.5")
    await expect(viewer.page.locator("#alarms li")).to_have_count(0, timeout=DEADLINE_MS)

    # A site without a route sends nothing, and closes no connection.
    for process in site:
        process.send_signal(signal.SIGSTOP)
    await viewer.says("#alarms", "Lost, and not back: ")
    await viewer.says("#headline", "Lost: ")
    await viewer.says("#alarms", "Their children have other parents now.")
    for process in site:
        process.send_signal(signal.SIGCONT)
    await viewer.says("#headline", "All 4 engines serve 0.5")
    await expect(viewer.page.locator("#alarms li")).to_have_count(0, timeout=DEADLINE_MS)
    await viewer.says("#events", "west joined in us")
    assert viewer.trouble == []
    for process in site:
        process.kill()
        await asyncio.to_thread(process.wait)


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
    monkeypatch.setattr("p2pcast.daemon.http_access.is_loopback", lambda host: False)
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
    await page.locator("#bearer").fill(hub.http.access.bearer)
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
    await swarm.until(
        lambda: [row["ready"] for row in hub.control.view.status()["peers"][0]["engines"]] == [True],
        "the hub has heard that the engine is ready",
    )
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
