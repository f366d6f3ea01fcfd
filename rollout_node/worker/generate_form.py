"""Requests to vLLM's ``/inference/v1/generate``, and the reading of its answers. Pure.

Token ids go in and come out; no text is made. Every field that changes the sampling distribution is stated, so that no
default of a server or of a model's own files applies. Spans are the engine's ``weight_versions``; an answer without
them is refused, because a client cannot know when the weights changed.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from p2pcast.errors import LocalError, RemoteError, RetryableError
from p2pcast.rollouts.result import Span
from p2pcast.tasks.task import Sample

PATH: Final = "/inference/v1/generate"
LOWEST_LOGPROB: Final = -9000.0
"""vLLM writes -9999 where it has no log-probability."""
ROUNDING: Final = 1e-4
"""A log-probability above 0 by no more than this is 0, rounded."""
COLD, HOT = 0.5, 2.0
"""Temperatures of the two probes; vLLM takes none above 2."""
CANDIDATES: Final = 5
"""Likeliest tokens of a probe, whose log-probabilities are compared."""
SAME_GAP: Final = 0.5
"""Gaps between log-probabilities shrink to ``COLD / HOT`` of their size from the first probe to the second, if they are
of the sampling distribution; otherwise they stay. This share lies between the two.
"""
FLAT: Final = 1e-3
"""A gap below this says nothing."""
NO_VERSIONS: Final = "the engine does not say which weights made its tokens: vLLM 0.32 or newer is needed"

Named = Callable[[str], Span]
"""From a label of the engine's weights to a span without place."""


class LabelledSpan(NamedTuple):
    label: str
    start: int
    end: int


def sampling_fields(
    seed: int, temperature: float, max_tokens: int, stop_token_ids: Sequence[int], logprobs: int
) -> dict[str, Any]:
    """The fields that every route is sent: one sample of the whole distribution; no default of a server applies."""
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
) -> dict[str, Any]:
    """``logprobs``: candidates whose log-probabilities are returned, besides the sampled token's."""
    sampling = sampling_fields(seed, temperature, max_tokens, stop_token_ids, logprobs)
    sampling |= {"stop": None, "bad_words": None, "detokenize": False}
    body: dict[str, Any] = {"token_ids": list(prompt_ids), "sampling_params": sampling, "stream": stream}
    return body if cache_salt is None else body | {"cache_salt": cache_salt}


