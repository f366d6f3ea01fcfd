"""Engines whose weights are not those of their version are noticed by the learner's probes."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import RolloutBatch
from p2pcast.ledger_api.trainer_api import ProbeVerdict
from p2pcast.rollouts.probe_set import ProbeSet, unpacked_scores
from p2pcast.tasks.task import Prompt
from p2pcast.tasks.task_loader import load_task
from tests.daemons.rollouts.parity_task import Parity
from tests.trainer_node.learning.learner_stage import (
    ALONE,
    STEPS,
    TASK,
    KilledError,
    MemoryHub,
    MemoryLedger,
    batches,
    death_at,
    learner,
    small_folder,
)
from trainer_node.learning.learner import HOOK, Learner
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.probing.engine_probes import EngineProbes, EngineScores
from trainer_node.learning.probing.learner_scores import learner_scores
from trainer_node.learning.probing.probe_prompts import probe_prompts_of, probe_set_of
from trainer_node.learning.probing.probe_rule import FLOOR_VERSIONS
from trainer_node.ledger_server.probes.probe_desk import ProbeDesk, Scored

pytestmark = pytest.mark.device

Words = dict[str, torch.Tensor]
OLD = 20
"""Versions by which the wrong tensor of an engine lags."""
ROUNDS = 5
"""Times that the batches are trained on: 25 versions."""


class Desk:
    """The ledger's desk, without HTTP between."""

    def __init__(self) -> None:
        self.desk, self.numbers, self.judged = ProbeDesk(), itertools.count(), [list[ProbeVerdict]()]

    def put(self, probe_set: ProbeSet) -> None:
        self.desk.put(probe_set)

    def read(self, probe_set: ProbeSet) -> list[EngineScores] | None:
        found = self.desk.read(probe_set.id)
        if found is None:
            return None
        return [EngineScores(s.id, s.worker, s.engine, s.version, unpacked_scores(s.scores)) for s in found]

    def judge(self, verdicts: Any) -> None:
        for one in verdicts:
            self.desk.judge(one)

    def answer(self, worker: str, version: Version, scored: Callable[[ProbeSet], np.ndarray]) -> bool:
        """A worker scores the set with its engine, if the ledger wants that."""
        worker_id = worker.encode()
        if (probe_set := self.desk.take(worker_id, worker, version, 0.0)) is None:
            return False
        scores = scored(probe_set).tobytes()
        id = next(self.numbers).to_bytes(16, "big")
        return self.desk.answer(worker_id, probe_set.id, Scored(id, worker, "vllm:e", version, scores))


