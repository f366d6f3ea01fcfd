"""Exactly once, for learner, ledger and hub together: one of them dies at any point of a run, and the run goes on to
its end. No batch is lost, none is trained twice, and the weights are those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import pytest
from disk_image import Left

from tests.trainer_node.learning.death_points import HUB, LEARNER, LEDGER, PUBLISHER, Death
from tests.trainer_node.learning.exactly_once import check, check_end, check_lineage
from tests.trainer_node.learning.learner_stage import small_folder
from tests.trainer_node.learning.played_results import Replayed, Results, Sampled, by_job, first_weights_groups
from tests.trainer_node.learning.whole_run import WholeRun
from tests.trainer_node.ledger.crash_points import Point, memory_folder
from trainer_node.learning import publications
from trainer_node.sdk import hub_connection

pytestmark = pytest.mark.device

OFTEN, OFTEN_BY_MACHINE = 8, 3
"""Deaths of the hub at one kind of step, spread over the run."""
PARTS = 16
"""Of all deaths: a test each."""
SAMPLE = {LEARNER: 1, PUBLISHER: 1, LEDGER: 1, HUB: 2}
REPLAYS = 32
HALVES = ("write ", "store ")


class Stage:
    """Runs with one model and the same results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = small_folder(folder)
        groups = first_weights_groups(self._model)
        self._groups = [one.group for one in groups]
        self._results = by_job(groups)
        self._runs = 0
        self.undisturbed = self.run(None)

    def _new_folder(self) -> Path:
        self._runs += 1
        folder = self._folder / f"run{self._runs}"
        folder.mkdir()
        return folder

    def run(self, death: Death | None, results: Results | None = None) -> WholeRun:
        """``results``: those that are replayed by job; None: those of the first weights."""
        folder = self._new_folder()
        run = WholeRun(folder, self._model, self._groups, Replayed(results or self._results), death)
        run.run()
        shutil.rmtree(folder)
        return run

    def sampled(self, death: Death | None) -> tuple[WholeRun, Results]:
        """A run whose results are sampled by the versions that the hub stores; and the last result of each job."""
        folder = self._new_folder()
        play = Sampled(self._model, folder / "weights", lambda: run.hub.deltas())
        run = WholeRun(folder, self._model, self._groups, play, death)
        run.run()
        shutil.rmtree(folder)
        return run, play.results

    @cached_property
    def undisturbed_sampled(self) -> WholeRun:
        return self.sampled(None)[0]

    def replay(self, deaths: Sequence[Death]) -> None:
        """Record the results of a run that each death disturbs, and replay them in an undisturbed run."""
        for death in deaths:
            try:
                run, results = self.sampled(death)
                assert run.points.died, "the run did not pass the point"
                check_end(run, self.run(None, results))
            except BaseException as error:
                error.add_note(str(death))
                raise

    def die(self, deaths: Sequence[Death]) -> None:
        """Die each of these deaths, and go on to the run's end."""
        for death in deaths:
            try:
                run = self.run(death)
                assert run.points.died, "the run did not pass the point"
                check(run, self.undisturbed)
            except BaseException as error:
                error.add_note(str(death))
                raise

    def deaths(self, undisturbed: WholeRun | None = None) -> dict[str, list[Death]]:
        """All deaths of each part, at points that an undisturbed run passes; None: the one of the same results."""
        passed = (undisturbed or self.undisturbed).points.passed
        found = {part: [Death(point) for point in passed[part]] for part in (LEARNER, PUBLISHER, LEDGER)}
        found[LEARNER] += [Death(point, torn=True) for point in passed[LEARNER] if point.kind.startswith(HALVES)]
        kinds: dict[str, list[Point]] = defaultdict(list)
        for point in passed[HUB]:
            kinds[point.kind].append(point)
        lefts = list(Left)
        found[HUB] = []
        for number, (kind, points) in enumerate(sorted(kinds.items())):
            for point in spread(points, OFTEN):
                found[HUB].append(Death(point))
                if kind.startswith(HALVES):
                    found[HUB].append(Death(point, torn=True))
            for turn, point in enumerate(spread(points, OFTEN_BY_MACHINE)):
                found[HUB].append(Death(point, left=lefts[(number + turn) % len(lefts)]))
        return found


