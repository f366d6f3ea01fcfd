"""Samples from an OpenAI-compatible engine through ``/v1/completions`` with token ids.

The route does not report the weights' version, so this sampler needs a peer whose switches wait for requests
(``--commit-safe-point drain``). Guarantee: a sample's version is that of the serving epoch (a time without a write to
the weights) that the peer reported before and after the request. If the two differ, the sample is dropped and taken
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from p2pcast.ground.backoff import Backoff
from p2pcast.ground.errors import RetryableError
from p2pcast.ground.private_random import uniform
from p2pcast.ground.version import Version
from p2pcast.tasks.task import Sample
from rollout_node.worker import completions_form, recomputation
from rollout_node.worker.completions_form import ROUTE, Completion
from rollout_node.worker.engine_sampler import EngineSampler
from rollout_node.worker.engine_versions import ServingEpoch

ATTEMPTS: Final = 8
"""Number of samples of one turn whose weights may change before the play is given up."""
WAITS: Final = 8
"""Number of queries to a peer that is writing weights; a switch takes about a second."""


class ServedWeights(Protocol):
    async def serving_epoch(self) -> ServingEpoch:
        """Raises LocalError if switches do not wait for requests, RetryableError while weights are being written."""


class CompletionsSampler(EngineSampler[ServedWeights]):
    route = ROUTE
    silent_s = 900.0
    """A request that arrives during a drain waits for the longest running one."""

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        body = completions_form.request(
            prompt_ids,
            seed=seed,
            temperature=temperature,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
        )
        for _ in range(ATTEMPTS):
            before = await self._serving_epoch()
            answer = Completion(stop_token_ids, max_tokens)
            await answer.read(self._requests.streamed(body), self._on_tokens)
            if await self._lasted(before):
                return answer.sample_of(before.span)
        raise RetryableError(f"{self._engine}: the weights changed during each of {ATTEMPTS} samples of one turn")

    async def score(self, token_ids: Sequence[int]) -> tuple[np.ndarray, Version]:
        before = await self._serving_epoch()
        found = await self._requests.whole(recomputation.completion_request(token_ids))
        scores = recomputation.completion_logprobs(found, token_ids)
        if not await self._lasted(before):
            raise RetryableError(f"{self._engine}: the weights changed while it scored tokens")
        return scores, before.span.version

    async def _probe(self, temperature: float) -> tuple[dict[int, float], str]:
        before = await self._serving_epoch()
        answer, found = Completion((), 1), await self._probed(completions_form.request, temperature)
        candidates = completions_form.candidates(found)
        answer.add(found)
        answer.sample_of(before.span)
        if not await self._lasted(before):
            raise RetryableError(f"{self._engine}: the weights changed during a probe")
        return candidates, str(before.span.version)

    async def _serving_epoch(self) -> ServingEpoch:
        """Return the current serving epoch, waiting while weights are being written."""
        delays = Backoff(0.05, 2.0, uniform)
        for _ in range(WAITS):
            try:
                return await self._naming.serving_epoch()
            except RetryableError:
                await asyncio.sleep(delays.next_s())
        return await self._naming.serving_epoch()

    async def _lasted(self, before: ServingEpoch) -> bool:
        """Whether no weights have been written since ``before`` was read."""
        try:
            return (await self._naming.serving_epoch()).id == before.id
        except RetryableError:
            return False
