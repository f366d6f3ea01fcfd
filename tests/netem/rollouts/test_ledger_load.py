"""The measurement of the ledger at a small size: workers over HTTP, and a trainer that takes every batch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from netem.bench.commands.hub_commands import _row
from netem.rollouts import ledger_load
from p2pcast.ground.errors import LocalError

END_S = 600.0


async def test_loads_are_accepted_and_counted(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with ledger_load.ledger(state, None, 1) as (url, process):
        trainer = ledger_load.Trainer(url, state / "http.token")
        trainer.start()
        full = paced = ledger_load.LoadResult()
        async with asyncio.timeout(END_S):  # a busy machine may play nothing in a short time
            while not full.accepted:
                full = await ledger_load.full_load(url, state, trainer, 2, 2.0)
            while not paced.accepted:
                paced, _ = await ledger_load.paced_load(url, state, trainer, 10, 40.0, 2.0)
        assert trainer.failure is None
        assert ledger_load.resident_bytes(process) > 0
    assert full.rejected == paced.rejected == {}
    assert ledger_load.write_limit(tmp_path / "limit", 0.2) > 0


def test_a_load_without_leases_has_no_figures() -> None:
    with pytest.raises(LocalError, match="SQLite, paced: no worker got a lease"):
        _row("SQLite", "paced", ledger_load.LoadResult(), 0.0)


async def test_growth_is_measured_at_even_distances(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with ledger_load.ledger(state, None, 1) as (url, process):
        trainer = ledger_load.Trainer(url, state / "http.token")
        trainer.start()
        async with asyncio.timeout(END_S):
            sizes = await ledger_load.growing_load(url, state, None, process, trainer, 1, 80, 2)
        assert trainer.failure is None
    assert [size.results >= wanted for size, wanted in zip(sizes, (40, 80), strict=True)] == [True, True]
    assert all(size.rows > 0 and size.database_bytes > 0 and size.body_bytes > 0 for size in sizes)
    assert all(size.cpu_ms > 0 and size.resident_bytes > 0 for size in sizes)
