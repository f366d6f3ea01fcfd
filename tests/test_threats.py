"""The page docs/design/security.md: each row of its tables of attacks has a defence in `tests/mutations/` that can be
removed. The page docs/design/faults.md: each named test and folder exists, and each public bug report has a test.

`make mutations` shows that the tests notice; it takes minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
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
    assert unknown_tests(FAULTS) == []
    for path in re.findall(r"`((?:tests|netem|rollout_node|p2pcast|topology|trainer_node)/[\w/.]+)`", FAULTS):
        assert (ROOT / path).exists(), path


REPORT = re.compile(r"\[((\S+/\S+)#(\d+))\]\(https://github\.com/\2/issues/\3\)")
TEST_ID = re.compile(r"(?:(test_\w+\.py)::)?(test_\w+)(\[.+\])?")


def reports() -> list[tuple[str, str]]:
    """Each public bug report, and the names of its tests."""
    section = FAULTS[FAULTS.index("## Public bug reports") :].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ")[1] for line in section.splitlines() if line.startswith("| ")]
    pairs = [item.partition(": ") for cell in cells[1:] for item in cell.split("; ")]
    return [(report, tests) for report, _, tests in pairs]


def test_each_report_is_listed_once() -> None:
    links = [REPORT.fullmatch(report) for report, _ in reports()]
    assert [report for (report, _), link in zip(reports(), links, strict=True) if link is None] == []
    assert len(links) >= 30
    assert len({link[1] for link in links if link}) == len(links)


def test_every_report_has_tests() -> None:
    """A name is that of one module's test alone. The id of a parameter, in brackets, is one that pytest collects."""
    defined: defaultdict[str, list[Path]] = defaultdict(list)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE):
            defined[name].append(path)
    ids = set()
    for report, tests in reports():
        found = [TEST_ID.fullmatch(name) for name in re.findall(r"`([^`]+)`", tests)]
        assert found, report
        for test in found:
            assert test, report
            paths = [path.relative_to(ROOT) for path in defined[test[2]] if test[1] in (None, path.name)]
            assert len(paths) == 1, (test[0], paths)
            if test[3]:
                ids.add(f"{paths[0]}::{test[2]}{test[3]}")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *sorted(ids)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def attacks() -> list[str]:
    found = [line for line in TEXT[TEXT.index("## Admission") :].splitlines() if line.startswith("| ")]
    return [line for line in found if not line.endswith(("| defence |", "| consequence |"))]


def test_every_defence_can_still_be_taken_out() -> None:
    for mutation in MUTATIONS:
        text = (ROOT / mutation.file).read_text()
        assert mutation.applied(text) != text
        file, _, name = mutation.test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text(), mutation
        assert mutation.attack in TEXT + FAULTS, mutation.attack


def test_every_attack_has_its_mutation() -> None:
    assert len(attacks()) > 100
    assert [line for line in attacks() if not any(m.attack in line for m in MUTATIONS)] == []