class Engine:
    """Computes row by row, in another order of sums than the learner."""

    def __init__(self, folder: Path) -> None:
        self._model = LearnerModel(folder, ALONE)

    def scores(self, words: Mapping[str, torch.Tensor], probe_set: ProbeSet) -> np.ndarray:
        with torch.no_grad():
            for name, parameter in self._model.parameters.items():
                parameter.copy_(words[name])
        return learner_scores(self._model, probe_set, 1, "padded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def played(folder: Path) -> list[RolloutBatch]:
    return batches(folder)


def probed(name: str, seed: int, count: int, vocabulary: int) -> ProbeSet | None:
    task = load_task(name)
    with contextlib.closing(probe_prompts_of(name, task, seed)) as prompts:
        return probe_set_of(task, prompts, count, vocabulary)


@pytest.fixture(scope="module")
def probe_set(folder: Path) -> ProbeSet:
    found = probed(TASK, 0, 16, LearnerModel(folder, ALONE).vocabulary)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def versions(folder: Path, played: list[RolloutBatch]) -> tuple[list[Words], list[np.ndarray]]:
    """Published words and the learner's scores of ROUNDS * STEPS + 1 versions of one training run."""
    from trainer_node.learning.learner_step import LearnerStep, StepOptions
    from trainer_node.learning.objective.policy_loss import LossOptions
    from trainer_node.learning.objective.training_rows import rows_of
    from trainer_node.learning.trained_weights import OptimizerOptions, TrainedWeights

    model = LearnerModel(folder, ALONE)
    weights = TrainedWeights(model.parameters, model.published, OptimizerOptions(lr=3e-4))
    step_of = LearnerStep(model, weights, StepOptions(LossOptions(), 512), ALONE)
    found = probed(TASK, 0, 16, model.vocabulary)
    assert found is not None
    words: list[Words] = []
    scores: list[np.ndarray] = []
    for step in range(ROUNDS * STEPS + 1):
        words.append({name: tensor.detach().clone() for name, tensor in model.working_copy()})
        scores.append(learner_scores(model, found, 512, "packed"))
        rows = rows_of(
            played[step % STEPS], kind="grpo", eps=1e-4, overlong="keep", step=step, staleness=1000,
            vocabulary=model.vocabulary,
        )  # fmt: skip
        step_of.train(rows, step, lambda: None)
    return words, scores


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine(folder)


class Watched:
    """A learner's probes over a desk, and the lines of its log."""

    def __init__(self, probe_set: ProbeSet, floor: float | None = None) -> None:
        self.desk, self.lines = Desk(), list[dict[str, Any]]()
        self.probe_set = probe_set
        self.probes = EngineProbes(self.desk, probe_set, lambda line: self.lines.append(dict(line)), floor)
        self.probes.look()


def test_right_engine_raises_no_alarm_and_a_tensor_20_versions_old_does(
    versions: tuple[list[Words], list[np.ndarray]], engine: Engine, probe_set: ProbeSet, caplog
) -> None:
    words, scores = versions
    watched = Watched(probe_set)
    for step, mine in enumerate(scores):
        watched.probes.published(step, 1, mine)
        assert watched.desk.answer("right", Version(1, step), lambda s, at=step: engine.scores(words[at], s))
        watched.probes.look()
    assert [line["version"] for line in watched.lines] == [f"1.{step}" for step in range(len(scores))]
    assert [line["floor"] is None for line in watched.lines[:FLOOR_VERSIONS]] == [True] * FLOOR_VERSIONS
    assert not any(line["alarm"] for line in watched.lines)
    assert not caplog.records
    last = len(scores) - 1
    changed = [name for name in words[0] if not torch.equal(words[last][name], words[last - OLD][name])]
    assert len(changed) == len(words[0])
    for name in changed:
        stale = words[last] | {name: words[last - OLD][name]}
        assert watched.desk.answer(name, Version(1, last), lambda s, stale=stale: engine.scores(stale, s))
    with caplog.at_level(logging.WARNING):
        watched.probes.look()
    found = {line["engine"].removeprefix("vllm:e of "): line for line in watched.lines[len(scores) :]}
    print("\n".join(f"{line['kl'] / line['floor']:12.1f} x the floor: {name}" for name, line in found.items()))
    assert [name for name in changed if not found[name]["alarm"]] == []
    assert caplog.text.count("are not those of version") == len(changed)
    shown = watched.desk.desk.document()
    assert shown["alarm"] == len(changed)
    assert {row["worker"] for row in shown["engines"] if row["alarm"]} == set(changed)


def probed_learner(
    folder: Path, model: Path, ledger: MemoryLedger, hub: MemoryHub, watched: Watched, engine: Engine
) -> tuple[Learner, Callable[[], None]]:
    """A learner whose versions one engine scores: ``answer`` scores the newest one."""
    run = learner(folder, model, ledger, hub)
    scoring = LearnerModel(model, ALONE)

    def probe(step: int, branch: int) -> None:
        with torch.no_grad():
            for name, tensor in run.publications._weights():
                scoring.parameters[name].copy_(tensor)
        watched.probes.published(step, branch, learner_scores(scoring, watched.probe_set, 512, "packed"))

    run.probe = probe

    def answer() -> None:
        if hub.versions:
            newest = max(hub.versions)
            watched.desk.answer("e", newest, lambda s: engine.scores(hub.versions[newest], s))
            watched.probes.look()

    return run, answer


def test_every_version_of_a_run_is_compared_across_a_fork_and_a_death(
    tmp_path: Path, folder: Path, played: list[RolloutBatch], probe_set: ProbeSet, engine: Engine
) -> None:
    ledger, hub = MemoryLedger(played), MemoryHub()
    watched = Watched(probe_set)
    run, answer = probed_learner(tmp_path, folder, ledger, hub, watched, engine)
    dies = death_at(20)

    def watch(boundary: str) -> None:
        answer()
        dies(boundary)

    with pytest.raises(KilledError), HOOK.by(watch):
        run.run()
    before = [Version.parse(line["version"]) for line in watched.lines]
    floor = max((line["floor"] for line in watched.lines if line["floor"] is not None), default=None)
    again = Watched(probe_set, floor)
    run, answer = probed_learner(tmp_path, folder, ledger, hub, again, engine)

    def fail_once(boundary: str) -> None:
        answer()
        if boundary == "applied" and run.step == STEPS - 1 and hub.branch == 2:
            hub.fails = 1

    with HOOK.by(fail_once):
        run.run()
    answer()
    after = [Version.parse(line["version"]) for line in again.lines]
    assert {version.branch for version in before} == {1}
    assert {version.branch for version in after} == {2, 3}
    assert set(before) | set(after) == set(hub.versions)
    assert not any(line["alarm"] for line in watched.lines + again.lines)


def test_scores_of_an_earlier_process_are_not_compared(probe_set: ProbeSet) -> None:
    watched = Watched(probe_set)
    nothing = np.zeros(probe_set.scores, "<f4")
    assert watched.desk.answer("old", Version(1, 3), lambda s: nothing - 9)
    assert watched.desk.answer("new", Version(2, 4), lambda s: nothing)
    watched.probes.look()
    assert watched.lines == [], "the learner has not scored any version yet"
    watched.probes.published(3, 2, nothing)
    watched.probes.look()
    assert watched.lines == [], "version 1.3 is of another process, and step 4 is not scored yet"
    watched.probes.published(4, 2, nothing)
    watched.probes.look()
    assert [(line["version"], line["kl"]) for line in watched.lines] == [("2.4", 0.0)]
    assert watched.desk.read(probe_set) == []


def test_ledger_that_restarts_gets_the_probe_set_again(probe_set: ProbeSet) -> None:
    watched = Watched(probe_set)
    watched.desk.desk = ProbeDesk()
    watched.probes.look()
    assert watched.desk.desk.probe_set == probe_set


def test_comparison_is_logged_once_if_the_ledger_misses_the_verdict(probe_set: ProbeSet, monkeypatch) -> None:
    watched = Watched(probe_set)
    scores = np.full(probe_set.scores, -1.0, "<f4")
    watched.probes.published(0, 1, scores)
    watched.desk.answer("e", Version(1, 0), lambda s: scores)
    with monkeypatch.context() as patch:
        patch.setattr(watched.desk, "judge", lambda verdicts: None)
        watched.probes.look()
    watched.probes.look()
    watched.probes.look()
    assert len(watched.lines) == 1
    assert watched.desk.read(probe_set) == []


def test_thread_compares_waiting_scores_at_its_end(probe_set: ProbeSet) -> None:
    watched = Watched(probe_set)
    scores = np.full(probe_set.scores, -1.0, "<f4")
    watched.probes.published(0, 1, scores)
    watched.probes.start()
    watched.desk.answer("e", Version(1, 0), lambda s: scores)
    watched.probes.close()
    assert [line["version"] for line in watched.lines] == ["1.0"]


def test_probe_set_is_equal_in_every_process(probe_set: ProbeSet) -> None:
    again = probed(TASK, 0, 16, load_task(TASK).vocabulary)
    assert again == probe_set
    assert again is not None
    assert again.id == probe_set.id
    other = probed(TASK, 1, 16, load_task(TASK).vocabulary)
    assert other is not None
    assert other.id != probe_set.id


@pytest.mark.parametrize("name", ["sums,digits=2", "sums,digits=2,held_out=20"])
def test_sequences_are_long_enough_to_show_attention(name: str) -> None:
    found = probed(name, 0, 8, 16)
    assert found is not None
    assert len(found.sequences) == 8
    assert {len(sequence) for sequence in found.sequences} == {63}, "with a sampled token they fit --max-model-len 64"


def test_sequences_leave_a_position_of_the_model_for_a_token() -> None:
    task = load_task("sums,digits=2")
    found = probe_set_of(task, task.jobs(0), 8, 16, 48)
    assert found is not None
    assert {len(sequence) for sequence in found.sequences} == {47}


def test_long_prompt_is_probed_whole() -> None:
    """Engines play it, so they have room for it."""
    long = [Prompt(bytes([3] * size), 8) for size in (10, 150, 70)]
    found = probe_set_of(Parity(), itertools.cycle(long), 2, 16)
    assert found is not None
    assert [len(sequence) for sequence in found.sequences] == [150, 70]


def test_task_with_tokens_that_the_model_lacks_gives_no_probe(caplog) -> None:
    assert probed("sums", 0, 8, 4) is None
    assert "engines are not probed" in caplog.text


def test_packed_and_single_rows_score_alike(folder: Path, probe_set: ProbeSet) -> None:
    model = LearnerModel(folder, ALONE)
    packed, single = (learner_scores(model, probe_set, most, kind) for most, kind in ((512, "packed"), (1, "padded")))  # type: ignore[arg-type]
    assert packed.shape == (probe_set.scores,)
    assert np.abs(packed - single).max() < 1e-4
