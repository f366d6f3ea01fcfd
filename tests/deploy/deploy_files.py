"""The dashboard and the alerts of ``deploy``, and Grafana's variables put into queries as Grafana does it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = PROMETHEUS / "alerts.yml"
RUNBOOK = ROOT / "docs" / "guides" / "alerts.md"
RUNBOOK_URL = "https://p2pcast.example/guides/alerts/#"
SPECIAL = re.compile(r"[\\^$*+?.()|\[\]{}]")
METRIC = re.compile(r"\b(p2pcast_\w+|process_\w+|up)\b")
LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")


@dataclass(frozen=True)
class Target:
    panel: str
    expr: str
    legend: str

    @property
    def legend_labels(self) -> set[str]:
        return set(re.findall(r"\{\{(\w+)\}\}", self.legend))


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GRAFANA / "p2pcast.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    """Without rows."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def targets() -> list[Target]:
    return [
        Target(panel["title"], target["expr"], target["legendFormat"])
        for panel in panels()
        for target in panel["targets"]
    ]


def variables() -> dict[str, tuple[str, str]]:
    """Name → selector and label, of each variable that Grafana fills by a query."""
    found = {}
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            match = LABEL_VALUES.fullmatch(variable["query"]["query"])
            assert match is not None, variable["name"]
            found[variable["name"]] = (match[1], match[2])
    return found


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def metrics(expr: str) -> set[str]:
    """Names of metrics in a query."""
    return set(METRIC.findall(re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on) \([^)]*\)", "", expr)))


def chosen(values: list[str]) -> str:
    """The text of a variable with several values in a regular expression; without values: of the choice "All"."""
    if not values:
        return ".*"
    quoted = [SPECIAL.sub(lambda found: "\\\\" + found[0], value) for value in values]
    return quoted[0] if len(quoted) == 1 else f"({'|'.join(quoted)})"


def filled(text: str, values: Mapping[str, str], interval_s: int) -> str:
    """A query without variables. ``interval_s``: of ``$__rate_interval``, in seconds."""
    text = text.replace("$__rate_interval", f"{interval_s}s")
    for name, value in values.items():
        text = re.sub(rf"\${name}\b", lambda _, value=value: value, text)
    assert "$" not in text, text
    return text
