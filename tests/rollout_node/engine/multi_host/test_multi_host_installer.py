"""The lead's installer: the engine reads only when all hosts are at the version."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_hosts import LIMIT_S, ONE, TWO, seen, together

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from rollout_node.engine.multi_host_installer import MultiHostInstaller
from rollout_node.installers.installer import Abilities, Audit, CommitReport
from tests.support.until import until


class Inner:
    """An installer that notes when it is called."""

    def __init__(self) -> None:
        self.name, self.abilities = "vllm:x", Abilities()
        self.committed: Version | None = None
        self.ready = False
        self.commit_needs_shadow = False
        self.calls: list[str] = []

    async def start(self) -> None:
        self.calls.append("start")

    async def check(self) -> None:
        self.calls.append("check")

    async def stage(self, version: Version, shadow: Path) -> None:
        self.calls.append(f"stage {version}")

    async def commit(self, version: Version) -> CommitReport:
        self.calls.append(f"commit {version}")
        self.committed, self.ready = version, True
        return CommitReport(0.0)

    async def audit(self, layout: Any, digests: Any) -> Audit:
        return Audit(ONE, [], [])

    async def close(self) -> None:
        self.calls.append("close")


async def test_an_engine_is_told_to_read_only_when_all_are_there(hosts, tmp_path):
    lead, b = await together(hosts, "b")
    inner = Inner()
    led = MultiHostInstaller(inner, lead.lead)
    await led.start()
    await lead.move(TWO)
    staging = asyncio.create_task(led.stage(TWO, tmp_path))
    await b.says(rank=1)
    assert inner.calls == ["start"]
    await b.move(TWO)
    await asyncio.wait_for(staging, LIMIT_S)
    inner.commit_needs_shadow = True
    await asyncio.wait_for(led.commit(TWO), LIMIT_S)
    await led.check()
    assert (led.name, led.ready, led.committed, led.commit_needs_shadow) == ("vllm:x", True, TWO, True)
    assert (await led.audit(None, {})).version == ONE  # type: ignore[arg-type]
    await led.close()
    assert inner.calls == ["start", "stage 0.2", "commit 0.2", "check", "close"]


async def test_an_engine_that_is_well_is_left_alone_while_a_host_is_away(hosts, tmp_path):
    lead, b = await together(hosts, "b")
    await b.says(rank=1)
    await until(lambda: lead.reports)
    inner = Inner()
    led = MultiHostInstaller(inner, lead.lead)
    await led.stage(ONE, tmp_path)
    await led.commit(ONE)
    await b.down()
    await until(lambda: not seen(lead))
    await lead.move(TWO)
    with pytest.raises(RetryableError, match="member b is gone"):
        await led.stage(TWO, tmp_path)
    assert led.ready
    inner.ready = False
    await asyncio.wait_for(led.stage(TWO, tmp_path), LIMIT_S)  # the engine will name its missing workers
    assert inner.calls == ["stage 0.1", "commit 0.1", "stage 0.2"]