def spread(points: Sequence[Point], most: int) -> list[Point]:
    """At most so many, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[n * (len(points) - 1) // (most - 1)] for n in range(most)]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    # Shorter fixed waits between attempts.
    delays = {"RETRY_S": 0.02, "RETRY_MIN_S": 0.02, "RETRY_MOST_S": 0.1, "RETRY_MAX_S": 0.1}
    with memory_folder() as folder, pytest.MonkeyPatch.context() as patch:
        for module in (publications, hub_connection):
            for name in delays.keys() & vars(module).keys():
                patch.setattr(module, name, delays[name])
        yield Stage(folder)


def test_undisturbed_run_trains_each_step_once_on_versions_of_two_ages(stage: Stage) -> None:
    run = stage.undisturbed
    check_lineage(run)
    ages = {
        batch.step - rollout.result.oldest_step
        for batch in run.given.values()
        for group in batch.groups
        for rollout in group.rollouts
    }
    assert ages == {0, 1}


def test_points_cover_every_durable_step_of_each_part(stage: Stage) -> None:
    deaths = stage.deaths()
    assert {part: len(found) >= 50 for part, found in deaths.items()} == dict.fromkeys(deaths, True)
    assert sum(map(len, deaths.values())) >= 200
    kinds = {part: {death.point.kind for death in found} for part, found in deaths.items()}
    for moment in ("before fsync", "before commit", "after commit"):
        calls = ("resume", "publish", "take", "applied", "ack", "prune", "grant", "results", "add_prompts")
        assert {f"{moment} of {call}" for call in calls} <= kinds[LEDGER]
    for call in ("resume", "take", "applied", "ack"):
        assert {f"asks {call}", f"has no answer to {call}"} <= kinds[LEARNER]
    assert any(kind.startswith("rename ") for kind in kinds[LEARNER])
    assert {"dial", "send BEGIN", "send CELL", "send DONE"} <= kinds[PUBLISHER]
    assert {"write state/versions.log", "sync state/published.log", "rename state/partial/#"} <= kinds[HUB]


def test_deaths_at_some_points_change_no_weight(stage: Stage) -> None:
    drawn = random.Random(1)
    stage.die([death for part, found in stage.deaths().items() for death in drawn.sample(found, SAMPLE[part])])


@pytest.mark.prove
@pytest.mark.parametrize("part", range(PARTS))
def test_deaths_at_all_points_change_no_weight(stage: Stage, part: int) -> None:
    deaths = [death for found in stage.deaths().values() for death in found]
    stage.die(deaths[part::PARTS])
    print(f"{len(deaths)} deaths, {len(deaths[part::PARTS])} here")


def test_sampled_results_differ_from_results_of_the_first_weights(stage: Stage) -> None:
    run = stage.undisturbed_sampled
    assert check_lineage(run) != check_lineage(stage.undisturbed)
    assert run.digests[run.end] != stage.undisturbed.digests[stage.undisturbed.end]


def test_results_of_a_disturbed_run_replayed_give_its_weights(stage: Stage) -> None:
    """Of a learner that loses two applied steps."""
    learners = stage.deaths(stage.undisturbed_sampled)[LEARNER]
    stage.replay([[death for death in learners if death.point.kind == "begins to publish"][3]])


@pytest.mark.prove
@pytest.mark.parametrize("part", range(REPLAYS // PARTS))
def test_results_of_more_disturbed_runs_replayed_give_their_weights(stage: Stage, part: int) -> None:
    deaths = [death for found in stage.deaths(stage.undisturbed_sampled).values() for death in found]
    stage.replay(random.Random(part).sample(deaths, PARTS))
