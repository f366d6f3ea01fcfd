"""The adapter says which versions of verl it was tried with."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import warnings

import pytest

from p2pcast.ground.errors import LocalError
from tests.environments import ENVIRONMENTS
from trainer_node.frameworks.verl_backend import verl_versions


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: request.param)


@pytest.mark.parametrize("installed", verl_versions.TRIED, indirect=True)
@pytest.mark.usefixtures("installed")
def test_a_version_that_was_tried_is_taken_in_silence() -> None:
    with warnings.catch_warnings(record=True) as said:
        verl_versions.check()
    assert said == []


@pytest.mark.parametrize("installed", ["0.9.2", "1.0", "0.10.0.dev1"], indirect=True)
@pytest.mark.usefixtures("installed")
def test_another_version_brings_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"was tried with verl 0\.9\.1, and verl .* is installed"):
        verl_versions.check()


@pytest.mark.parametrize("installed", ["0.8.3", "0.5"], indirect=True)
@pytest.mark.usefixtures("installed")
def test_a_version_with_another_interface_is_refused() -> None:
    with pytest.raises(LocalError, match=r"is too old for trainer_node\.frameworks\.verl: install verl 0\.9\.1"):
        verl_versions.check()


def test_a_missing_package_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", "import trainer_node.frameworks.verl"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "which is not installed: pip install verl==0.9.1" in done.stderr


def test_the_tests_use_a_version_that_was_tried() -> None:
    assert f"verl=={verl_versions.TRIED[-1]}" in ENVIRONMENTS["verl"][-1]
