from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pcast.codec.layout import Layout

sys.path.append(str(Path(__file__).parent))  # fakes and played engines

from stored_run import Run


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def make(layout: Layout, state: np.ndarray, name: str = "run") -> Run:
        runs.append(Run(tmp_path / name, layout, state))
        return runs[-1]

    yield make
    for run in runs:
        run.shadow.close()
