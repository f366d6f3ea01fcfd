"""A peer that was away, by each way back: real processes, bit for bit."""

from __future__ import annotations

from netem.catchup import WAYS, come_back
from p2pcast import event_loop
from p2pcast.limits import MIB


def test_one_that_is_made_for_it_weighs_what_an_exact_squash_does(tmp_path):
    ways = {way: mode for way, mode in WAYS.items() if mode in ("none", "ask")}
    found = event_loop.run(come_back(tmp_path, MIB, 9, 1e9, "context", 60.0, ways))
    rows = dict(zip(ways.values(), found.rows, strict=True))
    assert rows["none"].bytes == found.chain_bytes
    assert rows["none"].artifacts == 9
    assert rows["ask"].bytes <= 1.05 * found.exact_bytes
    assert found.exact_bytes < found.chain_bytes
