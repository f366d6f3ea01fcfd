"""Results that the workers of a whole run hand in: sampled by the weights that the hub stores, or replayed by job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from netem.rollouts.own_sampler import play_all, sampled_groups
from p2pcast import offline
from p2pcast.artifact.artifact_file import P2pdFile
from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import RolloutGroup
from p2pcast.ledger_api.worker_api import Leased
from p2pcast.rollouts.result import Result
from p2pcast.tasks.play import result_of
from p2pcast.tasks.task_loader import load_task
from tests.trainer_node.learning.learner_stage import ALONE, TASK
from trainer_node.learning.learner_model import LearnerModel

GROUPS, GROUP_SIZE = 40, 4
"""More groups than a run opens."""

Results = dict[tuple[bytes, int], Result]
"""By group, and index of the job."""
Play = Callable[[Leased, Version, bytes], Result]
"""The result of a lease by an engine that serves a version with this manifest."""


def first_weights_groups(model_folder: Path) -> list[RolloutGroup]:
    """Groups of the task, with results that the first weights sampled."""
    task, model = load_task(TASK), LearnerModel(model_folder, ALONE).module
    return sampled_groups(model, task, list(islice(task.jobs(0), GROUPS)), size=GROUP_SIZE, seed=0)


def by_job(groups: Sequence[RolloutGroup]) -> Results:
    return {(one.group.id, index): each.result for one in groups for index, each in enumerate(one.rollouts)}


class Replayed:
    """The version that the engine serves is put into the spans."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def __call__(self, leased: Leased, served: Version, manifest: bytes) -> Result:
        found = self._results[leased.job.id, leased.job.index]
        spans = [span._replace(version=served, manifest=manifest) for span in found.spans]
        return replace(found, job=leased.job.job, lease=leased.lease, spans=spans)


class Sampled:
    """Each job is sampled by the weights of the served version, as the hub's deltas say. ``results``: the newest result
    of each job. ``deltas``: files that the hub stores now.
    """

    def __init__(self, model_folder: Path, folder: Path, deltas: Callable[[], Iterable[Path]]) -> None:
        self._first, self._folder, self._deltas = model_folder, folder, deltas
        self._task = load_task(TASK)
        self._models: dict[Version, Any] = {}
        self.results: Results = {}

    def __call__(self, leased: Leased, served: Version, manifest: bytes) -> Result:
        if served not in self._models:
            self._models[served] = LearnerModel(self._weights(served), ALONE).module
        job = leased.job
        (played,) = play_all(self._models[served], self._task, [job], seed=job.sample_seed, version=served)
        spans = tuple(span._replace(manifest=manifest) for span in played.spans)
        result = result_of(job, leased.lease, replace(played, spans=spans), 0.0)
        self.results[job.id, job.index] = result
        return result

    def _weights(self, version: Version) -> Path:
        """A folder with the version's weights: the first ones, and the deltas that lead from them to the version."""
        folder = self._folder / str(version)
        if version == Version(0, 0):
            return self._first
        if not folder.exists():
            for path in self._deltas():
                with P2pdFile.open(path) as file:
                    manifest = file.manifest
                if manifest.version == version and manifest.base is not None:
                    assert offline.apply_file(self._weights(manifest.base), path, folder) == version
                    break
        return folder
