"""A played vLLM server for installers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from installer_host import Host, broken_invariants


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
        assert broken_invariants(installer._state) == []
