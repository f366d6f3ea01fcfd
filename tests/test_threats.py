"""docs/threats.md: whatever test it names, there is; and each row of its tables of attacks names one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "threats.md").read_text()


def test_every_test_that_is_named_exists() -> None:
    defined = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    named = set(re.findall(r"\b(test_\w+)(?!\w*\.py)\b", TEXT)) - {p.stem for p in (ROOT / "tests").rglob("test_*.py")}
    assert len(named) > 40
    assert sorted(named - defined) == []
    for file in re.findall(r"`t/([\w/]+\.py)`", TEXT):
        assert (ROOT / "tests" / file).exists(), file


def test_every_attack_has_a_test() -> None:
    attacks = [line for line in TEXT[TEXT.index("## Getting in") :].splitlines() if line.startswith("| ")]
    attacks = [line for line in attacks if not line.endswith("| test |")]
    assert len(attacks) > 15
    for line in attacks:
        assert re.search(r"`(?:test_\w+|t/[\w/.]+)`", line.rsplit(" | ", 1)[-1]), line
