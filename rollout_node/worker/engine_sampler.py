"""Samples from an engine, through any of its routes.

Guarantees: an engine that is missing a required capability is refused at startup, with the reason. A cancelled sample
is cancelled at the engine too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import aiohttp
import numpy as np

from p2pcast.ground.version import Version
from p2pcast.rollouts.result import Span
from p2pcast.tasks.task import Sample
from rollout_node.worker.engine_requests import PROBE_TOKEN, SILENT_S, EngineRequests, checked
from rollout_node.worker.sampled_answer import CANDIDATES, Route, SampledAnswer

Weights = TypeVar("Weights")
"""The type of the object that identifies the engine's weights."""


class Naming(Protocol):
    """Maps labels of the engine's weights to versions."""

    async def span(self, label: str) -> Span: ...
    @property
    def salt(self) -> str | None:
        """Prefix-cache salt for a request that starts now."""

    @property
    def sparse(self) -> bool:
        """Whether a request that starts now is sampled with sparse attention."""


class EngineSampler(ABC, Generic[Weights]):
    """``on_tokens``: called with the number of tokens newly received, in all turns of a play. ``adapter``: the LoRA
    adapter that answers.
    """

    route: ClassVar[Route]
    silent_s: ClassVar[float] = SILENT_S
    """Longest time in seconds without a token."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        engine: str,
        naming: Weights,
        on_tokens: Callable[[int], None] = lambda count: None,
        *,
        adapter: str | None = None,
    ) -> None:
        self._engine, self._naming = engine, naming
        self._requests = EngineRequests(http, engine, self.route, self.silent_s, adapter)
        self._on_tokens = on_tokens

    def of_play(self, on_tokens: Callable[[int], None]) -> Self:
        """Return a copy for one play, which reports that play's tokens to ``on_tokens``."""
        found = copy(self)
        found._on_tokens = on_tokens
        return found

    @abstractmethod
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

    @abstractmethod
    async def score(self, token_ids: Sequence[int]) -> tuple[np.ndarray, Version]:
        """Return the tokens' log-probabilities at temperature 1 (float32; the first token's is 0), and the version that
        the engine served at the end of the request. Raises P2PCastError.
        """

    async def check(self) -> str:
        """Return the label of the engine's weights. Raises LocalError if the engine cannot serve rollouts,
        RetryableError if it is not up.
        """
        return await checked(self._engine, self.route, self._probe)

    async def _probed(self, request: Callable[..., dict[str, Any]], temperature: float) -> Any:
        """Return the engine's answer with one token and its candidates. ``request`` builds a request for the route."""
        body = request(
            [PROBE_TOKEN],
            seed=0,
            temperature=temperature,
            max_tokens=1,
            stop_token_ids=(),
            logprobs=CANDIDATES,
            stream=False,
        )
        return await self._requests.whole(body)

    @abstractmethod
    async def _probe(self, temperature: float) -> tuple[dict[int, float], str]:
        """Return the likeliest tokens' log-probabilities, and the label of the weights."""


class LabelledSampler(EngineSampler[Naming]):
    """Samples from an engine that labels each token with its weights. Guarantee: each sample's spans are the engine's,
    with the versions named by the peer that installed the weights.
    """

    async def _sample(self, answer: SampledAnswer) -> Sample:
        """Return the complete answer as a sample, with its labels mapped to versions."""
        labels = dict.fromkeys(span.label for span in answer.labels())
        spans = {label: await self._naming.span(label) for label in labels}
        return answer.sample(spans.__getitem__)

    async def _version(self, answer: SampledAnswer) -> Version:
        """Return the version that made a one-token answer."""
        (span,) = answer.labels()
        return (await self._naming.span(span.label)).version
