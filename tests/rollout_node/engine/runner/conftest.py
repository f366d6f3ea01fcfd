"""Runners of scripted installers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rollout_node.engine import runner as module
from rollout_node.engine.callbacks import Callbacks
from rollout_node.engine.runner import Runner
from rollout_node.engine.switch_slots import SwitchSlots

sys.path.append(str(Path(__file__).parent))  # scripted_target

from scripted_target import Owner, Target


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
async def run(owner, monkeypatch) -> AsyncIterator[Callable[..., Runner]]:
    """Starts a runner; waiting before another try takes no time."""
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    tasks: list[asyncio.Task[None]] = []

    def start(target: Target, turns: SwitchSlots | None = None, callbacks: Callbacks | None = None) -> Runner:
        made = Runner(target, owner, owner, owner.on_changed, owner.on_wrong_weights, turns, callbacks)
        owner.runners.append(made)
        tasks.append(asyncio.create_task(made.run()))
        return made

    yield start
    for task in tasks:
        assert not task.done()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
