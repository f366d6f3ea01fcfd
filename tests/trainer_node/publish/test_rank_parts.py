"""Messages of ranks, in every order: cells come out whole, once and ascending; invalid parts are refused with the
senders' names.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError
from p2pcast.wire import messages
from trainer_node.publish.rank_parts import Complete, Disagreement, RankGroup, RankParts, Terms

LAYOUT = Layout(
    [Tensor("a", "F64", (7,)), Tensor("b", "BF16", (5, 9)), Tensor("c", "U8", (31,)), Tensor("nothing", "F32", (0,))],
    cell_words=8,
)
CELLS = LAYOUT.cells


def cell(index: int, start: int, words: int, *, stated: bool = False, **changes: Any) -> messages.Cell:
    size = words * CELLS[index].word_bytes if stated else 3
    body = {
        "serial": 0,
        "cell": index,
        "start": start,
        "words": words,
        "codec": 1 if stated else 3,
        "before": None if stated else 5,
    }
    return messages.Cell(**body | {"after": 7, "changed": 1, "payload": bytes(size)} | changes)


Said = tuple[str, Any]


def script(draw: random.Random, ranks: int, *, whole: bool) -> list[list[Said]]:
    """The messages of each rank: every cell cut at random and its ranges dealt at random, a part of them sent; PASSED
    at random places; DONE.
    """
    said: list[list[Said]] = [[] for _ in range(ranks)]
    for one in CELLS:
        edges = sorted({0, one.words, *(draw.randrange(one.words + 1) for _ in range(draw.randrange(4)))})
        ranges = list(pairwise(edges))
        draw.shuffle(ranges)
        for start, end in ranges:
            if whole or draw.random() < 0.4:
                stated = whole or draw.random() < 0.3
                draw.choice(said).append(("cell", cell(one.index, start, end - start, stated=stated)))
        for row in said:
            if draw.random() < 0.3:
                row.append(("passed", one.index + draw.randrange(2)))
    for row in said:
        row.append(("done", sum(what == "cell" for what, _ in row)))
    return said


def told(parts: RankParts, rank: int, what: str, value: Any) -> None:
    match what:
        case "cell":
            parts.add(rank, value)
        case "passed":
            parts.passed(rank, value)
        case "done":
            parts.done(rank, value)


def interleaved(draw: random.Random, said: list[list[Said]]) -> Iterator[tuple[int, Said]]:
    left = {rank: list(reversed(row)) for rank, row in enumerate(said)}
    while left:
        rank = draw.choice(sorted(left))
        for _ in range(draw.choice([1, 1, 5])):
            if left[rank]:
                yield rank, left[rank].pop()
        if not left[rank]:
            del left[rank]


@given(seed=st.integers(0, 1 << 32), ranks=st.integers(1, 5), whole=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_interleaving_gives_every_cell_whole_once_and_ascending(seed, ranks, whole):
    draw = random.Random(seed)
    said = script(draw, ranks, whole=whole)
    sent = sorted((b.cell, b.start, b.words) for row in said for what, b in row if what == "cell")
    parts = RankParts(LAYOUT, ranks, whole=whole)
    passed, finished = [0] * ranks, set()
    got: list[Complete] = []
    for rank, (what, value) in interleaved(draw, said):
        assert not parts.ended
        told(parts, rank, what, value)
        passed[rank] = {"cell": lambda v: v.cell, "passed": lambda v: v, "done": lambda v: len(CELLS)}[what](value)
        low = min(passed)
        finished |= {rank} if what == "done" else set()
        assert parts.behind == [r for r in range(ranks) if passed[r] == low and r not in finished]
        if draw.random() < 0.5:
            taken = parts.take()
            assert all(one.cell.index < low for one in taken), "a rank could still add to it"
            got += taken
            left = [b for row in said for what, b in row if what == "cell" and b.cell >= low]
            assert parts.waiting_bytes <= sum(len(b.payload) for b in left)
    assert parts.ended
    got += parts.take()
    assert parts.waiting_bytes == 0
    assert parts.take() == []
    order = [one.cell.index for one in got]
    assert order == sorted(set(order))
    assert [(one.cell.index, p.start, p.words) for one in got for p in one.parts] == sent
    assert all(one.bytes == sum(len(p.payload) for p in one.parts) for one in got)
    if whole:
        assert order == [c.index for c in CELLS]


@given(seed=st.integers(0, 1 << 32), ranks=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_in_a_whole_state_a_missing_part_is_found(seed, ranks):
    draw = random.Random(seed)
    said = script(draw, ranks, whole=True)
    row = draw.choice([r for r in said if any(what == "cell" for what, _ in r)])
    at = draw.choice([k for k, (what, _) in enumerate(row) if what == "cell"])
    lost = row.pop(at)[1].cell
    row[-1] = ("done", row[-1][1] - 1)
    parts = RankParts(LAYOUT, ranks, whole=True)
    with pytest.raises(RemoteError, match=rf"cell {lost} \(.\): \d+ of its \d+ words came from all ranks together"):  # noqa: PT012
        for rank, (what, value) in interleaved(draw, said):
            told(parts, rank, what, value)
            parts.take()


@given(seed=st.integers(0, 1 << 32), ranks=st.integers(1, 4), whole=st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_part_that_comes_twice_is_refused(seed, ranks, whole):
    """As overlapping, or as late: whichever rank repeats it, wherever it does."""
    draw = random.Random(seed)
    said = script(draw, ranks, whole=whole)
    rows = [r for r in said if len(r) > 1 and any(what == "cell" for what, _ in r)]
    if not rows:
        return
    again = draw.choice([value for what, value in draw.choice(rows) if what == "cell"])
    row = draw.choice(said)
    row.insert(draw.randrange(len(row)), ("cell", again))
    row[-1] = ("done", row[-1][1] + 1)
    parts = RankParts(LAYOUT, ranks, whole=whole)
    with pytest.raises(RemoteError, match=r"rank \d of \d.*(sent words \d+ to \d+ already|comes late|PASSED \d+ of)"):  # noqa: PT012
        for rank, (what, value) in interleaved(draw, said):
            told(parts, rank, what, value)


def test_overlaps_name_both():
    for start, words in ((0, 8), (2, 1), (0, 4), (3, 5), (5, 3), (4, 1)):
        parts = RankParts(LAYOUT, 4, whole=False)
        parts.add(1, cell(2, 2, 1))
        parts.add(1, cell(2, 4, 1))
        parts.add(2, cell(2, 5, 3))
        with pytest.raises(
            RemoteError, match=rf"rank 3 of 4: cell 2, words {start} to {start + words}: rank [12] of 4 sent words"
        ):
            parts.add(3, cell(2, start, words))
    parts.add(3, cell(2, 3, 1))
    parts.add(3, cell(2, 0, 2))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (replace(cell(len(CELLS) - 1, 0, 1), cell=len(CELLS)), "is not one of the layout's"),
        (replace(cell(0, 0, 1), cell=1 << 40), "is not one of the layout's"),
        (cell(6, 5, 1), "the cell has 5"),
        (cell(6, 0, 6), "the cell has 5"),
        (cell(6, 1 << 20, 1 << 20), "the cell has 5"),
        (cell(0, 0, 2, stated=True, payload=bytes(15)), "can't be these words"),
        (cell(0, 0, 2, stated=True, payload=bytes(17)), "can't be these words"),
        (cell(0, 0, 2, stated=True, codec=3), "can't be these words"),
        (cell(0, 0, 2, payload=b""), "can't be these words"),
        (cell(0, 0, 2, payload=bytes(2 * 16 + limits.CELL_OVERHEAD_BYTES + 1)), "can't be these words"),
    ],
)
def test_parts_that_can_not_be(body, why):
    parts = RankParts(LAYOUT, 2, whole=False)
    with pytest.raises(RemoteError, match=f"rank 1 of 2.*{why}"):
        parts.add(1, body)
    assert parts.waiting_bytes == 0


def test_a_change_against_nothing():
    with pytest.raises(RemoteError, match="nothing that it could change"):
        RankParts(LAYOUT, 1, whole=True).add(0, cell(0, 0, 1))


def test_nothing_comes_late():
    parts = RankParts(LAYOUT, 2, whole=False)
    parts.passed(1, 3)
    parts.add(1, cell(3, 0, 1))
    with pytest.raises(RemoteError, match="rank 1 of 2: cell 2 comes late: the rank has passed all cells below 3"):
        parts.add(1, cell(2, 0, 1))
    with pytest.raises(RemoteError, match="PASSED 2 of"):
        parts.passed(1, 2)
    with pytest.raises(RemoteError, match=f"PASSED {len(CELLS) + 1} of"):
        parts.passed(1, len(CELLS) + 1)
    parts.add(0, cell(0, 0, 1))
    with pytest.raises(RemoteError, match="rank 1 of 2 says that it sent 2 parts, 1 came"):
        parts.done(1, 2)
    parts.done(1, 1)
    for late in (
        lambda: parts.add(1, cell(9, 0, 1)),
        lambda: parts.passed(1, 9),
        lambda: parts.done(1, 1),
        lambda: parts.file(1, "a", b""),
    ):
        with pytest.raises(RemoteError, match="rank 1 of 2 sends more after its DONE"):
            late()
    assert not parts.ended
    assert parts.behind == [0]


def test_more_parts_than_a_cell_may_have():
    layout = Layout([Tensor("w", "U8", (3 * limits.MAX_CELL_PARTS,))])
    parts = RankParts(layout, 1, whole=False)
    for start in range(limits.MAX_CELL_PARTS):
        parts.add(0, cell(0, 2 * start, 1))
    with pytest.raises(RemoteError, match="more than 4096 parts of one cell"):
        parts.add(0, cell(0, 2 * limits.MAX_CELL_PARTS, 1))


def test_small_files():
    parts = RankParts(LAYOUT, 2, whole=False)
    assert parts.files is None
    parts.file(0, "a/b.json", b"1")
    parts.file(0, "empty", b"")
    assert parts.files == {"a/b.json": b"1", "empty": b""}
    for rank, path, why in (
        (1, "c", "rank 0 sends them"),
        (0, "../c", "hidden"),
        (0, "model.safetensors", "writes itself"),
        (0, "empty", "sent before"),
        (0, "a", "lies below another file"),
        (0, "empty/x", "lies below another file"),
    ):
        with pytest.raises(RemoteError, match=why):
            parts.file(rank, path, b"")
    for k in range(limits.MAX_FILES - 2):
        parts.file(0, f"f{k}", b"")
    with pytest.raises(RemoteError, match="one too many"):
        parts.file(0, "one", b"")


# -- groups


def group(ranks: int) -> RankGroup:
    made = RankGroup(b"g" * 16, ranks)
    for rank in reversed(range(ranks)):
        assert not made.complete
        made.enter(rank, ranks)
    assert made.complete
    return made


TERMS = Terms(0, 7, b"L" * 32, False)


def test_ranks_enter_once():
    made = RankGroup(b"g" * 16, 3)
    made.enter(1, 3)
    with pytest.raises(RemoteError, match="rank 1 of 3 is here already"):
        made.enter(1, 3)
    with pytest.raises(RemoteError, match="rank 0 of 4 does not fit a group of 3"):
        made.enter(0, 4)
    with pytest.raises(RemoteError, match="rank 3 of 3 does not fit"):
        made.enter(3, 3)
    with pytest.raises(RemoteError, match="BEGIN of serial 0 while"):
        made.begin(1, TERMS)


@given(st.permutations(range(4)))
def test_all_must_begin(order):
    made = group(4)
    assert [made.begin(rank, TERMS) for rank in order] == [False, False, False, True]
    assert made.terms == TERMS
    with pytest.raises(RemoteError, match="rank 2 of 4: BEGIN of serial 1 while the one before is not over"):
        made.begin(2, Terms(1, 8, b"L" * 32, False))
    with pytest.raises(RemoteError, match="CELL of serial 0, which was not BEGUN"):
        made.receiving(0, "CELL")
    parts = made.begun(LAYOUT, whole=False)
    assert made.receiving(0, "CELL") is parts
    with pytest.raises(RemoteError, match="CELL of serial 1, which was not BEGUN"):
        made.receiving(1, "CELL")
    assert not made.late(0)
    assert made.end() == 0
    assert made.late(0)
    assert not made.late(1)
    assert made.terms is made.parts is None


@given(
    order=st.permutations(range(5)),
    odd=st.integers(0, 4),
    other=st.sampled_from(
        [
            Terms(1, 7, b"L" * 32, False),
            Terms(0, 8, b"L" * 32, False),
            Terms(0, 7, b"M" * 32, False),
            Terms(0, 7, b"L" * 32, True),
        ]
    ),
)  # fmt: skip
def test_one_error_lists_the_terms_of_each_rank(order, odd, other):
    made = group(5)
    for rank in order[:-1]:
        assert not made.begin(rank, other if rank == odd else TERMS)
    with pytest.raises(Disagreement) as error:
        made.begin(order[-1], other if order[-1] == odd else TERMS)
    text = str(error.value)
    assert f"rank {odd} said {other}" in text
    assert f"said {TERMS}" in text
    assert text.count("said") == 2
    assert made.end() == other.serial
    assert made.begin(0, Terms(2, 7, b"L" * 32, False)) is False


def test_many_ranks_are_named_in_spans():
    made = group(9)
    for rank in range(8):
        made.begin(rank, Terms(0, 9, b"L" * 32, False) if rank in (2, 5) else TERMS)
    with pytest.raises(
        Disagreement,
        match=r"ranks 0-1, 3-4, 6-8 said serial 0, step 7, layout 4c4c4c4c; ranks 2, 5 said serial 0, step 9",
    ):
        made.begin(8, TERMS)


def test_a_serial_may_end_before_its_begin():
    """A rank whose own work failed reports that before the other ranks' BEGIN."""
    made = group(2)
    made.begin(0, TERMS)
    assert made.end(3) == 3
    assert made.late(3)
    assert made.begin(0, Terms(4, 1, b"L" * 32, False)) is False
