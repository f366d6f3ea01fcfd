"""Small tensors on one thread, processes of a run, and the model of a disk that the tests of the swarm use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer_node.sdk.conftest import run

__all__ = ["run"]
"""Fixture: a hub and peers as processes, which the test starts."""

sys.path.append(str(Path(__file__).parents[2] / "daemons" / "swarm"))  # disk_image, step_recorder


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: on a busy machine, threads would wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
