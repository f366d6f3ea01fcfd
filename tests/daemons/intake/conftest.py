"""Fixtures: groups of scripted ranks beside a swarm."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # scripted_ranks

from scripted_ranks import Trainer


@pytest.fixture
async def trainers(swarm):
    """``await trainers(ranks)``: a group that is up; its connections are closed at the end."""
    made: list[Trainer] = []

    async def make(ranks: int, **options: Any) -> Trainer:
        trainer = Trainer(swarm, ranks, **options)
        made.append(trainer)
        trainer.told = await trainer.up()
        return trainer

    yield make
    for trainer in made:
        for rank in trainer.ranks:
            rank.link.abort()
