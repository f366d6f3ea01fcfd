"""Why a play produced no result: because of the engine, the job itself, or this machine.

Guarantee: the job is blamed only if the engine answered the play's newest request, refused its prompt, or failed
repeatedly at this job but not at others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from p2pcast.ground.errors import RemoteError, RetryableError
from p2pcast.ground.plain_text import shown_text
from p2pcast.rollouts.return_reason import MAX_DETAIL, Returned, ReturnReason
from p2pcast.tasks.child_processes.play_pool import PlayBlockedError
from p2pcast.tasks.task import ForgedPlayError, Sample, Sampler
from rollout_node.worker.sampled_answer import EngineFailedError, PromptRefusedError

MAX_ENGINE_FAULTS: Final = 3
"""After this many engine failures at one job, with other jobs played in between, the job is blamed."""
JOBS_KEPT: Final = 256
"""Number of jobs whose failures are remembered."""


class InvalidPlayError(RemoteError):
    """The play is not a valid result, and the ledger would hold it against this worker."""


class EngineFaults:
    """Distinguishes a prompt at which the engine fails from an engine that fails in general."""

    def __init__(self) -> None:
        self._answered = 0
        """Number of plays that succeeded."""
        self._by_job: dict[bytes, tuple[int, int]] = {}
        """Job → the engine's failures at it, and ``_answered`` at the last one; the oldest jobs first."""

    def answered(self) -> None:
        self._answered += 1

    def judged(self, job: bytes, returned: Returned, failed: Exception | None) -> Returned:
        """Blame the job if due. ``failed``: the newest request's error, which counts only if the engine answered."""
        if returned.reason is not ReturnReason.ENGINE or not isinstance(failed, RemoteError | EngineFailedError):
            return returned
        count, since = self._by_job.pop(job, (0, -1))
        count += self._answered > since
        self._by_job[job] = count, self._answered
        if len(self._by_job) > JOBS_KEPT:
            del self._by_job[next(iter(self._by_job))]
        if count < MAX_ENGINE_FAULTS:
            return returned
        detail = f"the engine failed {count} times at this job, and answered others between: {returned.detail}"
        return Returned(ReturnReason.REFUSED, detail[:MAX_DETAIL])


class HeardSampler:
    """A sampler that remembers how the play's newest request ended."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.failed: Exception | None = None
        """The newest request's error, if it failed."""
        self.cut_off = False
        """Whether the newest request was cancelled."""

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        self.failed, self.cut_off = None, False
        try:
            return await self._sampler.sample(
                prompt_ids,
                seed=seed,
                temperature=temperature,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
            )
        except asyncio.CancelledError:
            self.cut_off = True
            raise
        except Exception as error:
            self.failed = error
            raise


def returned_of(error: Exception, heard: HeardSampler, *, out_of_time: bool) -> Returned:
    """Convert the play's ``error`` into a reason for its return. ``out_of_time``: whether it hit its time limit."""
    return Returned(_reason(error, heard, out_of_time), shown_text(text_of(error))[:MAX_DETAIL])


def text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _reason(error: Exception, heard: HeardSampler, out_of_time: bool) -> ReturnReason:
    if heard.failed is not None:
        return ReturnReason.REFUSED if isinstance(heard.failed, PromptRefusedError) else ReturnReason.ENGINE
    if out_of_time:
        return ReturnReason.ENGINE if heard.cut_off else ReturnReason.HUNG
    if isinstance(error, PlayBlockedError):
        return ReturnReason.HUNG
    if isinstance(error, InvalidPlayError | ForgedPlayError):
        return ReturnReason.INVALID
    # A job is never blamed for an error that may pass by itself.
    return ReturnReason.ENGINE if isinstance(error, RetryableError) else ReturnReason.FAILED
