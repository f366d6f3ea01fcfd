"""``p2pcast bench latency``: moments in order at a real hub with real peers, from folders and from a publisher."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from netem.broadcast.weights import SparseWeights, changed_words
from netem.fleet.saved_weights import noise
from netem.latency import SOURCES
from netem.latency.version_latency import MOMENTS, depth
from p2pcast.ground.limits import MIB


def test_depth_is_that_of_the_deepest_peer() -> None:
    assert depth({"a": "hub", "b": "a", "c": "b", "d": "hub"}) == 3
    assert depth({}) == 0


@pytest.mark.parametrize("delta_bytes", [1000, 20_000, 500_000])
def test_sparse_weights_change_as_many_words_as_the_delta_takes(delta_bytes: int) -> None:
    weights = SparseWeights(2 * MIB, delta_bytes)
    one, two, three = weights(), weights(), weights()
    for before, after in ((one, two), (two, three)):
        changed = sum(int((before[name].view(np.uint16) != after[name].view(np.uint16)).sum()) for name in before)
        assert changed == changed_words(MIB, delta_bytes)
        # Random words and their places take from two to five bytes.
        assert 2 * changed < delta_bytes < 5 * changed


def test_equal_arguments_give_equal_weights_and_still_tensors_stay() -> None:
    first, second = islice(noise(MIB, still=1), 2)
    assert all(np.array_equal(first[name][2], words) for name, (_, _, words) in next(noise(MIB, still=1)).items())
    same = {name for name in first if np.array_equal(first[name][2], second[name][2])}
    assert same == {"still0"}


@pytest.mark.root
def test_moments_come_in_order_and_every_version_is_compared(p2pcast) -> None:
    said = p2pcast("bench", "latency", "--rtt", 0, "--peers", 2, "--delta", 20, "--state", 1, "--rounds", 1, "--json")
    assert said.returncode == 0, said.stderr
    rows = json.loads(said.stdout)["rows"]
    assert [row["source"] for row in rows] == list(SOURCES)
    for row in rows:
        times_s = [row[f"{name}_s"] for name in MOMENTS]
        assert times_s == sorted(times_s)
        assert times_s[0] > 0
        assert row["first_live_s"] <= row["live_s"]
        assert 10_000 < row["bytes"] < 40_000
        assert row["hops"] in (1, 2)
        assert row["beyond_s"] <= row["live_s"]


def test_a_backend_that_is_missing_is_named(p2pcast, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    said = p2pcast("bench", "latency", "--rtt", 20, "--backend", "uml")
    assert said.returncode == 1
    assert "cannot be emulated here" in said.stderr
