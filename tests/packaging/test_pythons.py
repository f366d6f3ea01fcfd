"""The wheel on the releases of Python that compatibility.md names.

A release of which this machine has an interpreter carries a version. For the others, and at least
for the newest, pip resolves the dependencies to wheels alone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from built_wheel import DEADLINE_S, ROOT, carry_a_version, environment
from interpreters import RELEASES, found, trixie

THERE = {release: path for release in RELEASES if (path := found(release))}
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The release of test_wheel.py."""
OTHERS = sorted(set(THERE) - {HERE}) or [HERE]
WITHOUT_INTERPRETER = sorted(set(RELEASES) - set(THERE)) or [RELEASES[-1]]


@pytest.mark.prove  # test_wheel.py is the sample
@pytest.mark.parametrize("release", OTHERS)
def test_a_version_spreads_on_another_release_of_python(release: str, wheel: Path, tmp_path: Path) -> None:
    python = environment(wheel, tmp_path / "environment", THERE[release])
    said = subprocess.run([str(python.with_name("p2pcast")), "--version"], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("p2pcast, version ")
    carry_a_version([python.with_name("p2pcast")], tmp_path)


@pytest.mark.parametrize("release", WITHOUT_INTERPRETER)
def test_every_dependency_has_a_wheel_for_the_release(release: str, wheel: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:"]
    pip += ["--python-version", release, "--target", str(tmp_path / "none"), str(wheel)]
    subprocess.run(pip, check=True, timeout=DEADLINE_S)


def test_compatibility_names_the_releases() -> None:
    text = (ROOT / "docs" / "reference" / "compatibility.md").read_text()
    assert f"Python {RELEASES[0]} to {RELEASES[-1]}" in text


@pytest.mark.prove
@pytest.mark.root
def test_a_version_spreads_on_the_python_of_debian_13(wheel: Path, tmp_path: Path) -> None:
    """Debian 13 in a folder, entered by chroot: its own Python, C library and files."""
    root = trixie(tmp_path / "root")
    inside = root / "srv" / "p2pcast"
    inside.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary=:all:", "--python-version", "3.13"]
    subprocess.run([*pip, "--target", str(inside / "site"), str(wheel)], check=True, timeout=DEADLINE_S)
    command = ["chroot", root, "env", "PYTHONPATH=/srv/p2pcast/site", "python3.13", "-m", "p2pcast.cli"]
    subprocess.run(["mount", "-t", "proc", "proc", str(root / "proc")], check=True)
    try:
        carry_a_version(command, inside / "run", root)
    finally:
        subprocess.run(["umount", str(root / "proc")], check=True)
