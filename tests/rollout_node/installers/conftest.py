"""A played vLLM server for installers, and a shadow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from held_weights import LAYOUT
from installer_host import Host

from p2pcast.state.shadow import Shadow


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    found = Host(tmp_path)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", found.engine.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = "http://{}:{}".format(*runner.addresses[0][:2])
    yield found
    found.engine.idle.set()
    for each in (*found.installers, *found.servers):
        await each.close()
    await runner.cleanup()
    for installer in found.installers:
        installer._machine.state.validate()


@pytest.fixture
def shadow(tmp_path: Path) -> Iterator[Shadow]:
    with Shadow.create(tmp_path / "shadow", LAYOUT) as shadow:
        yield shadow
