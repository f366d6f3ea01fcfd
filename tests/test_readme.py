"""Runs the commands of the README."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
_TESTED = re.compile(r"^<!-- tested -->\n```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_walk_through(own_machine: list[str], tmp_path: Path) -> None:
    """All marked blocks, in one shell and in order, as one would paste them; on the usual ports, in a network of their
    own.
    """
    blocks = _TESTED.findall(README.read_text())
    assert len(blocks) == 6
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = ["bash", "-eu", "-o", "pipefail", "-c", "\n".join(blocks)]
    done = subprocess.run(
        [*own_machine, *shell],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "version 0.1" in done.stdout
    walk = tmp_path / "walk"
    for n in (1, 2, 3):
        folder = walk / f"rollout-{n}"
        assert (folder / "latest").resolve().name in ("step_1", "step_2")
        for step in (0, 1):
            received = (folder / f"step_{step}" / "model.safetensors").read_bytes()
            # The canonical file has a header of its own; the weights are its last 8 MB.
            sent = (walk / "checkpoints" / f"step_{step}" / "model.safetensors").read_bytes()
            assert received[-8_000_000:] == sent[-8_000_000:]


def test_the_quick_start_has_the_same_commands() -> None:
    page = (README.parent / "docs" / "quickstart.md").read_text()
    assert _TESTED.findall(page) == _TESTED.findall(README.read_text())


def test_every_link_leads_somewhere() -> None:
    for page in [README, *(README.parent / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
