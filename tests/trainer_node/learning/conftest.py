"""Small tensors on one thread, processes of a run, and the model of a disk that the tests of the swarm use."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from netem.demo.processes import Processes
from tests.trainer_node.sdk.conftest import Run

sys.path.append(str(Path(__file__).parents[2] / "daemons" / "swarm"))  # disk_image, step_recorder


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: on a busy machine, threads would wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A hub and peers as processes, which the test starts."""
    logs = tmp_path / "logs"
    logs.mkdir()
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as tmpfs, Processes(logs) as processes:
        yield Run(tmp_path, Path(tmpfs), processes)
