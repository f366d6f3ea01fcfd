"""Each alert has a runbook, whole sentences and a test by promtool; promtool takes the files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.append(str(Path(__file__).parents[1]))  # prose

from prose import count_words, sentences

from tests.daemons.metrics_guide import documented
from tests.deploy.deploy_files import PROMETHEUS, RUNBOOK, RUNBOOK_URL, alert_rules, metrics

MOST_WORDS = 30
SECTION = re.compile(r"^### (P2pcast\w+)$", re.MULTILINE)
RULES = pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: rule["alert"])


def promtool(*words: str) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=600, cwd=PROMETHEUS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def sections() -> dict[str, str]:
    """Alert → text of its section in the runbook."""
    _, *parts = SECTION.split(RUNBOOK.read_text())
    return dict(zip(parts[::2], parts[1::2], strict=True))


@RULES
def test_an_alert_names_metrics_that_exist(rule: dict[str, Any]) -> None:
    assert metrics(rule["expr"]) <= documented().keys() | {"up"}
    assert metrics(rule["expr"])


@RULES
def test_an_alert_has_a_severity_and_whole_sentences(rule: dict[str, Any]) -> None:
    assert rule["labels"] == {"severity": rule["labels"]["severity"]}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    for key in ("summary", "description"):
        text = rule["annotations"][key]
        assert re.fullmatch(r"[A-Z].*\.", text), text
        assert all(count_words(sentence) <= MOST_WORDS for _, sentence in sentences(text))


@RULES
def test_a_runbook_says_meaning_place_and_action(rule: dict[str, Any]) -> None:
    assert rule["annotations"]["runbook_url"] == RUNBOOK_URL + rule["alert"].lower()
    section = sections()[rule["alert"]]
    meaning, *parts = re.split(r"^- \*\*(\w+)\*\*: ", section, flags=re.MULTILINE)
    assert meaning.strip()
    assert parts[::2] == ["Look", "Do"]


def test_the_runbook_has_no_section_without_alert() -> None:
    names = [rule["alert"] for rule in alert_rules()]
    assert len(set(names)) == len(names)
    assert list(sections()) == names


def test_each_alert_is_tested_silent_and_firing() -> None:
    seen: dict[str, set[bool]] = {rule["alert"]: set() for rule in alert_rules()}
    for test in yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]:
        for case in test["alert_rule_test"]:
            seen[case["alertname"]].add(bool(case["exp_alerts"]))
    assert {name: found for name, found in seen.items() if found != {True, False}} == {}


def test_promtool_takes_the_rules_and_the_sample_configuration() -> None:
    assert f"{len(alert_rules())} rules found" in promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")


def test_alerts_fire_and_end_by_promtool() -> None:
    promtool("test", "rules", "alerts_test.yml")
