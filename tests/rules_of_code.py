"""Reads the tables of docs/design/rules.md."""

from __future__ import annotations

import re
from pathlib import Path

RULES = Path(__file__).parents[1] / "docs" / "design" / "rules.md"


def table(first: str) -> list[list[list[str]]]:
    """Rows below the header whose first cell is ``first``: of each cell, the names in backticks."""
    lines = RULES.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")])
    return rows
