from __future__ import annotations

import numpy as np

from p2pcast.codec.layout import Layout, Tensor
from rollout_node.shadow.version_digests import VersionDigests

LAYOUT = Layout([Tensor("a", "BF16", (3, 1024)), Tensor("b", "BF16", (1024,))], cell_words=1024)
TOP = (1 << 64) - 1


def test_digests_of_cells_add_up_to_their_tensors_and_to_the_state() -> None:
    found = VersionDigests(LAYOUT, np.array([1, 2, 3, 40], np.uint64))
    assert found.tensors() == {0: 6, 1: 40}
    assert found.state == 46


def test_sums_wrap_at_64_bits() -> None:
    found = VersionDigests(LAYOUT, np.array([TOP, 2, 0, TOP], np.uint64))
    assert found.tensors() == {0: 1, 1: TOP}
    assert found.state == 0
