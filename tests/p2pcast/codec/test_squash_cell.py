"""Squash: a chain composed without the base equals the direct change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.codec import cell as codec
from p2pcast.codec.layout import Cell
from p2pcast.codec.squash_cell import needs_base, squash
from p2pcast.ground.errors import IntegrityError, UsageError


def link_of(coded):
    return coded.codec, coded.payload, coded.before, coded.after


def chain(cell, states, names):
    pairs = zip(states, states[1:], names, strict=False)
    coded = [codec.encode(cell, old, new, codec=name) for old, new, name in pairs]
    return [link_of(c) for c in coded if c is not None]


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    words=st.integers(1, 400),
    links=st.integers(1, 6),
    seed=st.integers(0, 1 << 32),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_squash_of_flat_links_equals_the_direct_change(width, words, links, seed, data):
    cell = Cell(2, 1, data.draw(st.integers(0, 2000)), words, width, 0)
    rng = np.random.default_rng(seed)
    top = (1 << 8 * width) - 1
    states = [np.frombuffer(rng.bytes(width * words), dtype=f"<u{width}")]
    few = rng.choice(words, min(words, 12), replace=False)  # the same words repeatedly, so that steps add up and cancel
    for _ in range(links):
        new = states[-1].copy()
        where = few[rng.random(few.size) < 0.5]
        new[where] += rng.choice(np.array([1, 2, top - 1, top, top // 2 + 1], dtype=new.dtype), where.size)
        states.append(new)
    steps = chain(cell, states, ["flat"] * links)
    direct = codec.encode(cell, states[0], states[-1], codec="flat")
    if steps:
        assert squash(cell, steps) == direct
    else:
        assert direct is None


@given(names=st.lists(st.sampled_from(["flat", "dense", "raw"]), min_size=1, max_size=6), seed=st.integers(0, 1 << 32))
@settings(max_examples=80, deadline=None)
def test_any_mix_of_links_leads_to_the_last_state(names, seed):
    cell = Cell(0, 0, 77, 300, 2, 0)
    rng = np.random.default_rng(seed)
    states = [rng.integers(0, 1 << 16, 300, dtype=np.uint16)]
    for _ in names:
        new = states[-1].copy()
        new[rng.choice(300, 9)] += np.uint16(1)
        states.append(new)
    made = squash(cell, chain(cell, states, names))
    assert made.codec == (codec.FLAT if set(names) == {"flat"} else made.codec)
    patch = codec.decode(cell, made.codec, made.payload, states[0], made.before, made.after)
    target = states[0].copy()
    codec.apply(patch, target)
    assert target.tolist() == states[-1].tolist()


def test_squashes_can_be_squashed():
    cell = Cell(0, 0, 0, 5000, 2, 0)
    rng = np.random.default_rng(0)
    states = [rng.integers(0, 1 << 16, 5000, dtype=np.uint16)]
    for _ in range(8):
        states.append(states[-1] + (rng.random(5000) < 0.02).astype("<u2"))
    links = chain(cell, states, ["flat"] * 8)
    halves = [link_of(squash(cell, links[:4])), link_of(squash(cell, links[4:]))]
    assert squash(cell, halves) == squash(cell, links)


def test_change_and_its_inverse_cancel():
    cell = Cell(0, 0, 0, 50, 2, 0)
    old = np.arange(50, dtype="<u2")
    new = old.copy()
    new[[0, 49]] += 3
    assert squash(cell, chain(cell, [old, new, old], ["flat", "flat"])) is None
    whole = squash(cell, chain(cell, [old, new, old], ["dense", "flat"]))
    assert whole.before == whole.after
    assert whole.codec in (codec.DENSE, codec.RAW)


def test_links_that_do_not_chain_are_refused():
    cell = Cell(6, 0, 0, 50, 2, 0)
    a, b, c = (np.full(50, k, dtype="<u2") for k in range(3))
    links = chain(cell, [a, b, c], ["flat", "flat"])
    with pytest.raises(IntegrityError, match="cell 6: link 1 starts at digest"):
        squash(cell, [links[1], links[0]])
    with pytest.raises(IntegrityError, match="cell 6: its steps cancel out"):
        squash(cell, [links[0], (*chain(cell, [b, a], ["flat"])[0][:2], links[0][3], 99)])
    with pytest.raises(UsageError, match="nothing to squash"):
        squash(cell, [])


def test_a_whole_link_must_lead_to_its_digest():
    cell = Cell(6, 0, 0, 50, 2, 0)
    a, b, c = (np.full(50, k, dtype="<u2") for k in range(3))
    links = chain(cell, [a, b, c], ["raw", "flat"])
    damaged = bytearray(links[0][1])
    damaged[7] ^= 1
    with pytest.raises(IntegrityError, match="cell 6: raw payload leads to digest"):
        squash(cell, [(codec.RAW, bytes(damaged), *links[0][2:]), links[1]])


CODECS = ("flat", "dense", "raw", "context")


def walk(cell, count, seed, *, among=12):
    """States in which the same few words move repeatedly, so that steps add up and cancel."""
    rng = np.random.default_rng(seed)
    width, top = cell.word_bytes, (1 << 8 * cell.word_bytes) - 1
    states = [np.frombuffer(rng.bytes(width * cell.words), dtype=f"<u{width}")]
    few = rng.choice(cell.words, min(cell.words, among), replace=False)
    for _ in range(count):
        new = states[-1].copy()
        where = few[rng.random(few.size) < 0.5]
        new[where] += rng.choice(np.array([1, 2, top - 1, top, top // 2 + 1], dtype=new.dtype), where.size)
        states.append(new)
    return states


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    words=st.integers(1, 400),
    names=st.lists(st.sampled_from(CODECS), min_size=1, max_size=6),
    codec_of_result=st.sampled_from(("auto", *CODECS)),
    seed=st.integers(0, 1 << 32),
)
@settings(max_examples=200, deadline=None)
def test_any_codec_is_possible_with_the_base(width, words, names, codec_of_result, seed):
    cell = Cell(2, 1, 77, words, width, 0, 10)
    states = walk(cell, len(names), seed)
    links = chain(cell, states, names)
    if not links:
        return
    made = squash(cell, links, base=states[0], codec=codec_of_result)
    direct = codec.encode(cell, states[0], states[-1])
    if direct is None:
        assert made is None
        return
    assert (made.before, made.after, made.changed) == (direct.before, direct.after, direct.changed)
    assert len(made.payload) <= max(cell.nbytes, len(codec.encode(cell, states[0], states[-1], codec="flat").payload))
    target = states[0].copy()
    codec.apply(codec.decode(cell, made.codec, made.payload, states[0], made.before, made.after), target)
    assert target.tolist() == states[-1].tolist()


@pytest.mark.parametrize(
    ("names", "made_of"),
    [
        (["context", "flat"], codec.CONTEXT),
        (["flat", "context"], codec.CONTEXT),
        (["flat", "flat"], codec.FLAT),
        (["flat", "raw"], codec.FLAT),
    ],
)
def test_result_has_the_codec_of_its_links(names, made_of):
    cell = Cell(0, 0, 0, 60_000, 2, 0, 300)
    rng = np.random.default_rng(0)
    states = [rng.standard_normal(60_000).astype(np.float16).view(np.uint16)]
    for _ in names:
        states.append(states[-1] + (rng.random(60_000) < 0.02).astype("<u2"))
    links = chain(cell, states, names)
    made = squash(cell, links, base=states[0])
    assert made.codec == made_of
    with pytest.raises(IntegrityError, match="wrong base"):
        squash(cell, links, base=states[1])


def test_links_before_a_whole_link_are_ignored():
    cell = Cell(0, 0, 0, 200, 2, 0, 20)
    states = walk(cell, 3, 5)
    links = chain(cell, states, ["context", "raw", "context"])
    made = squash(cell, links)
    assert (
        codec.decode(cell, made.codec, made.payload, None, made.before, made.after).words.tolist()
        == states[-1].tolist()
    )
    assert squash(cell, [(codec.CONTEXT, b"never decoded", *links[0][2:]), *links[1:]]) == made
    assert not needs_base([codec.FLAT, codec.CONTEXT, codec.DENSE, codec.CONTEXT])


def test_missing_base_is_a_usage_error():
    cell = Cell(0, 0, 0, 50, 2, 0)
    with pytest.raises(UsageError, match="codec context can't be squashed without the base"):
        squash(cell, [(codec.CONTEXT, b"", 1, 2)])
    with pytest.raises(UsageError, match="codec 9 can't be squashed without the base"):
        squash(cell, [(9, b"", 1, 2)])
    states = walk(cell, 1, 0)
    with pytest.raises(UsageError, match="can't be coded as dense without the base"):
        squash(cell, chain(cell, states, ["flat"]), codec="dense")
    with pytest.raises(IntegrityError, match="codec 9 is unknown"):
        squash(cell, [(9, b"", codec.digest(states[0], cell), 2)], base=states[0])
    assert needs_base([codec.FLAT, codec.CONTEXT])
    assert not needs_base([codec.FLAT])


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_malformed_link_leaves_scratch_arrays_clean(width):
    cell = Cell(0, 0, 0, 5000, width, 0)
    states = walk(cell, 2, width, among=300)
    links = chain(cell, states, ["flat", "flat"])
    with pytest.raises(IntegrityError):
        squash(cell, [links[0], (codec.FLAT, links[1][1][:-1], *links[1][2:])])
    assert squash(cell, links) == codec.encode(cell, states[0], states[-1], codec="flat")


def test_wrong_steps_are_detected_with_the_base():
    cell = Cell(0, 0, 0, 5000, 2, 0)
    states = walk(cell, 2, 1, among=300)
    links = chain(cell, states, ["flat", "flat"])
    wrong = [links[0], (*links[1][:3], links[1][3] ^ 1)]
    assert squash(cell, wrong).after == wrong[1][3]
    with pytest.raises(IntegrityError, match="leads to digest"):
        squash(cell, wrong, base=states[0])
