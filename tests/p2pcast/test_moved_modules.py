"""Names of before ``trainer_node.frameworks``."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_node import frameworks

ROOT = Path(__file__).parents[2]
INTERFACE = ROOT / "docs" / "reference" / "python-api.md"
LIGHT = ["tried_versions", "ledger_steps", "slime", "vllm", "verl_backend", "verl_backend.engine_settings"]


@pytest.mark.parametrize("name", LIGHT)
def test_a_former_name_gives_the_module_and_a_warning(name: str) -> None:
    new = importlib.import_module(f"{frameworks.__name__}.{name}")
    spec = new.__spec__
    sys.modules.pop(f"p2pcast.adapters.{name}", None)
    with pytest.warns(DeprecationWarning, match=f"p2pcast.adapters.{name} has moved to trainer_node.frameworks.{name}"):
        old = importlib.import_module(f"p2pcast.adapters.{name}")
    assert old is new
    assert new.__spec__ is spec
    assert new.__name__ == f"trainer_node.frameworks.{name}"


@pytest.mark.parametrize(
    ("former", "new"),
    [
        ("p2pcast.version", "p2pcast.ground.version"),
        ("trainer_node.sdk.batch_client", "p2pcast.ledger_api.batch_client"),
    ],
)
def test_a_former_module_gives_the_documented_names_and_a_warning(former: str, new: str) -> None:
    sys.modules.pop(former, None)
    with pytest.warns(DeprecationWarning, match=f"{former} has moved to {new}"):
        old = importlib.import_module(former)
    (row,) = (line for line in INTERFACE.read_text().splitlines() if line.startswith(f"| `{new}` |"))
    assert old.__all__ == sorted(re.findall(r"`(\w+)`", row))
    assert all(getattr(old, name) is getattr(importlib.import_module(new), name) for name in old.__all__)


def test_an_unknown_name_is_no_module() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'p2pcast.adapters.nothing'"):
        importlib.import_module("p2pcast.adapters.nothing")


def test_a_program_runs_by_its_former_name() -> None:
    command = [sys.executable, "-m", "p2pcast.adapters.atropos", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.returncode == 0
    assert "Hand the batches of the ledger" in done.stdout