class Answer:
    """The parts of one answer, streamed or whole."""

    path = PATH

    def __init__(self, stop_token_ids: Sequence[int], max_tokens: int) -> None:
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._labels: list[LabelledSpan] | None = None
        self._finish: str | None = None
        self._stop_token_ids, self._max_tokens = stop_token_ids, max_tokens

    def add(self, part: Any) -> None:
        """One JSON document of the engine. Raises P2PCastError."""
        if isinstance(part, dict) and part.get("error") is not None:
            raise RetryableError(f"the engine failed: {str(part['error'])[:200]}")
        try:
            for choice in part["choices"]:
                self._add(choice)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise RemoteError(f"the engine's answer is not in the form of {self.path}") from None

    async def read(self, parts: AsyncIterator[Any], on_tokens: Callable[[int], None]) -> None:
        """All parts of a stream. ``on_tokens``: called with the number of tokens of each part. Raises P2PCastError."""
        reported = 0
        async for part in parts:
            self.add(part)
            if len(self.token_ids) > reported:
                on_tokens(len(self.token_ids) - reported)
                reported = len(self.token_ids)

    def _add(self, choice: dict[str, Any]) -> None:
        token_ids = self._tokens(choice)
        if token_ids:
            if choice.get("logprobs") is None:
                raise RemoteError("the engine sent no log-probabilities")
            content = list(self._content(choice["logprobs"]))
            if [token for token, _ in content] != token_ids:
                raise RemoteError("the engine's log-probabilities are not those of its tokens")
            self._logprobs += [logprob(float(value)) for _, value in content]
        self.token_ids += token_ids
        if len(self.token_ids) > self._max_tokens:
            raise RemoteError(f"the engine sent {len(self.token_ids)} tokens of at most {self._max_tokens}")
        if (spans := choice.get("weight_versions")) is not None:
            self._labels = [LabelledSpan(str(s["version"]), int(s["start"]), int(s["end"])) for s in spans]
        self._finish = choice.get("finish_reason") or self._finish

    def _tokens(self, choice: dict[str, Any]) -> list[int]:
        found = choice["token_ids"] or []
        if not isinstance(found, list) or any(type(token) is not int for token in found):
            raise TypeError
        return found

    def _content(self, logprobs: Any) -> Iterable[tuple[int, float]]:
        """Tokens with their log-probabilities."""
        return ((entry["token_id"], entry["logprob"]) for entry in logprobs["content"])

    def labels(self) -> list[LabelledSpan]:
        """The engine's spans, which hold every token. Raises LocalError without spans, RemoteError for other tokens."""
        if self._labels is None:
            raise LocalError(NO_VERSIONS)
        at = 0
        for span in self._labels:
            if not at == span.start < span.end:
                raise RemoteError("the spans of the engine's weights leave out tokens, or overlap")
            at = span.end
        if at != len(self.token_ids):
            raise RemoteError(f"the engine's weights are known for {at} of {len(self.token_ids)} tokens")
        return self._labels

    def sample(self, named: Named) -> Sample:
        """Raises P2PCastError for an answer that is not whole, or not of the request."""
        stop = self._stop()
        spans = [named(label)._replace(start=start, end=end) for label, start, end in self.labels()]
        return Sample(self.token_ids, self._logprobs, spans, stop)

    def sample_of(self, span: Span) -> Sample:
        """As ``sample``, where one version made all tokens. ``span``: without place."""
        stop = self._stop()
        return Sample(self.token_ids, self._logprobs, [span._replace(start=0, end=len(self.token_ids))], stop)

    def _stop(self) -> Literal["end", "length"]:
        """Raises P2PCastError for an answer that is not whole, or not of the request."""
        if self._finish not in ("stop", "length"):
            raise RetryableError(f"the engine ended the request early ({self._finish or 'without a reason'})")
        if not 0 < len(self.token_ids) <= self._max_tokens:
            raise RemoteError(f"the engine sent {len(self.token_ids)} tokens of at most {self._max_tokens}")
        ended = self.token_ids[-1] in self._stop_token_ids
        if not ended and len(self.token_ids) < self._max_tokens:
            raise RemoteError("the engine ended the sample before its limit, and not after a stop token")
        return "end" if ended else "length"


def logprob(value: float) -> float:
    """Raises LocalError for a number that no sampling distribution gives."""
    if not math.isfinite(value) or value <= LOWEST_LOGPROB:
        raise RemoteError("the engine has no log-probability for a sampled token")
    if value > ROUNDING:
        raise LocalError(
            "the engine sends logits in place of log-probabilities: start it with --logprobs-mode processed_logprobs"
        )
    return min(value, 0.0)


def candidates(answer: Any) -> dict[int, float]:
    """Log-probabilities of the likeliest first tokens, from a whole answer to a probe. Raises P2PCastError."""
    try:
        first = answer["choices"][0]["logprobs"]["content"][0]
        return {int(entry["token_id"]): logprob(float(entry["logprob"])) for entry in [first, *first["top_logprobs"]]}
    except (KeyError, TypeError, ValueError, IndexError):
        raise RemoteError("the engine's answer is not in the form of vLLM's generate") from None


def logprobs_fault(cold: Mapping[int, float], hot: Mapping[int, float]) -> str | None:
    """Why the log-probabilities are not of the sampling distribution; None if they are. ``cold``, ``hot``: candidates
    of the two probes.
    """
    both = sorted(set(cold) & set(hot), key=lambda token: cold[token])
    if len(both) < 2 or (gap := cold[both[-1]] - cold[both[0]]) < FLAT:
        return None
    if hot[both[-1]] - hot[both[0]] < SAME_GAP * gap:
        return None
    return (
        "the engine's log-probabilities do not depend on the temperature, so they are not those of the sampling "
        "distribution: start it with --logprobs-mode processed_logprobs"
    )
