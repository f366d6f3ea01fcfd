"""Builds a learner from its configuration, and runs it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from rich.console import Console

from p2pcast.files.atomic_files import explained
from p2pcast.ground.errors import LocalError, RefusedError, UsageError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import BatchClient, RolloutBatch
from p2pcast.tasks.child_processes.prompt_reader import first_prompts
from p2pcast.tasks.task import Task
from p2pcast.tasks.task_loader import load_task
from trainer_node.learning import checkpoints
from trainer_node.learning import warm_start as warm_starts
from trainer_node.learning.distillation.distillation_startup import (
    AdapterState,
    adapter_fault,
    distillation_of,
    published_words,
    publisher_arguments,
)
from trainer_node.learning.evaluation import Evaluator
from trainer_node.learning.exports import Exports
from trainer_node.learning.guarding.guard_startup import dense_instead, guard_advice, guard_of, judged
from trainer_node.learning.learner import LIVE_END_S, Cadence, Learner, publish_every
from trainer_node.learning.learner_config import LearnerConfig
from trainer_node.learning.learner_model import LearnerModel
from trainer_node.learning.learner_step import LearnerStep, StepOptions
from trainer_node.learning.monitoring.run_log import LOG_NAME, RunLog, read_run
from trainer_node.learning.monitoring.run_plot import plot_run
from trainer_node.learning.monitoring.run_screen import RunScreen
from trainer_node.learning.monitoring.tensorboard_log import TensorBoardLog
from trainer_node.learning.objective.training_rows import TrainingRow, rows_of
from trainer_node.learning.packing_check import require_separate_rows
from trainer_node.learning.probing.engine_probes import EngineProbes, ProbeClient
from trainer_node.learning.probing.learner_scores import learner_scores
from trainer_node.learning.probing.probe_prompts import probe_prompts_of, probe_set_of
from trainer_node.learning.publications import Publications
from trainer_node.learning.run_beginning import RunBeginning, other_base
from trainer_node.learning.trained_weights import TrainedWeights
from trainer_node.learning.trainer_ranks import TrainerRanks
from trainer_node.sdk.publisher import Publisher

logger = logging.getLogger("p2pcast.learner")

PICTURE: Final = "run.png"


def run_learner(config: LearnerConfig, *, from_start: bool = False) -> None:
    """Train until the ledger says that the run has ended, or until SIGTERM. All ranks call. ``from_start``: begin even
    where that undoes the run. Raises P2PCastError.
    """
    ranks = TrainerRanks.start()
    try:
        with ranks.together(), contextlib.ExitStack() as stack:
            _run(config, ranks, stack, from_start=from_start)
    finally:
        ranks.end()


def _run(config: LearnerConfig, ranks: TrainerRanks, stack: contextlib.ExitStack, *, from_start: bool) -> None:
    if config.model.threads:
        torch.set_num_threads(config.model.threads)
    folder = config.checkpoint.folder
    with explained("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
    if ranks.first:
        stack.enter_context(_alone(folder))
    client = _client(config) if ranks.first else None
    facts = ranks.share(None if client is None else client.facts())
    assert facts is not None
    checkpoints_folder = folder / "checkpoints"
    beginning = RunBeginning(
        checkpoints_folder, checkpoints.newest(checkpoints_folder), facts, config.checkpoint.every, config.ledger.url
    )
    if not from_start:
        beginning.check_ledger()
    model = model_of(config, ranks)
    weights = TrainedWeights(model.parameters, model.published, config.optimizer.options())
    reference = None
    if config.loss.kl_weight:
        reference = LearnerModel(model.folder, ranks, compute=config.model.compute)
        reference.freeze()
    guard = guard_of(config)
    distillation = None if not config.distill.rank else distillation_of(config, model, guard.schedule_of)
    task = load_task(config.task.name, Path.cwd()) if config.task.name else None
    if config.sft.steps and not checkpoints_folder.is_dir():
        assert task is not None
        warm_starts.start(model, weights, task, config, ranks)
    options = StepOptions(
        config.loss.options(),
        config.train.micro_batch_tokens,
        config.train.packing,
        config.train.minibatches,
        config.train.seed,
    )
    every = publish_every(config.train.publish_every, facts.staleness)
    if ranks.first and (advice := guard_advice(config, every)) is not None:
        logger.warning(advice)
    publisher = stack.enter_context(
        Publisher(
            config.hub.address,
            token_file=config.hub.token_file,
            base=model.folder,
            previous=config.hub.previous,
            plaintext=config.hub.plaintext,
            **publisher_arguments(distillation, str(config.model.path)),
        )
    )
    if not from_start:
        beginning.check_hub(config.hub.address, publisher.newest)
        other = ranks.first and beginning.first and not config.sft.steps and publisher.newest == Version(0, 0)
        if ranks.share(other and publisher.newest_is_base() is False):
            raise RefusedError(other_base(config.hub.address, model.folder))
    if (missing := adapter_fault(config, publisher.beside)) is not None:
        raise UsageError(missing)
    if (warning := dense_instead(guard, publisher.schedule, model.folder)) is not None and ranks.first:
        logger.warning(warning)
    publications = Publications(
        publisher,
        model.working_copy if distillation is None else lambda: published_words(model, distillation),
        every,
        live_share=config.watch.live_share,
        live_limit_s=config.watch.live_limit,
        files=guard.files,
    )
    log, doing = _watched(config, folder, stack) if ranks.first else (_NoLog(), _not_shown)
    evaluation = _evaluating(config, task, client, log, stack)
    learner = Learner(
        ledger=client,
        step_of=LearnerStep(model, weights, options, ranks, reference),
        weights=weights,
        publications=publications,
        ranks=ranks,
        folder=checkpoints_folder,
        cadence=Cadence(config.checkpoint.every, config.checkpoint.keep),
        config=config.document(),
        rows=lambda batch, step: _rows(config, batch, step, facts.staleness, model),
        log=log,
        doing=doing,
        evaluation=evaluation,
        probe=_probing(config, model, task, ranks, client, log, stack),
        judge=lambda rows: judged(config, model, ranks, guard, rows),
        kept=[guard, AdapterState(None if distillation is None else distillation.adapter.weights)],
        exports=_exports(config, model, ranks),
        distillation=distillation,
        from_start=from_start,
        about={"model": str(config.model.path), "parameters": model.elements, "ranks": ranks.count},
    )
    with stopped_by_signals(learner):
        learner.run()
    if ranks.first:
        _draw(folder)


def model_of(config: LearnerConfig, ranks: TrainerRanks) -> LearnerModel:
    """The model that is trained. Raises UsageError for a model that cannot be trained as configured, LocalError."""
    assert config.model.path is not None
    model = LearnerModel(
        config.model.path,
        ranks,
        compute=config.model.compute,
        recompute=config.model.recompute,
        router_replay=config.train.router_replay == "on",
    )
    if config.train.packing == "packed":
        require_separate_rows(model)
    return model


def _exports(config: LearnerConfig, model: LearnerModel, ranks: TrainerRanks) -> Exports | None:
    if not config.export.every:
        return None
    folder = config.export.folder or config.checkpoint.folder / "exports"
    return Exports(folder, model, ranks, every=config.export.every, keep=config.export.keep)


def _evaluating(
    config: LearnerConfig,
    task: Task | None,
    client: BatchClient | None,
    log: RunLog | _NoLog,
    stack: contextlib.ExitStack,
) -> Evaluator | None:
    if client is None or task is None or not config.evaluation.every:
        return None
    prompts = first_prompts(config.task.name, task, config.train.seed, config.evaluation.problems, held_out=True)
    every, hold_s = config.evaluation.every, config.evaluation.hold
    evaluation = Evaluator(client, task, prompts, log.write, every=every, hold_s=hold_s)
    stack.callback(evaluation.join)
    evaluation.keep_workers(LIVE_END_S)
    return evaluation


def _probing(
    config: LearnerConfig,
    model: LearnerModel,
    task: Task | None,
    ranks: TrainerRanks,
    client: BatchClient | None,
    log: RunLog | _NoLog,
    stack: contextlib.ExitStack,
) -> Callable[[int, int], None]:
    """Scores each version on all ranks; the first rank compares the engines' scores."""
    if task is None or not config.probe.prompts:
        if config.probe.prompts:
            logger.info("engines are not probed: [task] name is empty")
        return lambda step, branch: None
    count, seed = config.probe.prompts, config.train.seed
    probed = None
    if ranks.first:
        with contextlib.closing(probe_prompts_of(config.task.name, task, seed)) as prompts:
            probed = probe_set_of(task, prompts, count, model.vocabulary, model.positions)
    found = ranks.share(probed)
    if found is None:
        return lambda step, branch: None
    probe_set, probes = found, None
    if client is not None and isinstance(log, RunLog):
        floors = [probe.floor for probe in log.record.probes if probe.floor is not None]
        probes = EngineProbes(ProbeClient(client.connection), probe_set, log.write, floors[-1] if floors else None)
        probes.start()
        stack.callback(probes.close)

    def probe(step: int, branch: int) -> None:
        scores = learner_scores(model, probe_set, config.train.micro_batch_tokens, config.train.packing)
        if probes is not None:
            probes.published(step, branch, scores)

    return probe


