"""Builds requests to an OpenAI-compatible ``/v1/completions`` that returns token ids and log-probabilities, and reads
its answers. It does no I/O.

Like ``generate_form``, except for the route's form and for versions, which the route does not report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from p2pcast.ground.errors import LocalError, RemoteError
from rollout_node.worker.generate_form import PROCESSED, VLLM, Answer, sampling_fields
from rollout_node.worker.sampled_answer import MALFORMED, Route, logprob

ROUTE: Final = Route("/v1/completions", VLLM, VLLM, PROCESSED)
_PREFIX: Final = "token_id:"
"""Prefix of a token's text with ``return_tokens_as_token_ids``."""
_NO_IDS: Final = f"the engine returns no token ids: {VLLM} (return_token_ids)"
_NO_LOGPROBS: Final = "the engine returns no log-probabilities of its tokens, as asked by logprobs"


def request(
    prompt_ids: Sequence[int],
    *,
    seed: int,
    temperature: float,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    logprobs: int = 0,
    stream: bool = True,
) -> dict[str, Any]:
    """``logprobs``: number of candidates whose log-probabilities are returned, besides the sampled token's."""
    return sampling_fields(seed, temperature, max_tokens, stop_token_ids, logprobs) | {
        "prompt": list(prompt_ids),
        "stop": [],
        "bad_words": [],
        "response_format": None,
        "use_beam_search": False,
        "repetition_detection": None,
        "truncate_prompt_tokens": None,
        "add_special_tokens": False,
        "echo": False,
        "suffix": None,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": stream,
    }


class Completion(Answer):
    route = ROUTE

    def _tokens(self, choice: dict[str, Any]) -> list[int]:
        if choice.get("token_ids") is None and (choice.get("text") or choice.get("logprobs")):
            raise LocalError(_NO_IDS)
        return super()._tokens({"token_ids": choice.get("token_ids")})

    def _content(self, choice: dict[str, Any]) -> list[tuple[int, float]] | None:
        if (logprobs := choice.get("logprobs")) is None:
            return None
        values = logprobs["token_logprobs"]
        if None in values:
            raise LocalError(_NO_LOGPROBS)
        return list(zip(map(token_id, logprobs["tokens"]), values, strict=True))


def token_id(text: str) -> int:
    """Parse a token id from the token's text. Raises ValueError."""
    if not text.startswith(_PREFIX):
        raise ValueError
    return int(text[len(_PREFIX) :])


def candidates(answer: Any) -> dict[int, float]:
    """Read the likeliest first tokens' log-probabilities from a complete answer to a probe. Raises P2PCastError."""
    try:
        choice = answer["choices"][0]
        if choice.get("token_ids") is None:
            raise LocalError(_NO_IDS)
        if choice.get("logprobs") is None or choice["logprobs"]["top_logprobs"][0] is None:
            raise LocalError(_NO_LOGPROBS)
        first = choice["logprobs"]["top_logprobs"][0]
        return {token_id(text): logprob(float(value), ROUTE) for text, value in first.items()}
    except MALFORMED:
        raise RemoteError(f"the engine's answer is not in the form of {ROUTE.path}") from None
