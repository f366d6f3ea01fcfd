"""Prometheus metrics of a daemon, read from its own state when they are asked for: nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from p2pcast.relay.node import Node

Families = Callable[[], Iterable[Metric]]


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