def _watched(config: LearnerConfig, folder: Path, stack: contextlib.ExitStack) -> tuple[RunLog, Callable[[str], None]]:
    """The run's log, shown on the terminal and, if wanted, to TensorBoard; and what shows the present activity."""
    log = stack.enter_context(RunLog(folder / LOG_NAME))
    if config.watch.tensorboard:
        board = stack.enter_context(TensorBoardLog(folder / "tensorboard"))
        log.watch(board.write)
    screen = stack.enter_context(RunScreen(Console(), log.record))
    log.watch(screen.show)
    return log, screen.doing


def _draw(folder: Path) -> None:
    try:
        plot_run(read_run(folder), folder / PICTURE)
    except LocalError as error:
        logger.info("no picture of the run: %s", error)


def _client(config: LearnerConfig) -> BatchClient:
    secure = config.ledger.url.startswith("https:")
    return BatchClient(
        config.ledger.url,
        bearer_file=config.ledger.bearer_file,
        hub=config.hub.address if secure else None,
        token_file=config.hub.token_file if secure else None,
        overlong=config.train.overlong,
    )


def _rows(
    config: LearnerConfig, batch: RolloutBatch, step: int, staleness: int, model: LearnerModel
) -> list[TrainingRow]:
    return rows_of(
        batch,
        kind=config.advantage.kind,
        eps=config.advantage.eps,
        overlong=config.train.overlong,
        step=step,
        staleness=staleness,
        vocabulary=model.vocabulary,
        judged_staleness=None if config.sparse.schedule is None else config.sparse.staleness,
        experts=None if model.replay is None else model.replay.shape,
        expert_layers=() if model.replay is None else model.replay.expert_layers,
    )


def _not_shown(activity: str) -> None:
    """Of ranks that have no screen."""


class _NoLog:
    """Of ranks that write no log."""

    def write(self, document: Any) -> None:
        return None


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """At most one learner works on a folder. Raises LocalError."""
    import fcntl

    with explained("open", folder / "lock"):
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise LocalError(
                f"another learner works on {folder}: end it, or give this one another [checkpoint] folder"
            ) from None
        yield
    finally:
        os.close(file)


@contextlib.contextmanager
def stopped_by_signals(learner: Learner) -> Iterator[None]:
    """SIGTERM and SIGINT end the run after the present step; a second one ends the process at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        if learner.stopping:
            raise SystemExit(128 + number)
        learner.stop()
        logger.info("ending after this step: %s", signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
