"""Builds requests to SGLang's ``/generate``, and reads its answers. It does no I/O.

Like ``generate_form``, except for the route's form. SGLang sends all tokens of a sample with each part of a stream, or
only the new ones with ``--incremental-streaming-output``; both are read. ``ignore_eos`` would make SGLang ignore the
stop tokens too. So SGLang also stops at the model's own end tokens, and another request continues the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from p2pcast.ground.errors import RemoteError
from rollout_node.worker.sampled_answer import (
    LOWEST_LOGPROB,
    MALFORMED,
    LabelledSpan,
    Route,
    SampledAnswer,
    ids,
    logprob,
)

SGLANG: Final = "SGLang 0.5.23 or newer is needed"
ROUTE: Final = Route(
    "/generate", SGLANG, SGLANG, "start it without the environment variable SGLANG_RETURN_ORIGINAL_LOGPROB"
)
PARTS: Final = 64
"""Parts of a streamed sample. Each contains all tokens so far, so one part per token would be quadratic in bytes."""
SEEDS: Final = 1 << 64
"""SGLang expects a signed 64-bit seed."""


def request(
    prompt_ids: Sequence[int],
    *,
    seed: int,
    temperature: float,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    extra_key: str | None = None,
    logprobs: int = 0,
    stream: bool = True,
) -> dict[str, Any]:
    """``logprobs``: number of candidates whose log-probabilities are returned, besides the sampled token's.
    ``extra_key``: prefix-cache salt.
    """
    sampling = {
        "n": 1,
        "beam_width": None,
        "sampling_seed": seed - SEEDS if seed >= SEEDS // 2 else seed,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": None,
        "stop_regex": None,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": not stop_token_ids,
        "max_new_tokens": max_tokens,
        "min_new_tokens": 0,
        "logit_bias": None,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
        "custom_params": None,
        "watermark": {"enabled": False},
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "stream_interval": max(1, max_tokens // PARTS),
    }
    body: dict[str, Any] = {
        "input_ids": list(prompt_ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": logprobs,
        "return_text_in_logprobs": False,
        "custom_logit_processor": None,
        "lora_path": None,
        "stream": stream,
    }
    return body if extra_key is None else body | {"extra_key": extra_key}


def score_request(token_ids: Sequence[int], extra_key: str | None) -> dict[str, Any]:
    """Return a request for one more token, whose answer contains the log-probability of each prompt token. SGLang then
    takes no prefix from its cache.
    """
    body = request(
        token_ids, seed=0, temperature=1.0, max_tokens=1, stop_token_ids=(), extra_key=extra_key, stream=False
    )
    return body | {"logprob_start_len": 0}


class SglangAnswer(SampledAnswer):
    """One sample, from one or more requests."""

    route = ROUTE

    def __init__(self, stop_token_ids: Sequence[int], max_tokens: int) -> None:
        super().__init__(stop_token_ids, max_tokens)
        self._begin = 0
        """Number of tokens from earlier requests."""
        self._earlier: list[LabelledSpan] = []

    def _read(self, part: Any) -> None:
        meta, token_ids = part["meta_info"], ids(part["output_ids"])
        finish = meta["finish_reason"]
        if finish is not None:
            if finish["type"] == "abort":
                raise self._failure({"message": finish.get("message"), "code": finish.get("status_code")})
            self._finish = str(finish["type"])
        made, have = _count(meta["completion_tokens"]), len(self.token_ids) - self._begin
        told = None if meta.get("output_token_logprobs") is None else _pairs(meta["output_token_logprobs"])
        if len(token_ids) >= made:  # all tokens of the request
            if token_ids[:have] != self.token_ids[self._begin :]:
                raise RemoteError("the engine changed tokens that it had sent")
            token_ids, told = token_ids[have:], None if told is None else told[have:]
        elif have + len(token_ids) != made:
            raise RemoteError(f"the engine sent {have + len(token_ids)} of {made} tokens")
        self._take(token_ids, told)
        if (spans := meta.get("weight_versions")) is not None:
            self._labels = _joined(self._earlier, [self._span(span) for span in spans])

    def _span(self, span: Any) -> LabelledSpan:
        return LabelledSpan(
            str(span["version"]), self._begin + _count(span["start"]), self._begin + _count(span["end"])
        )

    def proceed(self) -> bool:
        """Whether the engine stopped at a token that is not one of the stop tokens. If so, the caller must request the
        rest, with a prompt that ends with ``token_ids``. Raises P2PCastError.
        """
        if self._finish != "stop" or not self._begin < len(self.token_ids) < self._max_tokens:
            return False
        if not self._stop_token_ids or self.token_ids[-1] in self._stop_token_ids:
            return False
        self._earlier, self._begin, self._labels, self._finish = self.labels(), len(self.token_ids), None, None
        return True


def _count(found: Any) -> int:
    """Return the number if it is an int. Raises TypeError otherwise."""
    if type(found) is not int:
        raise TypeError
    return found


def _pairs(entries: Any) -> list[tuple[int, float]]:
    """Tokens with their log-probabilities, from SGLang's [log-probability, token, text]."""
    return [(entry[1], entry[0]) for entry in entries]


def _joined(earlier: list[LabelledSpan], later: list[LabelledSpan]) -> list[LabelledSpan]:
    """Join the spans of two requests. If one version made both sides of the join, merge them."""
    if earlier and later and earlier[-1].label == later[0].label and earlier[-1].end == later[0].start:
        return [*earlier[:-1], later[0]._replace(start=earlier[-1].start), *later[1:]]
    return earlier + later


def candidates(answer: Any) -> dict[int, float]:
    """Read the likeliest first tokens' log-probabilities from a complete answer to a probe. Raises P2PCastError."""
    try:
        meta = answer["meta_info"]
        entries = [*_pairs(meta["output_token_logprobs"][:1]), *_pairs(meta["output_top_logprobs"][0])]
        # A token with probability 0 has the lowest finite float, or null.
        seen = [(_count(token), value) for token, value in entries if value is not None and value > LOWEST_LOGPROB]
        return {token: logprob(float(value), ROUTE) for token, value in seen}
    except MALFORMED:
        raise RemoteError(f"the engine's answer is not in the form of {ROUTE.path}") from None


def prompt_logprobs(answer: Any, token_ids: Sequence[int]) -> np.ndarray:
    """Return one float32 per token; the first token's is 0. SGLang 0.5.23 scores the last id of the model's vocabulary,
    but reports it as 0. Raises RemoteError, LocalError.
    """
    try:
        entries, last = _pairs(answer["meta_info"]["input_token_logprobs"]), max(token_ids)
        if len(entries) != len(token_ids):
            raise RemoteError(f"the engine scored {len(entries)} of {len(token_ids)} tokens")
        for (named, _), token in zip(entries, token_ids, strict=True):
            if named != token and (named, token) != (0, last):
                raise RemoteError("the engine scored other tokens than it was sent")
        found = [logprob(float(value), ROUTE) for _, value in entries[1:]]
    except MALFORMED:
        raise RemoteError("the engine's answer has no log-probabilities of the prompt") from None
    return np.array([0.0, *found], "<f4")
