"""Experiments of the rollout plane: rows of small cases."""

from __future__ import annotations

from typing import Any

import pytest

from netem.lab.experiments import job_shares, lost_worker, paper_fleet, rollout_pace, worker_overlap
from netem.lab.scenario import cases
from netem.lab.scenario_run import backend_of, load, run
from p2pcast.ground.errors import UsageError


def rows(module: Any, **parameters: object) -> list[dict[str, Any]]:
    argument = {"parameters": parameters, "events": []}
    made = [record["row"] for record in module.results(argument)]
    assert all(row["simulated"] for row in made)
    return made


def test_pace_has_a_row_for_each_publication_period():
    made = rows(rollout_pace, staleness=2, steps=12, groups=4, size=4, workers=4, seeds=1)
    assert [row["every"] for row in made] == [1, 2, 3]
    assert all(row["deadlocks"] == 0 and row["worst_staleness"] <= 2 for row in made)


def test_shares_by_throughput_beat_equal_shares():
    made = {row["policy"]: row for row in rows(job_shares, groups=32, steps=10, seeds=1, ratio=2.0)}
    assert made["fixed shares"]["gain"] > 0.1
    assert made["shares"]["tokens_per_s"] > made["fixed shares"]["tokens_per_s"]
    assert made["uniform"]["gain"] == 0


def test_longer_leases_delay_lost_jobs_and_shorter_leases_repeat_jobs():
    short, long = (rows(lost_worker, factor=f, seeds=2, steps=10, renewal="none")[0] for f in (1.5, 3.0))
    assert short["redone_median_s"] < long["redone_median_s"]
    assert short["repeated"] > long["repeated"]
    renewed = rows(lost_worker, factor=1.5, seeds=2, steps=10)[0]
    assert renewed["repeated"] < short["repeated"]


@pytest.mark.parametrize("assumption", ["newest", "bounded"])
def test_bubble_vanishes_at_the_predicted_number_of_workers(assumption: str):
    few, enough = rows(worker_overlap, assumption=assumption, workers=(4, 9), steps=24, warm_up=8)
    assert few["bubble"] == pytest.approx(few["predicted"], abs=0.05)
    assert few["bubble"] > 0.05
    assert enough["bubble"] < 0.02


def test_cheapest_fleet_costs_less_than_a_random_one():
    made = {row["row"]: row for row in rows(paper_fleet, table=2, steps=12, warm_up=4)}
    assert made["full"]["workers"] == 9
    assert made["full"]["usd_per_step"] < made["w/o P2P"]["usd_per_step"] < made["w/o Cost"]["usd_per_step"]


def test_a_lost_worker_is_replaced():
    made = {row["row"]: row for row in rows(paper_fleet, table=4, steps=12, warm_up=4)}
    assert made["worker dies"]["drop"] == 0.125
    assert 0 < made["worker dies"]["recovery_s"] < 312
    assert made["worker dies"]["started"] == 1, "a worker that is starting counts"
    assert made["forwarder dies"]["late_s"] == 6.0


@pytest.mark.parametrize(
    "name", ["rollout-pace", "sparrowrl-scheduler", "sparrowrl-leases", "echo2-overlap", "echo2-fleet"]
)
def test_scenarios_of_the_rollout_plane_say_simulated_and_need_no_network(name: str):
    scenario = load(name)
    assert "simulated" in scenario.what
    assert backend_of(scenario) == "here"
    assert list(cases(scenario))


def test_a_simulated_scenario_runs_as_a_lab_case():
    settings = {"staleness": 1, "equal": 0.3, "stragglers": 0.0, "steps": 10, "groups": 4, "size": 4, "seeds": 1}
    document = run(load("rollout-pace", settings), "here")
    assert len(document["rows"]) == 2
    assert not document["failed"]
    assert [hold["held"] for hold in document["holds"]] == [True, True, True]


@pytest.mark.parametrize(
    ("module", "parameters"),
    [
        (job_shares, {"policies": ["uniform", "lottery"]}),
        (job_shares, {"policies": ["pull"]}),
        (job_shares, {"answers": "none"}),
        (lost_worker, {"renewal": "post"}),
        (worker_overlap, {"assumption": "none"}),
        (worker_overlap, {"scale": 7}),
        (paper_fleet, {"table": 3}),
        (paper_fleet, {"assumption": "none"}),
        (rollout_pace, {"equal": 0.95}),
    ],
)
def test_invalid_parameters_are_refused(module: Any, parameters: dict[str, object]):
    with pytest.raises(UsageError, match="parameters"):
        rows(module, **parameters)
