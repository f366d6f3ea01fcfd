"""``p2pcast sparse calibrate``, without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from p2pcast.ground.errors import UsageError
from rollout_node.commands.sparse_command import sparse
from rollout_node.sparse_calibration import model_calibration


@pytest.mark.parametrize("option", ["--schedule", "--plot", "--output"])
def test_files_of_missing_folders_are_refused_before_the_measurement(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("the engine has started")

    monkeypatch.setattr(model_calibration, "calibrated", measured)
    monkeypatch.chdir(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"token_ids": [1]}\n')
    words = ["calibrate", str(tmp_path), "--prompts", str(prompts), option, "none/file"]
    error = CliRunner().invoke(sparse, words).exception
    assert isinstance(error, UsageError)
    assert "none/file: the folder" in str(error)
