"""Histograms, lags and disk sizes, as Prometheus reads them."""

from __future__ import annotations

import os

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from p2pcast.ground.version import Version
from p2pcast.process import metric_kinds
from p2pcast.relay.daemon_metrics import disk_bytes


def exposed(histogram: metric_kinds.Histogram) -> dict[tuple[str, ...], float]:
    """(what is counted, labels in alphabetical order) → value."""
    text = generate_latest(metric_kinds.registry(lambda: [histogram.family()])).decode()
    samples = (s for f in text_string_to_metric_families(text) for s in f.samples)
    found = ((s.name.removeprefix("p2pcast_x_seconds_"), s) for s in samples if s.name.startswith("p2pcast_"))
    return {(name, *(value for _, value in sorted(s.labels.items()))): s.value for name, s in found}


def test_a_histogram_counts_up_to_each_bound():
    histogram = metric_kinds.Histogram("p2pcast_x_seconds", "X", ["who"], (1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value, "a")
    histogram.observe(3.0, "b")
    found = exposed(histogram)
    assert [found["bucket", le, "a"] for le in ("1.0", "2.0", "+Inf")] == [2, 3, 4]
    assert (found["count", "a"], found["sum", "a"]) == (4, 12.0)
    assert found["count", "b"] == 1


def test_rows_can_be_removed():
    histogram = metric_kinds.Histogram("p2pcast_x_seconds", "X", ["peer", "engine"], (1.0,))
    for peer in "ab":
        for engine in "xy":
            histogram.observe(1.0, peer, engine)
    histogram.forget("a")
    assert {key[1:] for key in exposed(histogram) if key[0] == "count"} == {("x", "b"), ("y", "b")}


def test_without_labels_and_without_a_row():
    histogram = metric_kinds.Histogram("p2pcast_x_seconds", "X", [], (1.0,))
    assert exposed(histogram) == {}
    histogram.observe(0.5)
    assert exposed(histogram)["count",] == 1


def test_rows_are_bounded(monkeypatch):
    monkeypatch.setattr(metric_kinds, "MAX_LABELLED", 3)
    histogram = metric_kinds.Histogram("p2pcast_x_seconds", "X", ["who"], (1.0,))
    for n in range(10):
        histogram.observe(1.0, str(n))
    histogram.observe(1.0, "0")
    found = exposed(histogram)
    assert {key[1] for key in found if key[0] == "count"} == {"0", "1", "2"}
    assert found["count", "0"] == 2


@pytest.mark.parametrize(("at", "behind"), [(None, 3), ((0, 0), 3), ((0, 1), 2), ((0, 5), 1), ((1, 0), 0), ((7, 0), 0)])
def test_lag(at, behind):
    versions = [Version(0, 1), Version(0, 5), Version(1, 0)]
    assert metric_kinds.lag(None if at is None else Version(*at), versions) == behind


def test_disk_bytes(tmp_path):
    assert disk_bytes(tmp_path / "nowhere") == 0
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "file").write_bytes(os.urandom(100_000))
    (tmp_path / "other").write_bytes(os.urandom(50_000))
    (tmp_path / "round").symlink_to(tmp_path)
    assert 150_000 <= disk_bytes(tmp_path) < 200_000
