"""The dashboard is one that any Grafana takes, and the dashboard names metrics and labels that exist."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.daemons.metrics_guide import documented
from tests.deploy.deploy_files import GRAFANA, chosen, dashboard, filled, metrics, panels, targets, variables

ROWS = ["Are all engines current?", "What holds them up?", "What did it cost?", "Rollouts"]
UNITS = {"none", "s", "bytes", "Bps", "bps", "percentunit"}
OF_EVERY_TARGET = frozenset({"job", "instance", "le"})
OTHERS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}
"""Metrics of Prometheus itself, and of every process."""


def labels(metric: str) -> frozenset[str] | None:
    """Labels of a metric or of a histogram's part; None if the guide does not name the metric."""
    guide = documented()
    for name in (metric, re.sub(r"_(?:bucket|sum|count)$", "", metric)):
        if name in guide:
            return guide[name] | OF_EVERY_TARGET
    return OF_EVERY_TARGET if metric in OTHERS else None


def test_the_dashboard_belongs_to_no_grafana() -> None:
    found = dashboard()
    assert found["id"] is None
    assert found["uid"] == "p2pcast"
    assert not [key for key in found if key.startswith("__")]


def test_the_datasource_is_a_variable_everywhere() -> None:
    first, *others = dashboard()["templating"]["list"]
    assert (first["name"], first["type"], first["query"]) == ("datasource", "datasource", "prometheus")
    places = [*others, *panels(), *(target for panel in panels() for target in panel["targets"])]
    assert {(place["datasource"]["type"], place["datasource"]["uid"]) for place in places} == {
        ("prometheus", "${datasource}")
    }


def test_rows_are_the_questions_of_operators() -> None:
    assert [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"] == ROWS
    assert dashboard()["panels"][0]["type"] == "row"


def test_each_panel_has_a_title_a_description_and_a_unit() -> None:
    titles = [panel["title"] for panel in panels()]
    assert len(set(titles)) == len(titles)
    for panel in panels():
        assert re.fullmatch(r"[A-Z].*[\w?]", panel["title"])
        assert re.fullmatch(r"[A-Z].*\.", panel["description"])
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert all(target["legendFormat"] for target in panel["targets"])


def test_panels_do_not_overlap() -> None:
    every = dashboard()["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in every)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


def test_rates_have_the_interval_of_grafana() -> None:
    ranges = [window for target in targets() for window in re.findall(r"\[([^\]]*)\]", target.expr)]
    assert set(ranges) == {"$__rate_interval"}
    calls = [name for target in targets() for name in re.findall(r"\b(rate|irate|increase|delta)\(", target.expr)]
    assert len(calls) == len(ranges)


def test_queries_select_by_the_variables() -> None:
    for target in targets():
        selectors = re.findall(r"\{([^}]*)\}", target.expr)
        assert len(selectors) >= len(metrics(target.expr)) > 0, target
        for selector in selectors:
            assert selector.startswith('job=~"$job"'), target
    assert list(variables()) == ["job", "instance", "peer"]


@pytest.mark.parametrize("target", targets(), ids=lambda target: f"{target.panel}: {target.legend}")
def test_metrics_and_labels_of_a_query_exist(target) -> None:
    known = [labels(metric) for metric in metrics(target.expr)]
    assert None not in known, metrics(target.expr)
    named = set(re.findall(r"(\w+)=~", target.expr)) | target.legend_labels
    for listed in re.findall(r"by \(([^)]*)\)", target.expr):
        named |= set(listed.split(", "))
    assert all(named <= one for one in known)


def test_variables_list_labels_that_exist() -> None:
    for selector, label in variables().values():
        (metric,) = metrics(selector)
        assert label in (labels(metric) or ())


def test_metrics_of_a_query_are_found() -> None:
    expr = 'topk(3, sum by (le, peer) (rate(p2pcast_a_bucket{job=~"$job", p2pcast_no="x"}[5m]))) / up - time()'
    assert metrics(expr) == {"p2pcast_a_bucket", "up"}


def test_variables_are_put_in_as_by_grafana() -> None:
    assert chosen([]) == ".*"
    assert chosen(["gpu1"]) == "gpu1"
    assert chosen(["10.0.0.1:7078", "b"]) == r"(10\\.0\\.0\\.1:7078|b)"
    text = 'rate(a{job=~"$job", peer=~"$peer"}[$__rate_interval])'
    assert filled(text, {"job": "p", "peer": r"a\\.b"}, 60) == r'rate(a{job=~"p", peer=~"a\\.b"}[60s])'


def test_kustomize_labels_the_configmap_for_grafana() -> None:
    made = yaml.safe_load((GRAFANA / "kustomization.yaml").read_text())
    assert made["generatorOptions"]["labels"] == {"grafana_dashboard": "1"}
    (generated,) = made["configMapGenerator"]
    assert [(GRAFANA / name).exists() for name in generated["files"]] == [True]
