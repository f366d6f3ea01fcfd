"""A fleet's plan: cheapest workers, prospects, refusals."""

from __future__ import annotations

import math

import pytest

from p2pcast.ground.errors import UsageError
from trainer_node.scheduling.overlap import RolloutPace
from trainer_node.scheduling.worker_fleet_plan import MOST_WORKERS, WorkerOffer, planned

PACE = RolloutPace(1631.2, 1437.0, 2048, 2)
"""ECHO-2's Qwen3-8B at S = 3."""
GPU = WorkerOffer("gpu", 0.35, 0.2805, 12)


def test_the_papers_fleet_of_nine_is_chosen():
    made = planned(PACE, 3, [GPU], learner_usd_per_h=12.24)
    assert made.chosen is not None
    assert len(made.chosen) == 9
    assert made.prospect.bubble == made.prospect.bubble_within == 0
    assert made.prospect.usd_per_step == pytest.approx((12.24 + 9 * 0.35) * 1631.2 / 3600)
    assert made.prospect.staleness == 3


def test_the_dearer_kind_is_left_out():
    made = planned(PACE, 3, [GPU, WorkerOffer("old", 0.3, 0.1, 40)])
    assert made.chosen is not None
    assert {one.name.split("-")[0] for one in made.chosen} == {"gpu"}


def test_bubbles_shrink_with_workers_and_cost_rises_without_bubbles():
    made = planned(PACE, 3, [GPU], learner_usd_per_h=12.24)
    bubbles = [each.bubble for each in made.growth]
    assert bubbles == sorted(bubbles, reverse=True)
    assert all(each.bubble_within <= each.bubble for each in made.growth)
    cheapest = min(made.growth, key=lambda each: each.usd_per_step)
    assert cheapest.workers == 8, "ECHO-2: eight workers just saturate the learner"


def test_too_few_workers_get_a_prospect_and_no_fleet():
    made = planned(PACE, 3, [WorkerOffer("gpu", 0.35, 0.2805, 3)])
    assert made.chosen is None
    assert made.prospect.workers == 3
    assert made.prospect.bubble > 0.4


@pytest.mark.parametrize(
    "offers", [[], [GPU, GPU], [WorkerOffer("many", 1.0, 1.0, MOST_WORKERS), GPU]], ids=["none", "twice", "many"]
)
def test_impossible_offers_are_refused(offers):
    with pytest.raises(UsageError, match="offer"):
        planned(PACE, 3, offers)


@pytest.mark.parametrize("wrong", [(-1, 1, 1), (1, 0, 1), (1, 1, 0), (math.inf, 1, 1), (1, math.nan, 1)])
def test_an_offer_has_a_price_a_rate_and_a_count(wrong):
    with pytest.raises(UsageError, match="offer gpu"):
        WorkerOffer("gpu", *wrong)
