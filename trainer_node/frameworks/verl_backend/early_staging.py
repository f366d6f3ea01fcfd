"""A manager of verl's checkpoint engines that stages a version at the rollout machines before generation pauses.

verl's own manager pauses generation, and then sends the weights. This manager publishes and waits until every rollout
machine has staged the version; rollouts go on meanwhile with the weights before. Then generation pauses, each worker
copies the version from its machine's memory, and generation resumes.

Guarantees: an error before the pause leaves generation running with the weights before. An error after it leaves
generation paused, as verl's own manager does, so no request is answered by half-installed weights.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await

from p2pcast.ground.errors import RetryableError
from p2pcast.ground.version import Version
from trainer_node.frameworks.verl_backend.checkpoint_engine import BACKEND, Metrics
from trainer_node.frameworks.verl_backend.engine_settings import EngineSettings

SPARE_S = 60.0
"""Time of a call beyond the waits inside it, in seconds."""


class StagingCheckpointEngineManager(CheckpointEngineManager):  # type: ignore[misc]
    """For ``rollout.checkpoint_manager_class``. With another backend than p2pcast it is verl's own manager."""

    _served: Version | None = None
    """The version that the last sync installed."""

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> Metrics:
        """Publishes, stages, pauses, installs, resumes. Returns figures of the sync; verl logs them where it logs
        figures of its own engines. Raises RetryableError at a time limit, and errors of the workers as Ray raises them.
        """
        if self.backend != BACKEND:
            own: Metrics = await super().update_weights(global_steps=global_steps)
            return own
        settings = EngineSettings.of(self.config.engine_kwargs.get(BACKEND, {}))
        rollout = self._rollout_workers()
        self.build_process_group(rollout)
        began = time.monotonic()
        sending = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
        answers = await _answers("publish the version", sending, 2 * settings.wait_s)
        figures: Metrics = {}
        for answer in answers:
            figures.update(answer or {})
        version = Version(int(figures["p2pcast/branch"]), int(figures["p2pcast/step"]))
        words = {"method": ["stage"] * rollout.world_size, "version": [str(version)] * rollout.world_size}
        await _answers(f"stage version {version}", rollout.execute_checkpoint_engine(**words), settings.wait_s)
        staged = time.monotonic()
        await self.abort_replicas()
        await self.release_kv_cache_replicas()
        await _answers(f"install version {version}", rollout.update_weights(global_steps=global_steps), settings.wait_s)
        ends = [
            call
            for group in (self.actor_wg, rollout)
            for call in group.execute_checkpoint_engine(["finalize"] * group.world_size)
        ]
        await _answers("end the sync", ends, 0.0)
        await self.resume_kv_cache_replicas()
        await self.resume_generation_replicas()
        figures["p2pcast/before_pause_s"] = staged - began
        figures["p2pcast/pause_s"] = time.monotonic() - staged
        if self._served is not None:
            figures["p2pcast/lag_steps"] = version.step - self._served.step
        self._served = version
        return figures

    def _rollout_workers(self) -> Any:
        """All workers of all replicas as one group."""
        handles = [worker for replica in self.replicas for worker in replica.workers]
        actor = RayClassWithInitArgs(cls=ray.remote(CheckpointEngineWorker))
        return RayWorkerGroup(worker_handles=handles, ray_cls_with_init=actor)


async def _answers(purpose: str, calls: list[Any], waits_s: float) -> list[Any]:
    """The workers' answers. ``waits_s``: sum of the time limits inside the calls."""
    try:
        found: list[Any] = await asyncio.to_thread(ray.get, calls, timeout=waits_s + SPARE_S)
    except ray.exceptions.GetTimeoutError:
        raise RetryableError(
            f"the workers did not {purpose} within {waits_s + SPARE_S:g} s; look at the logs of Ray's workers"
        ) from None
    return found
