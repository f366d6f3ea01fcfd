"""Names, texts and labels of the metrics that every daemon has. docs/reference/metrics.md explains each metric; a test
compares that list with the metrics that daemons serve.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import Metric

from p2pcast.process.background_tasks import Tasks
from p2pcast.process.events import Events
from p2pcast.process.metric_kinds import counter, gauge, gauges
from p2pcast.relay.node import Node

STORE_PARTS = ("deltas", "anchors", "files", "partial")


def daemon_families(events: Events, store: Path, shadow: Path) -> Iterable[Metric]:
    """Yield every daemon's metrics, except those of its node. ``store``, ``shadow``: folders."""
    yield run_family(events.run)
    yield gauge("p2pcast_disk_bytes", "Disk space of the state folder", disk_bytes(store))
    yield gauge("p2pcast_tasks", "Tasks of this daemon's event loop", len(asyncio.all_tasks()))
    yield gauges(
        "p2pcast_store_bytes", "Disk space of each part of the state folder", ["part"],
        (([part], disk_bytes(store / part)) for part in STORE_PARTS),
    )  # fmt: skip
    yield gauge("p2pcast_shadow_bytes", "Memory of the shadow and its patches (tmpfs)", disk_bytes(shadow))
    yield counter("p2pcast_events", "Events emitted", events.emitted)
    yield counter("p2pcast_events_dropped", "Events that readers of /events missed", events.dropped)
    yield gauge("p2pcast_events_readers", "Readers of /events", events.readers)


def run_family(run: str | None) -> Metric:
    """Return the metric with the run's id. ``run``: the id in hex, None while it is unknown."""
    return gauges("p2pcast_run_info", "1; the label is the run's id", ["run"], [] if run is None else [([run], 1.0)])


def task_families(tasks: Tasks) -> Iterable[Metric]:
    yield gauge("p2pcast_healthy", "Whether /healthz answers 200", float(tasks.healthy()[0]))
    yield counter("p2pcast_task_failures", "Background tasks, callbacks and threads that failed", tasks.failed)


def node_families(node: Node) -> Iterable[Metric]:
    """Yield the metrics that hub and peer share."""
    yield counter("p2pcast_received_bytes", "Verified piece bytes received", node.bytes_received)
    yield counter("p2pcast_duplicate_bytes", "Piece bytes received more than once", node.bytes_duplicate)
    yield counter("p2pcast_corrupt_pieces", "Pieces whose hash did not match", node.pieces_corrupt)
    yield gauge("p2pcast_children", "Links to children", node.downstream.count)
    yield gauge("p2pcast_sending_bytes", "Piece bytes sent to the children of now", node.downstream.bytes_sent)
    yield gauge("p2pcast_write_backlog_bytes", "Verified bytes that wait for the disk", node.writeback.backlog_bytes)
    yield gauge("p2pcast_artifacts", "Artifacts held", len(node.holdings))


def disk_bytes(folder: Path) -> int:
    """Return the disk space in bytes of the files under a folder, as the file system counts it. Files may appear or
    disappear meanwhile.
    """
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
