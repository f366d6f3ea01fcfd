"""A peer that missed versions, by each policy: real processes, bit for bit."""

from __future__ import annotations

from netem.bench.catchup_cost import POLICIES, catch_up
from p2pcast.ground.limits import MIB
from p2pcast.process import event_loop


def test_on_demand_squash_has_the_size_of_an_exact_squash(tmp_path):
    policies = {policy: mode for policy, mode in POLICIES.items() if mode in ("none", "ask")}
    found = event_loop.run(catch_up(tmp_path, MIB, 9, 1e9, "context", 60.0, policies))
    rows = dict(zip(policies.values(), found.rows, strict=True))
    assert rows["none"].bytes == found.chain_bytes
    assert rows["none"].artifacts == 9
    assert rows["ask"].bytes <= 1.05 * found.exact_bytes
    assert found.exact_bytes < found.chain_bytes
