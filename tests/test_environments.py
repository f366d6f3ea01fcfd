"""Environments of frameworks are told apart by what they are made from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import environments


def test_processes_with_other_paths_share_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one process of a test run removes the environment in which another one works."""
    (tmp_path / "other-1.0.dist-info").mkdir()
    (tmp_path / "other-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    before = environments._stamp("sglang")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert environments._stamp("sglang") == before


def test_each_framework_has_an_environment_of_its_own() -> None:
    assert len({environments._stamp(name) for name in environments.ENVIRONMENTS}) == len(environments.ENVIRONMENTS)
