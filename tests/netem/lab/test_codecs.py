"""In every format, one end decodes what the other end has coded. Rows name the fastest format and the rule's choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from netem.lab.coded_transfer import OURS, States, costs, frames, undo, write
from netem.lab.experiments.codecs import FORMATS, expected_s, rows
from p2pcast.codec.codec_prediction import BroadcastPath, Cost, StateSize
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground.errors import IntegrityError


@pytest.fixture
def states(tmp_path: Path) -> States:
    layout = Layout([Tensor("a", "BF16", (300, 200)), Tensor("b", "BF16", (50_000,))])
    random = np.random.default_rng(0)
    old = random.integers(0x3C00, 0x3E00, layout.nbytes // 2, np.uint16)
    new = old.copy()
    new[random.random(new.size) < 0.01] += 1
    write(tmp_path, layout, old, new)
    return States.read(tmp_path)


def test_words_are_read_back_in_the_layouts_order(states: States) -> None:
    cells = states.layout.cells
    assert sum(states.of(cell, states.new).size for cell in cells) == states.new.size
    assert sum(len(positions) for positions, _ in states.changes()) == int((states.old != states.new).sum())


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_coded_and_decoded(states: States, name: str) -> None:
    found = costs(states, name)
    assert 0 < found["bytes"] < states.old.nbytes
    assert found["encode_s"] > 0
    assert len(list(frames(states, name))) == (2 if name in OURS else 1)


def test_our_formats_are_verified_by_the_receiver(states: States) -> None:
    index, codec, before, after, payload = next(frames(states, "flat"))
    with pytest.raises(IntegrityError):
        undo(states, "flat", (index, codec, before, after ^ 1), payload)


COSTS = {
    "context": Cost(2e9, 2e9, 1 / 200),
    "flat": Cost(6e9, 6e9, 1 / 130),
    "pulse zstd-1": Cost(3e9, 9e9, 1 / 55),
}
STATE = StateSize(200_000_000, 8 << 20)


def at(bps: float, measured: dict[str, float | None]) -> dict[str, dict[str, Any]]:
    found = [each["row"] for each in rows(COSTS, BroadcastPath(bps, 1, 1, proof=False), STATE, bps, measured)]
    return {row["format"]: row for row in found}


def test_rule_prefers_small_formats_on_slow_and_fast_formats_on_fast_links() -> None:
    slow, fast = at(10e6, {}), at(10e9, {})
    assert slow["context"]["chosen"]
    assert slow["context"]["to_best"] == 1.0
    assert fast["flat"]["chosen"]
    assert all(row["simulated"] for row in slow.values())


def test_choice_is_judged_by_measured_times() -> None:
    found = at(10e6, {"context": 2.0, "flat": 1.0, "pulse zstd-1": 0.5})
    assert found["context"]["to_best"] == 2.0
    assert found["context"]["to_best_of_all"] == 4.0
    assert found["pulse zstd-1"]["fastest"]
    assert not found["flat"]["simulated"]
    assert found["flat"]["to_best"] is None


def test_rival_formats_are_predicted_sequentially() -> None:
    way = BroadcastPath(100e6, 1, 1, proof=False)
    cost = COSTS["pulse zstd-1"]
    parts_s = STATE.nbytes * (1 / cost.encode_bytes_s + 1 / cost.decode_bytes_s + 8 * cost.share / 100e6)
    assert expected_s("pulse zstd-1", cost, way, STATE) == pytest.approx(parts_s)
