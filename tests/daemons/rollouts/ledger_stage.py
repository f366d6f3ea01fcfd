"""A ledger's daemon in this process, with the parity task."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from parity_task import NAME, Parity

from rollout_node.worker.engine_versions import EngineVersions
from rollout_node.worker.generate_sampler import GenerateSampler
from rollout_node.worker.job_player import JobPlayer
from rollout_node.worker.ledger_client import LedgerClient
from rollout_node.worker.play_loop import PlayLoop, WorkerConfig
from tests.support.fake_engine import FakeEngine
from tests.support.until import until
from trainer_node.ledger.ledger_rows import Policy
from trainer_node.ledger.staleness_rule import StalenessBounds
from trainer_node.ledger_server.ledger_daemon import LedgerConfig, LedgerDaemon, opened
from trainer_node.ledger_server.prompt_feeder import Feed

END_S = 600.0
Up = Callable[..., "contextlib.AbstractAsyncContextManager[LedgerDaemon]"]


def config_of(folder: Path, **more: Any) -> LedgerConfig:
    task = Parity()
    bounds = StalenessBounds(more.pop("staleness", 2), more.pop("batch_groups", 2), more.pop("last_step", None))
    given: dict[str, Any] = {"feed": Feed(7, 4, 1.0, 8)} | more
    return LedgerConfig(
        state=folder,
        http=("127.0.0.1", 0),
        policy=Policy(bounds, "bounded", task.vocabulary, task_hash=task.hash),
        task=task,
        task_name=NAME,
        **given,
    )


def worker_loop(
    client: LedgerClient, engine: FakeEngine, name: str, player: JobPlayer | None = None, slots: int = 4
) -> PlayLoop:
    """A worker's loop that plays the parity task, unless it has a player of its own."""
    versions = EngineVersions(client._http, engine.url, engine.url)
    sampler = GenerateSampler(client._http, engine.url, versions)
    return PlayLoop(WorkerConfig(name=name, slots=slots), player or JobPlayer(Parity()), client, sampler, versions)


@contextlib.asynccontextmanager
async def running(config: LedgerConfig) -> AsyncIterator[LedgerDaemon]:
    """The daemon, once it answers. Ends with the error of its work, if that failed."""
    async with opened(config) as daemon:
        work = asyncio.create_task(daemon.run())
        try:
            await until(lambda: daemon.http.address[1], check=lambda: work.done() and work.result())
            yield daemon
        finally:
            work.cancel()
            await asyncio.wait([work])
        if not work.cancelled():
            work.result()
