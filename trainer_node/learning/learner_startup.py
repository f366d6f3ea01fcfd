"""Builds a learner from its configuration, and runs it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from blake3 import blake3
from rich.console import Console

from p2pcast.errors import LocalError, UsageError
from p2pcast.sparse.budget_schedule import FILE, BudgetSchedule
from p2pcast.store.atomic_files import explained
from p2pcast.tasks.task import Task
from p2pcast.tasks.task_loader import load_task
from trainer_node.learning import warm_start as warm_starts
from trainer_node.learning.distillation.adapter_state import AdapterState
from trainer_node.learning.distillation.decoding_plan import ScheduleOf
from trainer_node.learning.distillation.rollout_adapter import NAME, RolloutAdapter
from trainer_node.learning.distillation.sparse_distillation import DistillOptions, SparseDistillation
from trainer_node.learning.evaluation import Evaluation
from trainer_node.learning.exports import Exports
from trainer_node.learning.guarding.acceptance_scores import acceptance_rates
from trainer_node.learning.guarding.schedule_guard import ScheduleGuard, change_event
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
from trainer_node.learning.probing.engine_probes import EngineProbes
from trainer_node.learning.probing.learner_scores import learner_scores
from trainer_node.learning.probing.probe_prompts import probe_set_of
from trainer_node.learning.publications import Publications
from trainer_node.learning.trained_weights import TrainedWeights
from trainer_node.learning.trainer_ranks import TrainerRanks
from trainer_node.sdk.batch_client import BatchClient, RolloutBatch
from trainer_node.sdk.probe_client import ProbeClient
from trainer_node.sdk.publisher import Publisher

logger = logging.getLogger("p2pcast.learner")

PICTURE: Final = "run.png"


def run_learner(config: LearnerConfig) -> None:
    """Train until the ledger says that the run has ended, or until SIGTERM. All ranks call. Raises P2PCastError."""
    ranks = TrainerRanks.start()
    try:
        with ranks.together(), contextlib.ExitStack() as stack:
            _run(config, ranks, stack)
    finally:
        ranks.end()


def _run(config: LearnerConfig, ranks: TrainerRanks, stack: contextlib.ExitStack) -> None:
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
    model = model_of(config, ranks)
    weights = TrainedWeights(model.parameters, model.published, config.optimizer.options())
    reference = None
    if config.loss.kl_weight:
        reference = LearnerModel(model.folder, ranks, compute=config.model.compute)
        reference.freeze()
    guard = _guard(config)
    distillation = None if not config.distill.rank else _distillation(config, model, guard.schedule_of)
    task = load_task(config.task.name, Path.cwd()) if config.task.name else None
    checkpoints_folder = folder / "checkpoints"
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
            **_with_adapter(distillation, str(config.model.path)),
        )
    )
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
        judge=lambda rows: _judged(config, model, ranks, guard, rows),
        kept=[guard, AdapterState(None if distillation is None else distillation.adapter.weights)],
        exports=_exports(config, model, ranks),
        distillation=distillation,
        about={"model": str(config.model.path), "parameters": model.elements, "ranks": ranks.count},
    )
    if client is not None and task is not None and config.evaluation.every:
        evaluation = Evaluation(
            client,
            task,
            log.write,
            every=config.evaluation.every,
            problems=config.evaluation.problems,
            hold_s=config.evaluation.hold,
            seed=config.train.seed,
        )
        learner.may_publish = lambda: not evaluation.busy
        learner.published = evaluation.published
        stack.callback(evaluation.join)
        evaluation.keep_workers(LIVE_END_S)
    if task is not None and config.probe.prompts:
        learner.probe = _probing(config, model, task, ranks, client, log, stack)
    elif config.probe.prompts:
        logger.info("engines are not probed: [task] name is empty")
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


def _guard(config: LearnerConfig) -> ScheduleGuard:
    """Raises UsageError for a file that holds no schedule, LocalError."""
    file = config.sparse.schedule
    if file is None:
        return ScheduleGuard(None, config.sparse.guard())
    with explained("read", file):
        contents = file.read_bytes()
    try:
        return ScheduleGuard(BudgetSchedule.from_bytes(contents), config.sparse.guard())
    except UsageError as error:
        raise UsageError(f"[sparse] schedule = {str(file)!r}: {error}") from None


def guard_advice(config: LearnerConfig, every: int) -> str | None:
    """For a guard that would count few tokens; None for others. ``every``: learner steps between two versions."""
    if config.sparse.schedule is None or config.sparse.staleness >= every:
        return None
    return (
        f"[sparse] staleness = {config.sparse.staleness}, and two versions are {every} steps apart: the guard of sparse"
        f" attention leaves out most rollouts. Set it to {every}, or publish more often"
    )


def dense_instead(guard: ScheduleGuard, schedule: bytes | None, folder: Path) -> str | None:
    """Let the guard of a run without a schedule replace that of the hub's newest version, and that of the model's
    ``folder``, which goes with a first version. ``schedule``: BLAKE3 of the hub's. Returns a warning if it did.
    """
    of_folder = folder / FILE
    for where, name in (
        ("the hub's newest version", schedule),
        (str(of_folder), blake3(of_folder.read_bytes()).digest() if of_folder.is_file() else None),
    ):
        if guard.replace_by_dense(name):
            return (
                f"{where} has a schedule of sparse attention, and [sparse] schedule is empty: versions of this run"
                " carry a dense schedule, since engines would follow the other one without a guard. To use it, name its"
                " file in [sparse] schedule; target = 0 keeps it as it is"
            )
    return None


def _judged(
    config: LearnerConfig, model: LearnerModel, ranks: TrainerRanks, guard: ScheduleGuard, rows: Sequence[TrainingRow]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Figures of a step, and values of the events ``budget``."""
    found = acceptance_rates(model, ranks, rows, config.train.micro_batch_tokens, config.train.packing, guard.knows)
    changes = [change_event(change) for change in guard.observe(found)]
    return guard.figures(), changes


