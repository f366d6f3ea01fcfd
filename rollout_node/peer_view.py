"""How a peer shows itself: its report to the hub, /status, /readyz and metrics. Reads, changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client.core import Metric

from p2pcast import metrics
from p2pcast.daemon import show_address

if TYPE_CHECKING:
    from rollout_node.peer import Peer

Document = dict[str, Any]


class PeerView:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def report(self, transfer: list[int] | None) -> Document:
        """The body of a REPORT. ``transfer``: bytes and microseconds of one that has just ended."""
        peer = self._peer
        return self._progress_of_all() | {
            "parent": peer.attachment.parent,
            "staged": None if peer.staged is None else list(peer.staged),
            "committed": None if (c := peer.committed) is None else list(c),
            "transfer": transfer,
        }

    def ready(self) -> tuple[bool, str]:
        peer = self._peer
        if peer.staged is None:
            return False, "no version is staged"
        waiting = [r.installer.name for r in peer.runners if not r.installer.ready]
        return not waiting, f"no verified weights in {', '.join(waiting)}" if waiting else ""

    def status(self) -> Document:
        peer = self._peer
        config, shadow, staged, parent = peer.config, peer.shadow, peer.staged, peer.attachment.parent
        return self._progress_of_all() | {
            "role": "peer",
            "run": config.token.run.hex(),
            "name": config.name,
            "node": peer.ident.hex(),
            "hub": {"address": show_address(*config.hub), "connected": peer.control.connected},
            "parent": None if parent is None else parent.hex(),
            "staged": None if staged is None else str(staged),
            "committed": None if (c := peer.committed) is None else str(c),
            "layout_id": None if shadow is None else shadow.layout.layout_id.hex(),
            "digests": {} if shadow is None or staged is None else {str(staged): f"{shadow.state_digest:016x}"},
            "children": [c.link.name for c in peer.downstream.children.values()],
            "socket": str(peer.socket.path.absolute()),
            "shadow": str(config.shadow),
            "pid": os.getpid(),
        }

    def families(self) -> Iterable[Metric]:
        peer = self._peer
        yield metrics.gauge("p2pcast_peer_hub_connected", "Whether the hub is in reach", float(peer.control.connected))
        if peer.staged is not None:
            yield metrics.gauge("p2pcast_peer_staged_step", "Step of the version staged", peer.staged.step)
        if (committed := peer.committed) is not None:
            yield metrics.gauge("p2pcast_peer_committed_step", "Step of the version that all engines use", committed.step)
        engines = [(r.installer.name, r) for r in peer.runners]
        yield metrics.labelled(
            "p2pcast_peer_engine_ready", "Whether an engine holds verified weights", ["engine"],
            (([n], float(r.installer.ready)) for n, r in engines),
        )  # fmt: skip
        yield metrics.labelled(
            "p2pcast_peer_commit_pause_seconds", "Pause of an engine's last commit", ["engine"],
            (([n], r.report.pause_s) for n, r in engines if r.report is not None),
        )  # fmt: skip

    def _progress_of_all(self) -> Document:
        peer = self._peer
        return {
            "epoch": list(peer.attachment.orders.epoch),
            "state": peer.busy,
            "progress": self._progress(),
            "bytes_received": peer.node.bytes_received,
            "bytes_duplicate": peer.node.bytes_duplicate,
            "engines": [r.status() for r in peer.runners],
            "error": peer.error,
        }

    def _progress(self) -> Document | None:
        live = [h for h in self._peer.node.holdings.values() if h.completed_at is None]
        if not live:
            return None
        newest = max(live, key=lambda h: h.open.version)
        return {"version": str(newest.open.version), "pieces": newest.artifact.held.count, "of": newest.assembly.pieces}
