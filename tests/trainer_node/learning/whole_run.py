"""A whole run in this process, at most one of whose parts dies. Learner, publisher, hub and ledger are real; the
workers play jobs here.

Workers play when the learner waits, once the version under way is stored or lost, and one group at a time. They serve
the newest version if its step is odd, otherwise the one before. So a run without a death is deterministic. Its batches
are up to one step old, and some come from versions that no checkpoint contains.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Concatenate

import aiohttp
import torch

from p2pcast.files import disk
from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from p2pcast.ledger_api.batch_client import Finished, Rollout, RolloutBatch, RolloutGroup, Wait
from p2pcast.ledger_api.worker_api import Registration
from p2pcast.rollouts.job import Group, Job
from p2pcast.rollouts.result import Result
from p2pcast.tasks.task_loader import load_task
from tests.trainer_node.learning.death_points import Death, DiskWatcher, LearnerLife, PassedPoints
from tests.trainer_node.learning.learner_stage import STEPS, TASK, learner
from tests.trainer_node.learning.played_results import GROUP_SIZE, Play
from tests.trainer_node.learning.running_parts import HubPart, LedgerPart
from tests.trainer_node.ledger.crash_points import TURN_S, Answer, Died, Terms
from tests.trainer_node.ledger.ledger_invariants import Rows, check_counts, dump
from trainer_node.learning.learner import HOOK
from trainer_node.learning.objective.training_rows import TrainingRow, rows_of
from trainer_node.ledger.batch_transitions import Taken
from trainer_node.ledger.ledger import Ledger
from trainer_node.ledger.ledger_rows import Policy
from trainer_node.ledger.prompts.prompting import PassedPrompts
from trainer_node.ledger.staleness_rule import StalenessBounds
from trainer_node.ledger_server.version_follower import VersionFollower
from trainer_node.sdk.publication_handle import Handle
from trainer_node.sdk.publisher import Publisher

STALENESS, BATCH_GROUPS = 2, 2
MOST_LEARNERS = 2
"""Processes of the learner in a run with one death, besides those that find a dying hub at their start."""


class Fleet:
    """One worker, the feeder of prompts, and the ledger's following of the hub."""

    def __init__(self, run: WholeRun, groups: Sequence[Group], play: Play) -> None:
        self._run, self._ledger, self._hub = run, run.ledger, run.hub
        self._groups, self._play = groups, play
        self._task = load_task(TASK)
        self._loop = asyncio.new_event_loop()
        self._http = self._loop.run_until_complete(_session())
        self._follower = VersionFollower(self._http, self._hub.url, None, self._learnt, lambda: None, None)
        self._session: bytes | None = None
        self._added = 0
        self.manifests: dict[Version, bytes] = {}

    def close(self) -> None:
        self._loop.run_until_complete(self._http.close())
        self._loop.close()

    async def _learnt(self, version: Version, manifest: bytes, schedule: bytes | None) -> None:
        self.manifests[version] = manifest
        self._ledger.ask(Ledger.publish, version, manifest, schedule)

    def stored(self) -> dict[Version, str]:
        """Digests of the states of the hub's versions."""

        async def ask() -> Any:
            async with self._http.get(f"{self._hub.url}/status") as answer:
                return await answer.json()

        found = self._loop.run_until_complete(ask())["digests"]
        return {Version.parse(version): digest for version, digest in found.items()}

    def turn(self) -> None:
        self._run.now_s += TURN_S
        self._hub.wait_up()
        try:
            self._loop.run_until_complete(self._follower.refresh())
        except RetryableError:
            return
        self._ledger.ask(Ledger.expire)
        if self._ledger.ledger.prompts(0).waiting < BATCH_GROUPS:
            end = self._added + BATCH_GROUPS
            self._ledger.ask(Ledger.add_prompts, 0, PassedPrompts(self._added, end, self._groups[self._added : end]))
            self._added = end
        self._work()

    def _work(self) -> None:
        newest = max(self.manifests)
        of_branch = sorted(version for version in self.manifests if version.branch == newest.branch)
        served = newest if newest.step % 2 else of_branch[-2:][0]
        try:
            if self._session is None:
                terms = Registration("w0", GROUP_SIZE, self._task.name, self._task.hash, leases=[])
                self._session = self._ledger.ask_once(Ledger.register, "c0", terms).session
            leases = self._ledger.ask_once(
                Ledger.grant, self._session, GROUP_SIZE, served, self.manifests[served]
            ).leases
        except Died:
            # Begun again, the worker gives back the leases that it does not know of.
            self._session = None
            return
        done = [self._play(one, served, self.manifests[served]) for one in leases]
        if done:
            settled = self._ledger.ask(Ledger.results, self._session, done, self._reward)
            assert {one.verdict for one in settled} == {"accepted"}

    def _reward(self, job: Job, result: Result) -> float:
        return self._task.reward(job, result.token_ids, result.mask)


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


