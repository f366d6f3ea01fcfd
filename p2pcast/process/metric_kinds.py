"""Kinds of Prometheus metrics. Values are read from a daemon's state at each request, so that no count is stored twice.

Names, texts and labels: ``daemon_metrics`` (every daemon), ``trainer_node.hub_metrics``, ``rollout_node.peer_metrics``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pcast.ground.version import Version

Families = Callable[[], Iterable[Metric]]
Rows = Iterable[tuple[list[str], float]]
"""Labels and value of each sample."""

SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
"""Histogram bounds for the times of a version, in seconds."""
PAUSES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""Histogram bounds for the pauses of an engine, in seconds."""
MAX_LABELLED = 16384
"""Most rows of one histogram: labels come from other machines, which may send any number of names."""


class _StateCollector(Collector):
    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


def registry(*families: Families) -> CollectorRegistry:
    """Return a new registry with ``families`` and the process's metrics. Each daemon has its own, since tests run
    several daemons in one process.
    """
    out = CollectorRegistry()
    ProcessCollector(registry=out)
    PlatformCollector(registry=out)
    GCCollector(registry=out)
    out.register(_StateCollector(lambda: (m for f in families for m in f())))
    return out


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def optional(name: str, text: str, value: float | None) -> Metric:
    """Return a gauge, with no sample while its value is unknown."""
    return gauges(name, text, [], [] if value is None else [([], value)])


def gauges(name: str, text: str, labels: list[str], rows: Rows) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def counters(name: str, text: str, labels: list[str], rows: Rows) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


class Histogram:
    """A Prometheus histogram with rows by labels. A row can be removed, for instance when its peer has left."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._rows: dict[tuple[str, ...], tuple[list[int], float]] = {}

    def observe(self, value: float, *labels: str) -> None:
        counts, total = self._rows.get(labels) or ([0] * (len(self._bounds) + 1), 0.0)
        counts[bisect_left(self._bounds, value)] += 1
        if labels in self._rows or len(self._rows) < MAX_LABELLED:
            self._rows[labels] = (counts, total + value)

    def forget(self, *first: str) -> None:
        """Remove the rows whose first labels are ``first``."""
        for labels in [row for row in self._rows if row[: len(first)] == first]:
            del self._rows[labels]

    def family(self) -> Metric:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(str, self._bounds), "+Inf"]
        for labels, (counts, total) in self._rows.items():
            family.add_metric(labels, list(zip(bounds, map(float, accumulate(counts)), strict=True)), total)
        return family


def lag(version: Version | None, versions: list[Version]) -> int:
    """Return how many of ``versions`` (ascending) are newer than ``version``; all of them if it is None."""
    return len(versions) if version is None else len(versions) - bisect_right(versions, version)
