"""Samples of a vLLM engine, through ``/inference/v1/generate``.

Promises:

- Each sample's spans are those of the engine, named by the peer that installed the weights.
- An engine that lacks a needed capability is refused at the start, with its reason.

A cancelled sample ends at the engine too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import aiohttp
import numpy as np

from p2pcast.rollouts.result import Span
from p2pcast.tasks.task import Sample
from p2pcast.version import Version
from rollout_node.worker import generate_form, recomputation
from rollout_node.worker.engine_requests import PROBE_TOKEN, EngineRequests, checked
from rollout_node.worker.generate_form import CANDIDATES, PATH, Answer


class Naming(Protocol):
    """From labels of the engine's weights to versions."""

    async def span(self, label: str) -> Span: ...
    @property
    def salt(self) -> str | None:
        """Salt of the prefix cache for a request that begins now."""


class GenerateSampler:
    """``on_tokens``: called with the number of tokens that have come, summed over the turns of a play."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        engine: str,
        naming: Naming,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._http, self._naming = http, naming
        self._requests = EngineRequests(http, engine, PATH)
        self._engine = engine
        self._on_tokens = on_tokens

    def of_play(self, on_tokens: Callable[[int], None]) -> GenerateSampler:
        """The sampler of one play, which counts that play's tokens."""
        return GenerateSampler(self._http, self._engine, self._naming, on_tokens)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        temperature: float,
        max_tokens: int,
        stop_token_ids: Sequence[int],
    ) -> Sample:
        """See ``Sampler``. Raises P2PCastError."""
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
        spans = {label: await self._naming.span(label) for label in dict.fromkeys(s.label for s in answer.labels())}
        return answer.sample(spans.__getitem__)

    async def score(self, token_ids: Sequence[int]) -> tuple[np.ndarray, Version]:
        """Log-probabilities of the tokens at temperature 1, float32, the first token's 0, and the version that the
        engine served at their end. Raises P2PCastError.
        """
        found = await self._requests.whole(recomputation.request(token_ids, self._naming.salt))
        answer = Answer((), 1)
        answer.add(found)
        (label,) = answer.labels()
        return recomputation.prompt_logprobs(found, token_ids), (await self._naming.span(label.label)).version

    async def check(self) -> str:
        """The label of the engine's weights. Raises LocalError for an engine that cannot serve rollouts, and
        RetryableError for one that is not up.
        """
        return await checked(self._engine, self._probe)

    async def _probe(self, temperature: float) -> tuple[dict[int, float], str]:
        """Log-probabilities of the likeliest tokens, and the label of the weights."""
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
