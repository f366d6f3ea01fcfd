"""Prometheus metrics of a daemon, read from its own state when they are asked for: nothing is counted twice.

What each means for the reader is in docs/operations.md, "Metrics"; a test holds that list and what daemons serve together.
"""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pcast.events import Events
from p2pcast.relay.node import Node
from p2pcast.tasks import Tasks
from p2pcast.version import Version

Families = Callable[[], Iterable[Metric]]

SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
"""Bounds for the ways of a version."""
PAUSES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""Bounds for pauses of an engine."""
STORE_PARTS = ("deltas", "anchors", "files", "partial")
MAX_LABELLED = 16384
"""Rows of one histogram: names come from other machines."""


class _Read(Collector):
    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()


def registry(*families: Families) -> CollectorRegistry:
    """A registry of its own (several daemons may live in one process), with the process's metrics."""
    out = CollectorRegistry()
    ProcessCollector(registry=out)
    PlatformCollector(registry=out)
    GCCollector(registry=out)
    out.register(_Read(lambda: (m for f in families for m in f())))
    return out


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def labelled(name: str, text: str, labels: list[str], rows: Iterable[tuple[list[str], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def counters(name: str, text: str, labels: list[str], rows: Iterable[tuple[list[str], float]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


class Histogram:
    """How often a figure was at most each of ``bounds``, by labels; a row can be forgotten when what it stood for is gone."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._rows: dict[tuple[str, ...], tuple[list[int], float]] = {}

    def observe(self, value: float, *labels: str) -> None:
        counts, total = self._rows.get(labels) or ([0] * (len(self._bounds) + 1), 0.0)
        counts[bisect_left(self._bounds, value)] += 1
        if labels in self._rows or len(self._rows) < MAX_LABELLED:
            self._rows[labels] = (counts, total + value)

    def forget(self, *first: str) -> None:
        """The rows whose labels begin with these."""
        for labels in [row for row in self._rows if row[: len(first)] == first]:
            del self._rows[labels]

    def family(self) -> Metric:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [*map(str, self._bounds), "+Inf"]
        for labels, (counts, total) in self._rows.items():
            family.add_metric(labels, list(zip(bounds, map(float, accumulate(counts)), strict=True)), total)
        return family


def lag(version: Version | None, versions: list[Version]) -> int:
    """How many of ``versions`` (ascending) are newer."""
    return len(versions) if version is None else len(versions) - bisect_right(versions, version)


def disk_bytes(folder: Path) -> int:
    """What the files under a folder take, as the file system counts it. Files may come and go meanwhile."""
    total, folders = 0, [os.fspath(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        total += 512 * entry.stat(follow_symlinks=False).st_blocks
        except OSError:
            continue
    return total


def daemon_families(events: Events, store: Path, shadow: Path) -> Iterable[Metric]:
    """What every daemon has beside its node. ``store``, ``shadow``: folders."""
    yield gauge("p2pcast_disk_bytes", "What the state folder takes on disk", disk_bytes(store))
    yield gauge("p2pcast_tasks", "Tasks of this daemon's event loop", len(asyncio.all_tasks()))
    yield labelled(
        "p2pcast_store_bytes", "What each part of the state folder takes on disk", ["part"],
        (([part], disk_bytes(store / part)) for part in STORE_PARTS),
    )  # fmt: skip
    yield gauge("p2pcast_shadow_bytes", "What the shadow and its patches take in memory (tmpfs)", disk_bytes(shadow))
    yield counter("p2pcast_events", "Events told", events.told)
    yield counter("p2pcast_events_dropped", "Events that readers of /events did not get", events.dropped)
    yield gauge("p2pcast_events_readers", "Readers of /events", events.readers)


def task_families(tasks: Tasks) -> Iterable[Metric]:
    yield gauge("p2pcast_healthy", "Whether /healthz answers 200", float(tasks.healthy()[0]))
    yield counter("p2pcast_task_failures", "Background tasks, callbacks and threads that failed", tasks.failed)


def node_families(node: Node) -> Iterable[Metric]:
    """What hub and peer share."""
    sent = sum(c.bytes_sent for c in node.downstream.children.values()) if node.downstream is not None else 0
    yield counter("p2pcast_received_bytes", "Verified piece bytes received", node.bytes_received)
    yield counter("p2pcast_duplicate_bytes", "Piece bytes received that were held already", node.bytes_duplicate)
    yield counter("p2pcast_corrupt_pieces", "Pieces whose hash did not match", node.pieces_corrupt)
    yield gauge("p2pcast_children", "Links to children", len(node.downstream.children) if node.downstream is not None else 0)
    yield gauge("p2pcast_sending_bytes", "Piece bytes sent to the children of now", sent)
    yield gauge("p2pcast_write_backlog_bytes", "Verified bytes that wait for the disk", node.writeback.backlog_bytes)
    yield gauge("p2pcast_artifacts", "Artifacts held", len(node.holdings))
