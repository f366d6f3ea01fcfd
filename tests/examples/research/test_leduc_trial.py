"""Trials of Leduc poker compare a model with the uniform player."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.research.learning_trial import Answer
from examples.research.leduc_trial import score, trial, uniform_chips
from p2pcast.tasks.poker_task import PLAYERS

pytest.importorskip("pyspiel")
DEALS = 40


def test_uniform_player_plays_legally_and_wins_nothing_in_the_mean() -> None:
    chips = uniform_chips(1000, 1)
    assert len(chips) == PLAYERS * 1000
    assert chips == uniform_chips(1000, 1)
    assert abs(sum(chips) / len(chips)) < 0.5, "both players draw their actions alike; the standard error is 0.1"


def test_score_compares_deal_by_deal() -> None:
    answers = [Answer(3.0, (("forfeit", "no"),)), Answer(1.0, (("forfeit", "yes"),))] * 3
    found = score(answers, [1.0, 1.0] * 3)
    assert (found.chips, found.uniform, found.gain, found.legal) == (2.0, 1.0, 1.0, 0.5)
    assert found.low == found.high == 1.0, "equal differences leave no doubt"


def test_trial_plays_held_out_deals_in_both_seats(tmp_path: Path) -> None:
    found = trial(tmp_path, 1, steps=1, sft=20, lr=3e-4, lag=0, deals=DEALS)
    assert len(found.before) == len(found.after) == PLAYERS * DEALS
    for one in (*found.before, *found.after):
        assert dict(one.tags)["forfeit"] in ("yes", "no")
