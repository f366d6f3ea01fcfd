"""The page docs/benchmarks.md: its sections about scenarios have the scenarios' present texts."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SCENARIOS = ROOT / "netem" / "scenarios"


@cache
def sections() -> dict[str, str]:
    """Name of the scenario → its section."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    return dict(re.findall(r"^## Lab: (\S+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))


def scenario(name: str) -> dict[str, Any]:
    return tomllib.loads((SCENARIOS / f"{name}.toml").read_text())


def test_scenarios_have_sections() -> None:
    assert len(sections()) > 10
    assert not sections().keys() - {path.stem for path in SCENARIOS.glob("*.toml")}


@pytest.mark.parametrize("name", sorted(sections()))
def test_a_section_has_the_scenarios_texts(name: str) -> None:
    section, present = sections()[name], scenario(name)
    assert present["what"][1:] in section
    if scale := present.get("scale"):
        assert f"Scale: {scale}." in section
    for hold in present.get("holds", []):
        assert f": {hold['what']}" in section
    for heading in present.get("columns", {}).values():
        assert f"| {heading} |" in section
