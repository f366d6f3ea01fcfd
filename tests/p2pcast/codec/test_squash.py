"""Squash: a chain composed without the base says exactly what the direct change says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcast.codec import cell as codec
from p2pcast.codec.layout import Cell
from p2pcast.codec.squash import squash
from p2pcast.errors import IntegrityError, UsageError


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
def test_squash_of_flat_links_is_the_direct_change(width, words, links, seed, data):
    cell = Cell(2, 1, data.draw(st.integers(0, 2000)), words, width, 0)
    rng = np.random.default_rng(seed)
    top = (1 << 8 * width) - 1
    states = [np.frombuffer(rng.bytes(width * words), dtype=f"<u{width}")]
    few = rng.choice(words, min(words, 12), replace=False)  # the same words over and over, so that steps meet and cancel
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
def test_any_mix_leads_to_the_last_state(names, seed):
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


def test_squashes_squash():
    cell = Cell(0, 0, 0, 5000, 2, 0)
    rng = np.random.default_rng(0)
    states = [rng.integers(0, 1 << 16, 5000, dtype=np.uint16)]
    for _ in range(8):
        states.append(states[-1] + (rng.random(5000) < 0.02).astype("<u2"))
    links = chain(cell, states, ["flat"] * 8)
    halves = [link_of(squash(cell, links[:4])), link_of(squash(cell, links[4:]))]
    assert squash(cell, halves) == squash(cell, links)


def test_there_and_back_is_nothing():
    cell = Cell(0, 0, 0, 50, 2, 0)
    old = np.arange(50, dtype="<u2")
    new = old.copy()
    new[[0, 49]] += 3
    assert squash(cell, chain(cell, [old, new, old], ["flat", "flat"])) is None
    whole = squash(cell, chain(cell, [old, new, old], ["dense", "flat"]))
    assert whole.before == whole.after
    assert whole.codec in (codec.DENSE, codec.RAW)


def test_links_that_do_not_chain():
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
    with pytest.raises(IntegrityError, match="cell 6: a link does not lead to its digest"):
        squash(cell, [(codec.RAW, bytes(damaged), *links[0][2:]), links[1]])


def test_context_needs_the_base():
    with pytest.raises(UsageError, match="codec context can't be squashed without the base"):
        squash(Cell(0, 0, 0, 5, 2, 0), [(codec.CONTEXT, b"", 1, 2)])