def _distillation(config: LearnerConfig, model: LearnerModel, schedule_of: ScheduleOf) -> SparseDistillation:
    table = config.distill
    adapter = RolloutAdapter(model, rank=table.rank, alpha=table.alpha, options=table.options(), seed=config.train.seed)
    options = DistillOptions(
        config.loss.options(),
        config.train.micro_batch_tokens,
        config.train.packing,
        kl_weight=table.kl_weight,
        candidates=table.candidates,
        ppo_weight=table.ppo_weight,
        page_tokens=table.page_tokens,
    )
    found = SparseDistillation(model, adapter, options, schedule_of)
    found.check()
    return found


def _with_adapter(distillation: SparseDistillation | None, base: str) -> dict[str, Any]:
    """Arguments of the Publisher."""
    if distillation is None:
        return {}
    adapter = distillation.adapter
    return {"with_adapter": {NAME: adapter.configuration(base)}, "dtype": adapter.dtype}


def adapter_fault(config: LearnerConfig, beside: Sequence[str]) -> str | None:
    """For a run that would lose its adapter; None for others. ``beside``: adapters of the hub's newest version."""
    if config.distill.rank or NAME not in beside:
        return None
    return (
        f"[distill] rank is 0, and the hub's newest version has the adapter {NAME}: versions of a run keep all tensors."
        f" Set the rank of before, with lr = 0 if {NAME} shall not change, or begin a new run, with a new state folder"
        " of the hub"
    )


def published_words(model: LearnerModel, distillation: SparseDistillation) -> Iterator[tuple[str, torch.Tensor]]:
    """Of the policy, and of the adapter under its name."""
    yield from model.working_copy()
    yield from distillation.adapter.published()


def _exports(config: LearnerConfig, model: LearnerModel, ranks: TrainerRanks) -> Exports | None:
    if not config.export.every:
        return None
    folder = config.export.folder or config.checkpoint.folder / "exports"
    return Exports(folder, model, ranks, every=config.export.every, keep=config.export.keep)


def _probing(
    config: LearnerConfig,
    model: LearnerModel,
    task: Task,
    ranks: TrainerRanks,
    client: BatchClient | None,
    log: RunLog | _NoLog,
    stack: contextlib.ExitStack,
) -> Callable[[int, int], None]:
    """Scores each version on all ranks; the first rank compares the engines' scores."""
    count, seed = config.probe.prompts, config.train.seed
    found = ranks.share(probe_set_of(task, seed, count, model.vocabulary) if ranks.first else None)
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
        learner.stopping = True
        logger.info("ending after this step: %s", signal.Signals(number).name)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
