"""The estimated bytes of a part of an artifact, and the cheapest path to some cells."""

from __future__ import annotations

from p2pcast.artifact.piece_size import LEAST_PIECE_BYTES, piece_bytes
from p2pcast.artifact.signed_records import HASH_BYTES
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground import limits
from p2pcast.ground.version import Version
from p2pcast.relay.artifact_excerpt import directory_bytes, expected_bytes
from p2pcast.relay.artifact_path import Edge
from p2pcast.state.version_reader import way_to

ANCHOR, DELTA = LEAST_PIECE_BYTES, limits.PIECE_BYTES
LAYOUT = Layout([Tensor(f"w{n}", "BF16", (3 * ANCHOR // 4,)) for n in range(8)])
"""8 cells, each of one and a half pieces of an anchor."""
ONE, TWO, THREE = (Version(0, n) for n in (1, 2, 3))


def beyond_directory(edge: Edge, *cells: int) -> int:
    return expected_bytes(edge, [LAYOUT.cells[n] for n in cells], LAYOUT) - expected_bytes(edge, [], LAYOUT)


def test_the_estimate_of_an_anchor_is_exact():
    whole = Edge(b"a", None, ONE, LAYOUT.nbytes)
    assert expected_bytes(whole, [], LAYOUT) == directory_bytes(LAYOUT.nbytes, ANCHOR, cells=8)
    assert beyond_directory(whole, 0) == 2 * ANCHOR
    assert beyond_directory(whole, 0, 1) == 3 * ANCHOR  # the piece in the middle counts once
    assert beyond_directory(whole, 1, 6) == 4 * ANCHOR
    assert beyond_directory(whole, *range(8)) == LAYOUT.nbytes


def test_the_estimate_of_a_delta_is_the_cells_share_and_at_most_all():
    delta = Edge(b"d", ONE, TWO, 800 * DELTA)
    assert beyond_directory(delta, 3) == 101 * DELTA
    assert beyond_directory(delta, *range(8)) == 800 * DELTA
    assert beyond_directory(Edge(b"s", ONE, TWO, 100), 3) == 100


def test_small_deltas_have_smaller_pieces():
    delta = Edge(b"d", ONE, TWO, 80 * DELTA)
    assert beyond_directory(delta, 3) == 10 * DELTA + LEAST_PIECE_BYTES
    pieces = 80 * DELTA // LEAST_PIECE_BYTES
    assert directory_bytes(delta.bytes, piece_bytes(delta.bytes), cells=0) >= pieces * HASH_BYTES


def test_a_path_has_the_fewest_bytes_and_then_the_fewest_artifacts():
    anchor, newer = Edge(b"a", None, ONE, 50), Edge(b"n", None, TWO, 90)
    one, two, both = Edge(b"1", ONE, TWO, 10), Edge(b"2", TWO, THREE, 10), Edge(b"3", ONE, THREE, 20)
    every = [anchor, newer, one, two, both]
    assert way_to(THREE, every) == [anchor, both]
    assert way_to(THREE, [anchor, newer, one, two]) == [anchor, one, two]
    assert way_to(THREE, every, base=TWO) == [two]
    assert way_to(THREE, every, base=THREE) == []
    assert way_to(THREE, [one, two]) is None
    assert way_to(THREE, [one, two], base=ONE) == [one, two]
    cheap = Edge(b"c", None, THREE, 5)
    assert way_to(THREE, [*every, cheap], base=ONE) == [cheap]
