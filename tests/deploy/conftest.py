"""Fixtures: a run as in ``tests/daemons``, and a Prometheus that scrapes the run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("daemons/rollouts", "rollout_node/vllm")]


from tests.daemons.conftest import (
    pytest_asyncio_loop_factories,
    short_intervals,
    states,
    swarm,
    tmpfs,
)
from tests.deploy.prometheus_server import Prometheus
from tests.support.fake_engine import engine

__all__ = ["engine", "pytest_asyncio_loop_factories", "short_intervals", "states", "swarm", "tmpfs"]


@pytest.fixture
async def prometheus(tmp_path: Path) -> AsyncIterator[Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("needs a real Prometheus: apt-get install prometheus")
    server = Prometheus(tmp_path / "prometheus")
    yield server
    await server.stop()
