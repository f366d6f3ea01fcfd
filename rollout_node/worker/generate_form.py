"""Builds requests to vLLM's ``/inference/v1/generate``, and reads its answers. It does no I/O.

Token ids go in and come out; no text is produced. Every field that changes the sampling distribution is set, so that no
default of a server or of a model's own files applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from p2pcast.ground.errors import RemoteError
from p2pcast.tasks.task import SampledTop
from rollout_node.worker.routed_answer import routed_ids
from rollout_node.worker.sampled_answer import (
    LOWEST_LOGPROB,
    MALFORMED,
    LabelledSpan,
    Route,
    SampledAnswer,
    ids,
    logprob,
)

VLLM: Final = "vLLM 0.32 or newer is needed"
PROCESSED: Final = "start it with --logprobs-mode processed_logprobs"
ROUTE: Final = Route("/inference/v1/generate", VLLM, f"{VLLM}, started with --enable-scale-out", PROCESSED)


def sampling_fields(
    seed: int, temperature: float, max_tokens: int, stop_token_ids: Sequence[int], logprobs: int
) -> dict[str, Any]:
    """Return the fields sent on every route: one sample from the full distribution, without any server default."""
    return {
        "n": 1,
        "seed": seed,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": True,
        "max_tokens": max_tokens,
        "min_tokens": 0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "structured_outputs": None,
        "logprobs": logprobs,
        "prompt_logprobs": None,
    }


def request(
    prompt_ids: Sequence[int],
    *,
    seed: int,
    temperature: float,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    cache_salt: str | None = None,
    logprobs: int = 0,
    stream: bool = True,
    routed_from: int = 0,
) -> dict[str, Any]:
    """``logprobs``: number of candidates whose log-probabilities are returned, besides the sampled token's.
    ``routed_from``: the first token whose experts are returned, if the engine returns any.
    """
    sampling = sampling_fields(seed, temperature, max_tokens, stop_token_ids, logprobs)
    sampling |= {"stop": None, "bad_words": None, "detokenize": False}
    if routed_from:
        sampling["routed_experts_prompt_start"] = routed_from
    body: dict[str, Any] = {"token_ids": list(prompt_ids), "sampling_params": sampling, "stream": stream}
    return body if cache_salt is None else body | {"cache_salt": cache_salt}


class Answer(SampledAnswer):
    """``experts``: those of the tokens that the engine computed, if it returns them, as tokens × layers × experts per
    token. ``top_count``: number of most probable tokens kept per position.
    """

    route = ROUTE
    experts: np.ndarray | None = None

    def __init__(self, stop_token_ids: Sequence[int], max_tokens: int, top_count: int = 0) -> None:
        super().__init__(stop_token_ids, max_tokens)
        self._top_count = top_count
        self._top: list[list[tuple[int, float]]] = []

    def top(self) -> SampledTop | None:
        """Return the most probable tokens; None unless every token has all of them."""
        if not self._top_count or len(self._top) != len(self.token_ids):
            return None
        if any(len(one) < self._top_count for one in self._top):
            return None
        pairs = np.array(self._top, np.float64)
        return SampledTop(pairs[..., 0].astype(np.uint32), pairs[..., 1].astype(np.float32))

    def _read(self, part: Any) -> None:
        for choice in part["choices"]:
            token_ids = self._tokens(choice)
            self._take(token_ids, self._content(choice) if token_ids else None)
            if self._top_count and token_ids:
                self._top += [self._likeliest(entry) for entry in choice["logprobs"]["content"]]
            if (spans := choice.get("weight_versions")) is not None:
                self._labels = [LabelledSpan(str(s["version"]), int(s["start"]), int(s["end"])) for s in spans]
            if (experts := choice.get("routed_experts")) is not None:
                self.experts = routed_ids(experts)
            self._finish = choice.get("finish_reason") or self._finish

    def _likeliest(self, entry: dict[str, Any]) -> list[tuple[int, float]]:
        """Return the most probable tokens; the engine adds the sampled token if it is not among them."""
        values = [float(one["logprob"]) for one in entry["top_logprobs"]]
        # An engine may send any low number for a token that cannot be sampled.
        values = [min(value, 0.0) if value > LOWEST_LOGPROB else LOWEST_LOGPROB for value in values]
        found = dict(zip(ids([one["token_id"] for one in entry["top_logprobs"]]), values, strict=True))
        return sorted(found.items(), key=lambda pair: -pair[1])[: self._top_count]

    def _tokens(self, choice: dict[str, Any]) -> list[int]:
        return ids(choice["token_ids"])

    def _content(self, choice: dict[str, Any]) -> list[tuple[int, float]] | None:
        """Return tokens with their log-probabilities; None if there are no log-probabilities."""
        if choice.get("logprobs") is None:
            return None
        return [(entry["token_id"], entry["logprob"]) for entry in choice["logprobs"]["content"]]


def candidates(answer: Any) -> dict[int, float]:
    """Read the likeliest first tokens' log-probabilities from a complete answer to a probe. Raises P2PCastError."""
    try:
        first = answer["choices"][0]["logprobs"]["content"][0]
        return {
            int(entry["token_id"]): logprob(float(entry["logprob"]), ROUTE) for entry in [first, *first["top_logprobs"]]
        }
    except MALFORMED:
        raise RemoteError(f"the engine's answer is not in the form of {ROUTE.path}") from None
