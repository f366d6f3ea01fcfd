"""Hosts of one engine, as many as a test wants."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from p2pcast.ground.version import Version
from rollout_node.engine import multi_host_leader, multi_host_member

sys.path.append(str(Path(__file__).parent))  # engine_hosts

from engine_hosts import Host


@pytest.fixture
async def hosts(tmp_path, monkeypatch) -> AsyncIterator[Callable[..., Any]]:
    """``await hosts("lead", "a")``; retries take no time."""
    monkeypatch.setattr(multi_host_member, "REDIAL_MIN_S", 0.01)
    monkeypatch.setattr(multi_host_member, "REDIAL_MAX_S", 0.02)
    monkeypatch.setattr(multi_host_leader, "BEAT_S", 0.02)
    made: list[Host] = []

    async def up(role: str, name: str, at: Version | None = None, **options: Any) -> Host:
        host = Host(tmp_path, name, options.pop("node", b""))
        made.append(host)
        await host.up(role, **options)
        if at is not None:
            await host.move(at)
        return host

    yield up
    for host in made:
        await host.down()
