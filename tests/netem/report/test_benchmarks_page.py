"""The page docs/benchmarks.md and its data have the scenarios' present texts, and views name present columns."""

from __future__ import annotations

import csv
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from netem.report.lab_sections import VIEWS

ROOT = Path(__file__).parents[3]
SCENARIOS = ROOT / "netem" / "scenarios"
PAGE = ROOT / "docs" / "benchmarks.md"


@cache
def sections() -> dict[str, str]:
    """Name of the scenario → its section."""
    return dict(re.findall(r"^## Lab: (\S+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


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
    missed = sum(f"| {name} | {hold['what']} |" in PAGE.read_text() for hold in present["holds"])
    assert f"{len(present['holds']) - missed} of {len(present['holds'])} bars held." in section
    with (ROOT / "docs" / "benchmarks" / f"{name}.csv").open() as file:
        assert next(csv.reader(file)) == [*present["columns"].values(), "source"]


def test_links_to_data_lead_to_files() -> None:
    linked = re.findall(r"\(benchmarks/(\S+\.csv)\)", PAGE.read_text())
    assert sorted(linked) == sorted(path.name for path in (ROOT / "docs" / "benchmarks").glob("*.csv"))


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_a_view_names_columns_of_its_scenario(name: str) -> None:
    view = VIEWS[name]
    shown = {*view.rows, *view.across, *view.where, *((view.value,) if view.value else ())}
    assert not shown - scenario(name)["columns"].keys()
