"""Samples from a SGLang engine through ``/generate``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2pcast.ground.version import Version
from p2pcast.tasks.task import Sample
from rollout_node.worker import sglang_form
from rollout_node.worker.engine_requests import line_bytes
from rollout_node.worker.engine_sampler import LabelledSampler
from rollout_node.worker.sglang_form import SglangAnswer


class SglangSampler(LabelledSampler):
    route = sglang_form.ROUTE

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        answer = SglangAnswer(stop_token_ids, max_tokens)
        going = True
        while going:
            body = sglang_form.request(
                [*prompt_ids, *answer.token_ids],
                seed=seed,
                temperature=temperature,
                max_tokens=max_tokens - len(answer.token_ids),
                stop_token_ids=stop_token_ids,
                extra_key=self._naming.salt,
            )
            await answer.read(self._requests.streamed(body, line_bytes(max_tokens)), self._on_tokens)
            going = answer.proceed()
        return await self._sample(answer)

    async def score(self, token_ids: Sequence[int]) -> tuple[np.ndarray, Version]:
        body = sglang_form.score_request(token_ids, self._naming.salt)
        found = await self._requests.whole(body, line_bytes(len(token_ids)))
        answer = SglangAnswer((), 1)
        answer.add(found)
        return sglang_form.prompt_logprobs(found, token_ids), await self._version(answer)

    async def _probe(self, temperature: float) -> tuple[dict[int, float], str]:
        answer, found = SglangAnswer((), 1), await self._probed(sglang_form.request, temperature)
        answer.add(found)
        (span,) = answer.labels()
        return sglang_form.candidates(found), span.label
