"""The run's page in a real Chromium, over a ledger and a worker: leases and tokens by region, and a worker that an
operator pauses from the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from ledger_stage import Up, config_of
from parity_task import NAME
from playwright.async_api import Browser, expect

from tests.daemons.conftest import Swarm, first_state
from tests.daemons.page.page_viewer import DEADLINE_MS, browser, opened, quick_pictures, url_of
from tests.support.fake_engine import FakeEngine
from trainer_node.ledger_server.callers import WORKER_FILE
from trainer_node.ledger_server.ledger_daemon import LedgerDaemon

__all__ = ["browser", "quick_pictures"]
ROOT = Path(__file__).parents[3]
END_S = 600.0


@contextlib.asynccontextmanager
async def working(daemon: LedgerDaemon, folder: Path, engine: FakeEngine, peer: Any) -> AsyncIterator[None]:
    host, port = peer.http.address
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "p2pcast.cli", "work", f"127.0.0.1:{daemon.http.address[1]}", "--engine", engine.url),
        *("--peer", f"{host}:{port}", "--task", NAME, "--name", "paused", "--slots", "4"),
        *("--bearer-file", str(folder / WORKER_FILE)),
        cwd=ROOT,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


async def test_a_worker_is_paused_and_resumed_from_the_page(
    swarm: Swarm, up: Up, engine: FakeEngine, browser: Browser
) -> None:
    engine.versions = ["0.0"]
    hub, folder = await swarm.hub_up(), swarm.folder / "ledger"
    swarm.publish(0, first_state())
    peer = await swarm.peer_up("a", region="eu")
    await swarm.live("0.0")
    at = f"http://127.0.0.1:{hub.http.address[1]}"
    config = config_of(folder, hub=at, hub_bearer=hub.http.access.bearer, batch_groups=1000)
    async with asyncio.timeout(END_S), up(config) as daemon, working(daemon, folder, engine, peer):
        head = {"Authorization": f"Bearer {(folder / 'http.token').read_text().strip()}"}
        async with aiohttp.ClientSession(headers=head) as http:
            begins = {"branch": 0, "step": 0, "batches": []}
            async with http.post(f"http://127.0.0.1:{daemon.http.address[1]}/v1/learner/resume", json=begins) as answer:
                assert answer.status == 200
        viewer = await opened(browser, url_of(hub))
        page = viewer.page
        await viewer.says("#workers", "paused")
        await viewer.says("#workers", "eu")
        await expect(page.locator("#regions tbody td").nth(9)).to_have_text("1", timeout=DEADLINE_MS)
        await viewer.is_accessible()

        pause = page.locator('button[data-command="pause"]')
        await pause.click()
        await viewer.says("#answer", "Choose a worker first.")
        await page.locator("#operate-worker").select_option("paused")
        await page.locator("#bearer").fill(hub.http.access.bearer)
        await pause.click()
        await viewer.says("#confirm-text", "Give paused no new jobs for an hour?")
        await page.locator('#confirm button[value="yes"]').click()
        await viewer.says("#answer", "Done")
        await viewer.says("#workers", "paused for")
        [row] = daemon.view.workers()["workers"]
        assert 0 < row["drained_s"] <= 3600
        assert row["region"] == "eu"

        await page.locator('button[data-command="resume"]').click()
        await page.locator('#confirm button[value="yes"]').click()
        await expect(page.locator("#workers")).not_to_contain_text("paused for", timeout=DEADLINE_MS)
        await daemon.view.renew()
        assert daemon.view.workers()["workers"][0]["drained_s"] == 0
        assert viewer.trouble == []
