"""Versions beside anchors that are being written, with real processes: both kinds are found, and all versions
arrive.
"""

from __future__ import annotations

from netem.bench.anchor_cost import beside_anchors
from p2pcast.process import event_loop

MIB = 1 << 20


def test_versions_with_and_without_anchors_are_distinguished(tmp_path, tmp_path_factory):
    hub = tmp_path_factory.mktemp("hub")
    found = event_loop.run(beside_anchors(tmp_path, hub, 8 * MIB, 1, 8, 3, 60.0))
    assert len(found.times) + found.left_out == 8
    assert len(found.anchors_s) >= 1
    assert all(0 < t.hub < t.whole and 0 < t.peers < t.whole for t in found.times)
    assert len(list((hub / "anchors").iterdir())) > len(found.anchors_s)