class Client:
    """The learner's client of the ledger."""

    def __init__(self, run: WholeRun, life: LearnerLife, publisher: WatchedPublisher) -> None:
        self._run, self._life, self._publisher = run, life, publisher
        self._epoch, self._branch = -1, 0

    def _ask(
        self, method: Callable[Concatenate[Ledger, Terms], Answer], *terms: Terms.args, **named: Terms.kwargs
    ) -> Answer:
        self._life.at(f"asks {method.__name__}")
        answer = self._run.ledger.ask(method, *terms, **named)
        self._life.at(f"has no answer to {method.__name__}")
        return answer

    def resume(
        self,
        branch: int,
        step: int,
        checkpoint: bytes | None = None,
        batches: Sequence[bytes] = (),
        *,
        from_start: bool = False,
    ) -> int:
        self._epoch, self._branch = self._ask(Ledger.resume, branch, step, checkpoint, batches), branch
        return self._epoch

    def poll(self, step: int) -> RolloutBatch | Finished | Wait:
        taken = self._ask(Ledger.take, self._epoch, self._branch, step)
        if taken.finished:
            return Finished()
        if taken.batch is None:
            self._publisher.wait_over()
            self._run.fleet.turn()
            return Wait(0.0)
        assert self._run.ledger.ledger.reopen_damaged(taken.batch) == 0
        return self._run.read(taken)

    def applied(self, batch: RolloutBatch, step: int) -> None:
        self._ask(Ledger.applied, self._epoch, batch.id, step)

    def ack(self, step: int, batches: Sequence[bytes], checkpoint: bytes) -> None:
        self._ask(Ledger.ack, self._epoch, step, batches, checkpoint)
        self._run.ledger.ask(Ledger.prune)


class WatchedPublisher:
    """The learner's publisher, whose calls are points."""

    def __init__(self, publisher: Publisher, life: LearnerLife) -> None:
        self._publisher, self._life = publisher, life
        self._last: Handle | None = None

    def publish(self, step: int, named_tensors: Any, *, files: Any) -> Handle:
        return self._begun(Publisher.publish, step, named_tensors)

    def resume(self, step: int, named_tensors: Any, *, files: Any) -> Handle:
        return self._begun(Publisher.resume, step, named_tensors)

    def _begun(self, method: Callable[[Publisher, int, Any], Handle], step: int, named_tensors: Any) -> Handle:
        self._life.at(f"begins to {method.__name__}")
        self._last = method(self._publisher, step, named_tensors)
        self._life.at(f"has begun to {method.__name__}")
        return self._last

    def wait_over(self) -> None:
        """Returns once no version is under way."""
        if self._last is not None:
            self._last.wait_over()

    def die(self) -> None:
        self._publisher._hang_up()
        self.wait_over()


