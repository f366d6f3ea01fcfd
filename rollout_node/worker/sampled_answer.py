"""An engine's answer to a sampling request, and its log-probabilities, independent of the route. It does no I/O.

Spans are the engine's ``weight_versions``. An answer without them is refused, because a client cannot know when the
weights changed. Guarantee: a malformed document raises one of p2pcast's errors, whatever it contains.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple

from p2pcast.ground.errors import LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.rollouts.result import Span
from p2pcast.tasks.task import Sample

LOWEST_LOGPROB: Final = -9000.0
"""If it has no log-probability, vLLM writes -9999, and SGLang the lowest finite float."""
ROUNDING: Final = 1e-4
"""A log-probability that exceeds 0 by at most this is rounded to 0."""
COLD, HOT = 0.5, 2.0
"""Temperatures of the two probes; vLLM accepts none above 2."""
CANDIDATES: Final = 5
"""Number of a probe's likeliest tokens whose log-probabilities are compared."""
SAME_GAP: Final = 0.5
"""From the first probe to the second, gaps between log-probabilities shrink by the factor ``COLD / HOT`` if they belong
to the sampling distribution; otherwise they stay the same. This threshold lies between the two.
"""
FLAT: Final = 1e-3
"""A gap below this is too small to tell."""
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""Raised by reading a malformed document."""
REFUSALS: Final = frozenset({400, 413, 422})
"""HTTP status codes with which an engine refuses a request."""
FAILURE: Final = 500
"""HTTP status code with which an engine fails at a request."""


class PromptRefusedError(RemoteError):
    """The engine refused a request because of its contents."""


class EngineFailedError(RetryableError):
    """The engine answered the request with an internal error."""


Named = Callable[[str], Span]
"""Maps a label of the engine's weights to a span without position."""


class Route(NamedTuple):
    """An engine's sampling route, and the advice for its user if the engine is missing something. ``needed``: the
    release that supports everything. ``opened``: the release, with the options that open the route. ``processed``: how
    to get log-probabilities of the sampling distribution.
    """

    path: str
    needed: str
    opened: str
    processed: str


class LabelledSpan(NamedTuple):
    label: str
    start: int
    end: int


