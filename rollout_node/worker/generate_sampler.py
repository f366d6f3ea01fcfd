"""Samples of a vLLM engine, through ``/inference/v1/generate``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2pcast.tasks.task import Sample
from p2pcast.version import Version
from rollout_node.worker import generate_form, recomputation
from rollout_node.worker.engine_requests import PROBE_TOKEN
from rollout_node.worker.generate_form import Answer
from rollout_node.worker.labelled_sampler import LabelledSampler
from rollout_node.worker.sampled_answer import CANDIDATES


class GenerateSampler(LabelledSampler):
    route = generate_form.ROUTE

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        body = generate_form.request(
            prompt_ids,
            seed=seed,
            temperature=temperature,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            cache_salt=self._naming.salt,
        )
        answer = Answer(stop_token_ids, max_tokens)
        await answer.read(self._requests.streamed(body), self._on_tokens)
        return await self._sample(answer)

    async def score(self, token_ids: Sequence[int]) -> tuple[np.ndarray, Version]:
        found = await self._requests.whole(recomputation.request(token_ids, self._naming.salt))
        answer = Answer((), 1)
        answer.add(found)
        return recomputation.prompt_logprobs(found, token_ids), await self._version(answer)

    async def _probe(self, temperature: float) -> tuple[dict[int, float], str]:
        body = generate_form.request(
            [PROBE_TOKEN],
            seed=0,
            temperature=temperature,
            max_tokens=1,
            stop_token_ids=(),
            logprobs=CANDIDATES,
            stream=False,
        )
        answer, found = Answer((), 1), await self._requests.whole(body)
        answer.add(found)
        (span,) = answer.labels()
        return generate_form.candidates(found), span.label
