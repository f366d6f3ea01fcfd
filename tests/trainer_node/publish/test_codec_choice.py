"""A hub's measurements of codecs from its own versions, and its coding of cells after the choice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from p2pcast.codec.cell import CONTEXT, DENSE, FLAT, RAW, decode, digest, encode
from p2pcast.codec.codec_prediction import MEASURED_BEFORE, BroadcastPath, Choice, StageTimes
from p2pcast.codec.encode_cell import encode_as_chosen, recode_in_context
from p2pcast.codec.join_parts import CellPart, within
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.version import Version
from p2pcast.state.patch_file import PatchFile, PatchWriter
from p2pcast.state.shadow import Shadow
from p2pcast.state.staging import Staging
from trainer_node.publish import codec_choice
from trainer_node.publish.codec_choice import CodecChoice
from trainer_node.publish.delta_builder import join_incoming
from trainer_node.publish.rank_parts import Complete

LARGE = Layout([Tensor("w", "BF16", (1 << 17, 1 << 16))])
SLOW, FAST = BroadcastPath(1e6, 16, 16), BroadcastPath(1e12, 16, 16)
LAYOUT = Layout(
    [Tensor("a", "BF16", (300, 1000)), Tensor("b", "F32", (777,)), Tensor("c", "BF16", (5,))], cell_words=70_000
)


def times():
    return dict.fromkeys(MEASURED_BEFORE, StageTimes(1, 1, 1, 1))


def changed(words, share, seed=0):
    rng = np.random.default_rng(seed)
    return words + (rng.random(words.size) < share).astype(words.dtype)


@pytest.fixture
def staged(tmp_path):
    """A shadow, the patch to its next version, and the words there."""

    def make(share=0.02, dense_cells=()):
        rng = np.random.default_rng(1)
        old = {c.index: rng.integers(0x3C00, 0x4000, c.words).astype(f"<u{c.word_bytes}") for c in LAYOUT.cells}
        shadow = Shadow.create(tmp_path / "shadow", LAYOUT)
        shadow.fill(Version(0, 1), lambda c: old[c.index], None)
        writer = PatchWriter(shadow.patch_path(Version(0, 2)), LAYOUT, Version(0, 1), Version(0, 2))
        new = {}
        for cell in LAYOUT.cells:
            new[cell.index] = changed(old[cell.index], share, cell.index)
            codec = "dense" if cell.index in dense_cells else "flat"
            coded = encode(cell, old[cell.index], new[cell.index], codec=codec)
            if coded is not None:
                writer.add(decode(cell, coded.codec, coded.payload, old[cell.index], coded.before, coded.after))
        writer.finish(0)
        return shadow, shadow.patch_path(Version(0, 2)), new

    return make


def test_a_stated_codec_is_taken():
    for told in ("context", "flat", "dense"):
        chosen = CodecChoice(told, lambda: SLOW).next(LAYOUT)
        assert (chosen.codec, chosen.why) == (told, "configured")
        assert not CodecChoice(told, lambda: SLOW).is_lesson(told, 1, 1)


def test_the_way_is_asked_for_each_version():
    way = SLOW
    chosen = CodecChoice("auto", lambda: way)
    assert chosen.next(LAYOUT).codec == "context"
    way = FAST
    assert chosen.next(LAYOUT).codec == "context", "this layout takes hardly any time in either"
    assert chosen.next(LARGE).codec == "flat"
    assert chosen.next(Layout([])).codec in MEASURED_BEFORE


def test_the_choice_samples_the_first_version_and_every_nth(staged):
    shadow, patch, _ = staged()
    one = CodecChoice("auto", lambda: SLOW)
    assert not one.is_lesson("context", 0, LAYOUT.nbytes)
    assert one.is_lesson("context", 1000, LAYOUT.nbytes)
    one.learn(shadow, patch)
    assert one.costs.keys() == MEASURED_BEFORE.keys()
    assert one.costs["context"].share < one.costs["flat"].share < one.costs["dense"].share
    as_before = round(one.costs["context"].share * LAYOUT.nbytes)
    assert [one.is_lesson("context", as_before, LAYOUT.nbytes) for _ in range(50)] == [False] * 49 + [True]
    one.learn(shadow, patch)
    assert [one.is_lesson("context", 3 * as_before, LAYOUT.nbytes) for _ in range(10)] == [False] * 9 + [True]
    shadow.close()


def test_a_version_in_which_no_sample_changed_teaches_nothing(staged):
    shadow, patch, _ = staged(share=0)
    one = CodecChoice("auto", lambda: SLOW)
    one.learn(shadow, patch)
    assert one.costs is MEASURED_BEFORE
    shadow.close()


@pytest.mark.parametrize("dense_cells", [(), (1, 3)])
def test_samples_are_parts_of_both_states(staged, monkeypatch, dense_cells):
    monkeypatch.setattr(codec_choice, "PART_WORDS", 10_000)
    monkeypatch.setattr(codec_choice, "SAMPLED_BYTES", 400_000)
    shadow, patch, new = staged(0.02, dense_cells)
    found = codec_choice.samples(shadow, PatchFile.open(patch, LAYOUT))
    assert len({(cell.index, cell.start) for cell, _, _ in found}) == len(found) == 10
    for cell, before, after in found:
        whole = LAYOUT.cells[cell.index]
        at = cell.start - whole.start
        assert (before == shadow.words(whole)[at : at + cell.words]).all()
        assert (after == new[cell.index][at : at + cell.words]).all()
    shadow.close()


def a_cell(share):
    cell = LAYOUT.cells[1]
    old = np.random.default_rng(2).integers(0x3C00, 0x4000, cell.words).astype("<u2")
    return cell, old, changed(old, share, 3)


@pytest.mark.parametrize(
    ("codec", "told", "share", "expected"),
    [
        ("context", False, 0.01, {CONTEXT}),
        ("context", True, 0.01, {CONTEXT}),
        ("flat", False, 0.01, {FLAT}),
        ("flat", True, 1.0, {FLAT}),
        ("dense", True, 0.01, {DENSE}),
    ],
)
def test_cells_are_coded_as_chosen(codec, told, share, expected):
    cell, old, new = a_cell(share)
    coded = encode_as_chosen(
        cell, old, new, digest(old, cell), Choice(codec, None if told else SLOW, None if told else times())
    )
    assert coded.codec in expected
    assert decode(cell, coded.codec, coded.payload, old, coded.before, coded.after).after == digest(new, cell)
    assert encode_as_chosen(cell, old, old, digest(old, cell), Choice(codec)) is None


@pytest.mark.parametrize("codec", ["context", "flat"])
def test_fully_changed_cells_take_the_smallest_codec(codec):
    cell, old, _ = a_cell(0)
    new = np.random.default_rng(9).integers(0, 1 << 16, cell.words).astype("<u2")
    coded = encode_as_chosen(cell, old, new, digest(old, cell), Choice(codec, SLOW, times()))
    assert coded.codec in (DENSE, RAW)
    assert len(coded.payload) <= cell.nbytes


def test_cells_from_ranks_are_coded_in_context():
    cell, old, new = a_cell(0.01)
    flat = encode(cell, old, new, codec="flat")
    coded = recode_in_context(cell, flat, old)
    assert coded == encode(cell, old, new, codec="context")
    for codec in ("dense", "context"):
        other = encode(cell, old, new, codec=codec)
        assert recode_in_context(cell, other, old) is other


class Brought:
    """Cells from ranks, all at once."""

    files = None

    def __init__(self, cells):
        self._cells = cells

    async def take(self):
        given, self._cells = self._cells, []
        return given

    def settled(self, nbytes): ...


def halves(cell):
    return [(0, cell.words // 2), (cell.words // 2, cell.words)]


def part(cell, old, new, begin, end):
    sub = within(cell, begin, end - begin)
    coded = encode(sub, old[begin:end], new[begin:end], codec="flat")
    return CellPart(begin, end - begin, coded.codec, coded.payload, coded.before, coded.after)


class Packed(list):
    add = list.append

    def emit(self): ...


@pytest.mark.parametrize(
    ("codec", "told", "number"), [("context", False, CONTEXT), ("context", True, CONTEXT), ("flat", False, FLAT)]
)
async def test_cells_from_ranks_are_sent_in_the_chosen_codec(staged, codec, told, number):
    shadow, _, new = staged()
    cells = [c for c in LAYOUT.cells if c.words > 100]
    old = {c.index: shadow.words(c) for c in cells}
    brought = [Complete(c, [part(c, old[c.index], new[c.index], *piece) for piece in halves(c)], 1) for c in cells]
    packed, staging = Packed(), Staging(1)
    await join_incoming(
        Brought(brought), shadow, packed, Choice(codec, None if told else SLOW, None if told else times()), staging
    )
    assert [one.cell for one in packed] == [c.index for c in cells]
    assert number in {one.codec for one in packed}
    for one in packed:
        patch = decode(LAYOUT.cells[one.cell], one.codec, one.payload, old[one.cell], one.before, one.after)
        assert patch.after == digest(new[one.cell], LAYOUT.cells[one.cell])
    staging.close()
    shadow.close()


async def test_a_whole_context_cell_is_sent_unchanged(staged, monkeypatch):
    shadow, _, new = staged()
    cell = max(LAYOUT.cells, key=lambda c: c.words)
    coded = encode(cell, shadow.words(cell), new[cell.index], before=shadow.mark(cell.index), codec="context")
    part = CellPart(0, cell.words, coded.codec, coded.payload, coded.before, coded.after)
    monkeypatch.setattr("p2pcast.codec.encode_cell.encode", None)
    packed, staging = Packed(), Staging(1)
    await join_incoming(Brought([Complete(cell, [part], 1)]), shadow, packed, Choice("context"), staging)
    assert packed == [coded]
    staging.close()
    shadow.close()


def test_context_that_is_larger_is_not_taken(monkeypatch):
    cell, old, new = a_cell(0.01)
    flat = encode(cell, old, new, codec="flat")
    monkeypatch.setattr(
        "p2pcast.codec.encode_cell.encode", lambda *_, **__: replace(flat, payload=bytes(len(flat.payload)))
    )
    assert recode_in_context(cell, flat, old) is flat


def test_costs_are_of_the_samples():
    cell, old, new = a_cell(0.01)
    cost = codec_choice.measured("flat", [(cell, old, new)] * 2)
    coded = encode(cell, old, new, codec="flat")
    assert cost.share == pytest.approx(len(coded.payload) / cell.nbytes)
    assert cost.encode_bytes_s > 0
    assert cost.decode_bytes_s > 0
