"""Plays a task's jobs and makes their results, in this process or in child processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from p2pcast.ground.version import Version
from p2pcast.ledger_api.worker_api import Leased
from p2pcast.rollouts.job import Job
from p2pcast.rollouts.result import Result, fault
from p2pcast.rollouts.routed_experts import routed_fault
from p2pcast.rollouts.top_logprobs import top_fault
from p2pcast.tasks.child_processes.killable_child import ChildDownError
from p2pcast.tasks.child_processes.play_pool import Played, PlayPool
from p2pcast.tasks.play import result_of
from p2pcast.tasks.task import FAILED_CHECK_TAG, Sampler, Task
from p2pcast.tasks.task_process import CheckFailedError, TaskProcesses
from rollout_node.worker.returned_plays import InvalidPlayError

logger = logging.getLogger("p2pcast.worker")

MAX_TAG: Final = 200
"""Longest failure text in a result's tags, in characters."""


class JobPlayer:
    """``checks``: processes that compute the reported reward; None if the task is trusted to compute it in this
    process. ``plays``: processes for plays; None if the task is trusted to play in this process, where it must not
    block.
    """

    def __init__(self, task: Task, checks: TaskProcesses | None = None, plays: PlayPool | None = None) -> None:
        self.task = task
        self._checks, self._plays = checks, plays

    async def result(self, sampler: Sampler, lease: Leased, schedule: Callable[[Version], bytes | None]) -> Result:
        """Play a job and return the result with its reward. If the check fails, the reward is 0 and a tag gives the
        reason. Raises RemoteError for a play that the ledger would hold against this worker.
        """
        job, reward, found = lease.job, 0.0, await self._play(sampler, lease.job)
        played = found.trajectory
        try:
            if self._checks is None:
                reward = self.task.reward(job, played.token_ids, played.mask)
            else:
                reward = await self._checks.reward(job, played.token_ids, played.mask)
        except (CheckFailedError, ChildDownError) as error:
            logger.warning("the check of job %s failed: %s", job.job.hex(), error)
            played = replace(played, tags=(*played.tags, (FAILED_CHECK_TAG, str(error)[:MAX_TAG])))
        result = result_of(job, lease.lease, played, reward, schedule)
        if found.loss_mask is not None:
            result = replace(result, loss_mask=found.loss_mask)
        if result.top_logprobs is not None and top_fault(result.top_logprobs, result.mask, self.task.vocabulary):
            # An engine may pad its vocabulary. The rollout is valid without the most probable tokens.
            result = replace(result, top_logprobs=None)
        if (routed := result.routed_experts) is not None and (wrong := routed_fault(routed, len(result.token_ids))):
            logger.warning("the result of job %s goes without experts: the engine sent %s", job.job.hex(), wrong)
            result = replace(result, routed_experts=None)
        if (wrong := fault(result, self.task.vocabulary)) is not None:
            raise InvalidPlayError(f"the play is no valid result: {wrong}")
        return result

    async def _play(self, sampler: Sampler, job: Job) -> Played:
        if self._plays is not None:
            return await self._plays.play(sampler, job)
        played, loss_mask = await self.task.play(sampler, job), getattr(self.task, "loss_mask", None)
        return Played(played, None if loss_mask is None else loss_mask(job, played.token_ids, played.mask))
