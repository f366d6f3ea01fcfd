"""Samples from a vLLM engine through ``/inference/v1/generate``.

Guarantees:

- Samples include their tokens' experts if the engine returns them, which its option ``--enable-return-routed-experts``
  decides and the first probe shows. Without the option, requests do not change. After an unreadable answer, the engine
  is probed again, because it may have been restarted.
- With sparse attention, a share of the engine's plays includes the most probable tokens of each position.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np

from p2pcast.ground.errors import P2PCastError, RemoteError
from p2pcast.ground.limits import MIB
from p2pcast.ground.private_random import fraction
from p2pcast.ground.version import Version
from p2pcast.rollouts.top_logprobs import TOP_K
from p2pcast.tasks.task import Sample, SampledExperts
from rollout_node.worker import generate_form, recomputation
from rollout_node.worker.engine_requests import MAX_LINE_BYTES
from rollout_node.worker.engine_sampler import LabelledSampler
from rollout_node.worker.generate_form import Answer
from rollout_node.worker.routed_answer import KnownTokens, routed_line_bytes
from rollout_node.worker.sampled_answer import HOT

logger = logging.getLogger("p2pcast.worker")

TOP_BYTES: Final = 128
"""Upper bound on the bytes of one of a position's most probable tokens, in an answer's line."""
MAX_TOP_LINE_BYTES: Final = 16 * MIB
"""An engine puts several tokens in one line while its client is slow; this has space for about 6000 of them."""


@dataclass(frozen=True, slots=True)
class TopTokenShare:
    """``share``: the share of sparse-attention plays for which the most probable tokens are requested. ``count``:
    number of most probable tokens per position, at most the size of the vocabulary.
    """

    share: float = 0.0
    count: int = TOP_K


NO_TOP_TOKENS: Final = TopTokenShare()


class GenerateSampler(LabelledSampler):
    route = generate_form.ROUTE
    routed_bytes = 0
    """Bytes of one token's experts; 0 if the engine returns none."""

    def __init__(self, *arguments: Any, adapter: str | None = None, top: TopTokenShare = NO_TOP_TOKENS) -> None:
        super().__init__(*arguments, adapter=adapter)
        self._top = top
        self._known = KnownTokens()
        self._asks_top = False
        self._of_engine = self
        """The sampler from which this one was made for a play."""

    def of_play(self, on_tokens: Callable[[int], None]) -> Self:
        found = super().of_play(on_tokens)
        found._known, found._asks_top = KnownTokens(), fraction() < self._top.share
        return found

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        routed_from = self._known.first_unknown(prompt_ids)
        top_count = self._top.count if self._asks_top and self._naming.sparse else 0
        body = generate_form.request(
            prompt_ids,
            seed=seed,
            temperature=temperature,
            max_tokens=max_tokens,
            stop_token_ids=stop_token_ids,
            cache_salt=self._naming.salt,
            logprobs=top_count,
            routed_from=routed_from,
        )
        answer = Answer(stop_token_ids, max_tokens, top_count)
        routed_tokens = len(prompt_ids) + max_tokens - routed_from
        most_bytes = MAX_LINE_BYTES + routed_line_bytes(routed_tokens, self.routed_bytes)
        most_bytes += min(MAX_TOP_LINE_BYTES, TOP_BYTES * top_count * max_tokens)
        try:
            await answer.read(self._requests.streamed(body, most_bytes), self._on_tokens)
        except RemoteError:
            await self._of_engine.learn_form()
            raise
        sample = replace(await self._sample(answer), top=answer.top())
        if answer.experts is None:
            return sample
        expected = len(prompt_ids) + len(sample.token_ids) - 1 - routed_from
        if len(answer.experts) != expected:
            found = len(answer.experts)
            logger.warning("a sample goes without experts: the engine sent those of %d tokens, not %d", found, expected)
            return sample
        self._known.received(prompt_ids, sample.token_ids)
        return replace(sample, experts=SampledExperts(routed_from, answer.experts))

    async def score(self, token_ids: Sequence[int]) -> tuple[np.ndarray, Version]:
        body = recomputation.request(token_ids, self._naming.salt)
        # The experts of a long prompt would be megabytes that no caller reads.
        body["sampling_params"]["routed_experts_prompt_start"] = len(token_ids)
        found = await self._requests.whole(body)
        answer = Answer((), 1)
        answer.add(found)
        return recomputation.prompt_logprobs(found, token_ids), await self._version(answer)

    async def learn_form(self) -> None:
        """Probe again whether the engine returns experts, for later plays: a restarted engine may now have the option,
        whose lines exceed the normal limit.
        """
        with suppress(P2PCastError):
            await self._probe(HOT)

    async def _probe(self, temperature: float) -> tuple[dict[int, float], str]:
        answer, found = Answer((), 1), await self._probed(generate_form.request, temperature)
        answer.add(found)
        self.routed_bytes = 0 if answer.experts is None else answer.experts[:1].nbytes
        (span,) = answer.labels()
        return generate_form.candidates(found), span.label