class SampledAnswer(ABC):
    """Collects the parts of one answer, streamed or complete."""

    route: ClassVar[Route]

    def __init__(self, stop_token_ids: Sequence[int], max_tokens: int) -> None:
        self.token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._labels: list[LabelledSpan] | None = None
        self._finish: str | None = None
        self._stop_token_ids, self._max_tokens = stop_token_ids, max_tokens

    def add(self, part: Any) -> None:
        """Add one JSON document from the engine. Raises P2PCastError."""
        if isinstance(part, dict) and part.get("error") is not None:
            raise self._failure(part["error"])
        try:
            self._read(part)
        except MALFORMED:
            raise RemoteError(f"the engine's answer is not in the form of {self.route.path}") from None

    async def read(self, parts: AsyncIterator[Any], on_tokens: Callable[[int], None]) -> None:
        """Read all parts of a stream, and call ``on_tokens`` with the number of tokens in each. Raises P2PCastError."""
        reported = len(self.token_ids)
        async for part in parts:
            self.add(part)
            if len(self.token_ids) > reported:
                on_tokens(len(self.token_ids) - reported)
                reported = len(self.token_ids)

    @abstractmethod
    def _read(self, part: Any) -> None:
        """Read one document. Raises P2PCastError, or one of ``MALFORMED``."""

    def _failure(self, error: Any) -> P2PCastError:
        """Convert the engine's error object. Its ``code`` is an HTTP status, even if the response itself was a 200."""
        code = error.get("code") if isinstance(error, dict) else None
        text = str(error.get("message") if isinstance(error, dict) else error)[:300]
        if code in REFUSALS:
            return PromptRefusedError(f"the engine refused the request: {text}")
        kind = EngineFailedError if code == FAILURE else RetryableError
        return kind(f"the engine ended the request early (abort: {text})")

    def _take(self, token_ids: list[int], content: Sequence[tuple[int, float]] | None) -> None:
        """Add new tokens. ``content``: tokens with their log-probabilities; None if there are none."""
        if token_ids:
            if content is None:
                raise RemoteError("the engine sent no log-probabilities")
            if [token for token, _ in content] != token_ids:
                raise RemoteError("the engine's log-probabilities are not those of its tokens")
            self._logprobs += [logprob(float(value), self.route) for _, value in content]
        self.token_ids += token_ids
        if len(self.token_ids) > self._max_tokens:
            raise RemoteError(f"the engine sent {len(self.token_ids)} tokens of at most {self._max_tokens}")

    def labels(self) -> list[LabelledSpan]:
        """Return the engine's spans, which cover every token. Raises RemoteError if they do not. Without spans, raises
        RetryableError if the answer is incomplete, otherwise LocalError.
        """
        if self._labels is None:
            self._check_end()
            raise LocalError(f"the engine does not say which weights made its tokens: {self.route.needed}")
        at = 0
        for span in self._labels:
            if not at == span.start < span.end:
                raise RemoteError("the spans of the engine's weights leave out tokens, or overlap")
            at = span.end
        if at != len(self.token_ids):
            raise RemoteError(f"the engine's weights are known for {at} of {len(self.token_ids)} tokens")
        return self._labels

    def sample(self, named: Named) -> Sample:
        """Return the sample. Raises P2PCastError if the answer is incomplete or does not fit the request."""
        stop = self._stop()
        spans = [named(label)._replace(start=start, end=end) for label, start, end in self.labels()]
        return Sample(self.token_ids, self._logprobs, spans, stop)

    def sample_of(self, span: Span) -> Sample:
        """Like ``sample``, if one version made all tokens. ``span`` has no position."""
        stop = self._stop()
        return Sample(self.token_ids, self._logprobs, [span._replace(start=0, end=len(self.token_ids))], stop)

    def _stop(self) -> Literal["end", "length"]:
        """Return why sampling stopped. Raises P2PCastError if the answer is incomplete or does not fit the request."""
        self._check_end()
        if not 0 < len(self.token_ids) <= self._max_tokens:
            raise RemoteError(f"the engine sent {len(self.token_ids)} tokens of at most {self._max_tokens}")
        ended = self.token_ids[-1] in self._stop_token_ids
        if not ended and len(self.token_ids) < self._max_tokens:
            if self._finish == "length":
                # vLLM accepts such a request, and stops the sample at the model's maximum length.
                raise PromptRefusedError(
                    f"the engine has room for {len(self.token_ids)} of the {self._max_tokens} tokens after the prompt: "
                    "start it with a larger --max-model-len, or ask for fewer"
                )
            raise RemoteError("the engine ended the sample before its limit, and not after a stop token")
        return "end" if ended else "length"

    def _check_end(self) -> None:
        if self._finish not in ("stop", "length"):
            raise RetryableError(f"the engine ended the request early ({self._finish or 'without a reason'})")


def ids(found: Any) -> list[int]:
    """Return a list of token ids, which is empty for None. Raises TypeError."""
    found = [] if found is None else found
    if not isinstance(found, list) or any(type(token) is not int for token in found):
        raise TypeError
    return found


def logprob(value: float, route: Route) -> float:
    """Check and clamp a log-probability. Raises P2PCastError for a number that no sampling distribution gives."""
    if not math.isfinite(value) or value <= LOWEST_LOGPROB:
        raise RemoteError("the engine has no log-probability for a sampled token")
    if value > ROUNDING:
        raise LocalError(f"the engine sends logits in place of log-probabilities: {route.processed}")
    return min(value, 0.0)


def logprobs_fault(cold: Mapping[int, float], hot: Mapping[int, float], route: Route) -> str | None:
    """Why the log-probabilities are not those of the sampling distribution; None if they are. ``cold``, ``hot``: the
    candidates of the two probes.
    """
    both = sorted(set(cold) & set(hot), key=lambda token: cold[token])
    if len(both) < 2 or (gap := cold[both[-1]] - cold[both[0]]) < FLAT:
        return None
    if hot[both[-1]] - hot[both[0]] < SAME_GAP * gap:
        return None
    return (
        "the engine's log-probabilities do not depend on the temperature, so they are not those of the sampling "
        f"distribution: {route.processed}"
    )
