"""The release number, and the pinned archive of the previous release."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from previous import ARCHIVE, RELEASE, ROOT, unpacked

from p2pcast.ground.release import RELEASE as OURS


def test_the_package_and_the_code_name_one_release() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == OURS


def test_the_previous_wheel_is_the_previous_release(releases) -> None:
    said = releases.run(RELEASE, "--version")
    assert said.stdout.strip() == f"p2pcast, version {RELEASE}"


def test_an_archive_other_than_the_pinned_archive_is_refused(tmp_path: Path) -> None:
    other = tmp_path / ARCHIVE.name
    other.write_bytes(ARCHIVE.read_bytes() + b"\0")
    with pytest.raises(AssertionError, match=r"is not the one that README\.md pins"):
        unpacked(tmp_path, other)
