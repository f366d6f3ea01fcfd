"""The bridge to verifiers. The package itself is installed in an environment apart from the project's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from p2pcast.ground.errors import UsageError
from p2pcast.tasks.task_loader import load_task
from tests.environments import ROOT, python_of

PLAY_S = 600.0


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(UsageError, match=r"pip install 'p2pcast\[verifiers\]'"):
        load_task("verifiers,tokenizer=bytes,taskset=any")


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_environments_of_the_real_package_are_played() -> None:
    module = Path(__file__).with_name("played_verifiers.py")
    command = [
        str(python_of("verifiers")),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        str(module),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PLAY_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
