"""Metrics as the guide lists them, and as a daemon serves them."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

GUIDE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def documented() -> dict[str, frozenset[str]]:
    """Name → labels, of the guide's table."""
    section = GUIDE.read_text()
    rows = re.findall(r"^\| `(p2pcast_\w+)(?:\{([\w,]+)\})?` \| (.+) \|$", section, re.MULTILINE)
    table = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) == len(table), "a row holds one metric by its full name"
    assert len({name for name, _, _ in rows}) == len(rows)
    return {name: frozenset(labels.split(",")) - {""} for name, labels, _ in rows}


def served(text: str) -> dict[str, frozenset[str]]:
    """Name as in the text, with the suffix of counters → labels."""
    found: dict[str, frozenset[str]] = {}
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name] = frozenset(label for s in family.samples for label in s.labels) - {"le"}
        assert f"# HELP {name} " in text
    return {name: labels for name, labels in found.items() if name.startswith("p2pcast_")}
