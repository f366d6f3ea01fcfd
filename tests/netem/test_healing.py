"""What a rotten cell costs: real processes, bit for bit."""

from __future__ import annotations

from netem.healing import CELL_BYTES, HARMS, heal
from p2pcast import event_loop, limits


def test_it_costs_its_own_pieces_and_its_share_of_each_delta(tmp_path):
    harms = tuple(harm for harm in HARMS if harm.cells == 1 and not harm.disk)
    found = event_loop.run(heal(tmp_path, 3 * CELL_BYTES, 2, 1e9, 60.0, harms))
    deltas = [size for size in found.listed_bytes if size < found.state_bytes]
    # A piece more of the anchor, for a cell does not begin with one, and in each delta its share and a piece.
    most = CELL_BYTES + limits.ANCHOR_PIECE_BYTES + sum(size // 3 + 2 * limits.PIECE_BYTES for size in deltas)
    assert [row.harm.running for row in found.rows] == [False, True]
    for row in found.rows:
        assert CELL_BYTES <= row.pieces_bytes <= most
