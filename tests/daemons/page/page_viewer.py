"""A real Chromium that looks at the run's page, and collects every error that its console shows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright, expect

from p2pcast.page import picture_feed

CHROMIUM = "/usr/bin/chromium"
SIZES = [("wide", 1440, 900, "light"), ("dark", 1024, 768, "dark"), ("phone", 390, 844, "light")]
DEADLINE_MS = 120_000


@pytest.fixture(autouse=True)
def quick_pictures(monkeypatch) -> None:
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
