"""The cost of a corrupt cell, with real processes, bit for bit."""

from __future__ import annotations

from netem.bench.repair_cost import CELL_BYTES, DAMAGES, repair
from p2pcast.ground import limits
from p2pcast.process import event_loop


def test_repair_fetches_the_cells_pieces_and_its_share_of_each_delta(tmp_path):
    damages = tuple(damage for damage in DAMAGES if damage.cells == 1 and not damage.disk)
    found = event_loop.run(repair(tmp_path, 3 * CELL_BYTES, 2, 1e9, 60.0, damages))
    deltas = [size for size in found.listed_bytes if size < found.state_bytes]
    # Anchor: one more piece, since a cell does not begin with a piece. Each delta: the cell's share and a piece.
    most = CELL_BYTES + limits.ANCHOR_PIECE_BYTES + sum(size // 3 + 2 * limits.PIECE_BYTES for size in deltas)
    assert [row.damage.running for row in found.rows] == [False, True]
    for row in found.rows:
        assert CELL_BYTES <= row.pieces_bytes <= most
