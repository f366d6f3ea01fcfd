"""Recomputes the log-probabilities of a finished play: an engine computes them again from its tokens. It does no I/O.

The engine reads all tokens as a prompt, so nothing of a different version is left in its cache. At temperature 1, the
log-probabilities of a prompt are those of the sampling distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from p2pcast.ground.errors import RemoteError
from p2pcast.rollouts.kv_policy import KV_OF_ONE_VERSION
from p2pcast.rollouts.result import Result
from rollout_node.worker import completions_form, generate_form
from rollout_node.worker.sampled_answer import MALFORMED, Route, logprob


class Gaps(NamedTuple):
    """Absolute differences between two log-probabilities of the same tokens, in nats."""

    mean: float
    largest: float


def obstacle(result: Result) -> str | None:
    """Why a result's log-probabilities cannot be recomputed; None if they can."""
    if result.temperature != 1.0:
        return f"sampled at temperature {result.temperature:g}: an engine scores prompts at temperature 1"
    if result.sparse_versions:
        return "sampled with sparse attention: an engine scores prompts densely"
    if len({span.version for span in result.spans}) != 1:
        return "sampled by several versions"
    if any(span.kv not in KV_OF_ONE_VERSION for span in result.spans):
        return "sampled from a cache that an earlier version may have computed"
    return None


def request(token_ids: Sequence[int], cache_salt: str | None) -> dict[str, Any]:
    """Return a request for one more token, whose answer contains the log-probability of each prompt token."""
    body = generate_form.request(
        token_ids, seed=0, temperature=1.0, max_tokens=1, stop_token_ids=(), cache_salt=cache_salt, stream=False
    )
    body["sampling_params"]["prompt_logprobs"] = 0
    return body


def prompt_logprobs(answer: Any, token_ids: Sequence[int]) -> np.ndarray:
    """Return one float32 per token; the first token's is 0. Raises RemoteError, LocalError."""
    return _scored(lambda: answer["prompt_logprobs"], token_ids, generate_form.ROUTE)


def completion_request(token_ids: Sequence[int]) -> dict[str, Any]:
    """Like ``request``, for the completions route."""
    body = completions_form.request(token_ids, seed=0, temperature=1.0, max_tokens=1, stop_token_ids=(), stream=False)
    return body | {"prompt_logprobs": 0}


def completion_logprobs(answer: Any, token_ids: Sequence[int]) -> np.ndarray:
    """Like ``prompt_logprobs``, from an answer of the completions route. Raises RemoteError, LocalError."""
    return _scored(lambda: answer["choices"][0]["prompt_logprobs"], token_ids, completions_form.ROUTE)


def _scored(found_in: Callable[[], Any], token_ids: Sequence[int], route: Route) -> np.ndarray:
    try:
        rows = found_in()
        if len(rows) != len(token_ids):
            raise RemoteError(f"the engine scored {len(rows)} of {len(token_ids)} tokens")
        found = [logprob(float(row[str(t)]["logprob"]), route) for row, t in zip(rows[1:], token_ids[1:], strict=True)]
    except MALFORMED:
        raise RemoteError("the engine's answer has no log-probabilities of the prompt") from None
    return np.array([0.0, *found], "<f4")


def gaps(result: Result, recomputed: np.ndarray) -> Gaps:
    """Return the gaps over the sampled tokens. A play's first token counts if it was sampled, although no engine can
    score it. Such a play has no prompt, and no task here makes one.
    """
    sampled = result.mask.astype(bool)
    difference = np.abs(result.logprobs[sampled].astype("<f8") - recomputed[sampled])
    return Gaps(float(difference.mean()), float(difference.max()))
