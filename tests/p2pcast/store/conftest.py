"""An empty store."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from p2pcast.store.artifact_store import ArtifactStore

sys.path.append(str(Path(__file__).parent))  # artifacts_at_hand

from artifacts_at_hand import KEY


@pytest.fixture
def store(tmp_path):
    return ArtifactStore(tmp_path / "state", KEY.public)
