"""The page docs/design/security.md: every named test exists, and each row of its tables of attacks names a test. For
each test there is a defence in `tests/mutations/` that can still be taken out.

`make mutations` shows that the tests notice; it takes minutes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "mutations"))  # table

from table import MUTATIONS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "design" / "security.md").read_text()
FAULTS = (ROOT / "docs" / "design" / "faults.md").read_text()


def unknown_tests(text: str) -> list[str]:
    """Tests and test modules that a page names and that do not exist."""
    defined = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined |= {path.stem, *re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)}
    named = set(re.findall(r"\btest_\w+", text))
    assert len(named) > 40
    return sorted(named - defined)


def test_every_test_that_is_named_exists() -> None:
    assert unknown_tests(TEXT) == []
    assert unknown_tests(FAULTS) == []
    for path in re.findall(r"`((?:tests|netem|rollout_node|p2pcast|topology|trainer_node)/[\w/.]+)`", FAULTS):
        assert (ROOT / path).exists(), path
    for file in re.findall(r"`t/([\w/]+\.py)`", TEXT):
        assert (ROOT / "tests" / file).exists(), file


def attacks() -> list[str]:
    found = [line for line in TEXT[TEXT.index("## Admission") :].splitlines() if line.startswith("| ")]
    return [line for line in found if not line.endswith("| test |")]


def test_every_attack_has_a_test() -> None:
    assert len(attacks()) > 15
    for line in attacks():
        assert re.search(r"`(?:test_\w+|t/[\w/.]+)`", line.rsplit(" | ", 1)[-1]), line


def test_every_defence_can_still_be_taken_out() -> None:
    for mutation in MUTATIONS:
        text = (ROOT / mutation.file).read_text()
        assert mutation.applied(text) != text
        file, _, name = mutation.test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(), mutation
        assert mutation.attack in TEXT + FAULTS, mutation.attack


def test_every_attack_and_every_test_has_its_mutation() -> None:
    assert [line for line in attacks() if not any(m.attack in line for m in MUTATIONS)] == []
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert sorted(named - {m.test.rpartition("::")[2] for m in MUTATIONS}) == []