class WholeRun:
    """``death``: None for an undisturbed run. ``play``: the fleet's engine."""

    def __init__(
        self, folder: Path, model_folder: Path, groups: Sequence[Group], play: Play, death: Death | None = None
    ) -> None:
        self._folder, self._model_folder = folder, model_folder
        self._groups, self._play = groups, play
        self.points = PassedPoints(death)
        self.now_s, self._ids = 1e9, random.Random("ids")
        self.given: dict[bytes, RolloutBatch] = {}
        """Every batch that a learner was given."""
        self.end = Version(0, 0)
        """Branch and step of the learner that came to the end."""
        self.state: Mapping[str, torch.Tensor] = {}
        """That learner's weights, and the state of the optimiser."""
        self.rows: Rows = {}
        """Of the ledger at the end."""
        self.digests: dict[Version, str] = {}
        """Of the states of all versions that the hub stores at the end."""

    def now(self) -> float:
        return self.now_s

    def run(self) -> None:
        """To the end of the run."""
        task, watcher = load_task(TASK), DiskWatcher()
        bounds = StalenessBounds(STALENESS, BATCH_GROUPS, STEPS)
        policy = Policy(bounds, "bounded", task.vocabulary, guess_s=30.0, task_hash=task.hash)
        with ExitStack() as stack:
            stack.enter_context(disk.watched(watcher))
            new_id = lambda: self._ids.randbytes(16)  # noqa: E731
            self.ledger = LedgerPart(self._folder / "ledger", policy, self.points, self.now, new_id)
            stack.callback(self.ledger.close)
            self.hub = HubPart(self._folder, self._model_folder, self.points, watcher)
            stack.callback(self.hub.stop)
            self.fleet = Fleet(self, self._groups, self._play)
            stack.callback(self.fleet.close)
            for _ in range(MOST_LEARNERS):
                watcher.learner = LearnerLife(self.points, self._folder / "learner")
                try:
                    self._train(watcher.learner)
                    break
                except Died:
                    continue
            else:
                raise AssertionError("no learner came to the end")
            self.rows = dump(self.ledger.store)
            check_counts(self.rows, self.ledger.ledger)
            self.hub.wait_up()
            self.digests = self.fleet.stored()

    def read(self, taken: Taken) -> RolloutBatch:
        """As BatchClient reads the ledger's answer."""
        assert taken.batch is not None
        groups = []
        for member in taken.batch.members:
            rollouts = [
                Rollout(Result.from_bytes(self.ledger.ledger.body(one.place)), one.reward, one.worker, one.settled_step)
                for one in member.results
            ]
            groups.append(RolloutGroup(Group.from_bytes(member.group), tuple(rollouts)))
        return RolloutBatch(taken.batch.id, taken.batch.step, tuple(groups), taken.played, taken.reward)

    def _train(self, life: LearnerLife) -> None:
        """One process of the learner. Raises Died."""
        watching = HOOK.by(lambda boundary: life.at(f"is at {boundary}"))
        with life.speaking(), watching, self._publisher() as publisher:
            watched = WatchedPublisher(publisher, life)
            client = Client(self, life, watched)
            one = learner(life.folder, self._model_folder, client, watched)  # type: ignore[arg-type]
            one.rows = self._rows
            try:
                one.run()
            except Died:
                watched.die()
                raise
            self.end, self.state = Version(one.branch, one.step), one.weights.state()

    def _publisher(self) -> Publisher:
        """A hub that dies now ends the learner's start, and the learner is started again."""
        while True:
            self.hub.wait_up()
            terms = {"token_file": self.hub.token_file, "base": self._model_folder}
            try:
                return Publisher(self.hub.address, **terms)
            except RetryableError:
                assert self.points.died

    def _rows(self, batch: RolloutBatch, step: int) -> list[TrainingRow]:
        self.given[batch.id] = batch
        terms: dict[str, Any] = {"kind": "grpo", "eps": 1e-4, "overlong": "keep"}
        return rows_of(batch, step=step, staleness=STALENESS, vocabulary=load_task(TASK).vocabulary, **terms)
