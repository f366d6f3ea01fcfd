"""Requests to an engine's sampling route, and the check of its log-probabilities, which is the same for every route.

Guarantee: a cancelled request is cancelled at the engine too, and a failure is one of p2pcast's errors, with advice.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import aiohttp
from aiohttp.http_exceptions import LineTooLong

from p2pcast.ground.errors import LocalError, P2PCastError, RemoteError, RetryableError
from rollout_node.worker.sampled_answer import (
    COLD,
    FAILURE,
    HOT,
    REFUSALS,
    EngineFailedError,
    PromptRefusedError,
    Route,
    logprobs_fault,
)

CONNECT_S: Final = 10.0
SILENT_S: Final = 300.0
"""Longest time in seconds between two tokens; the commit of a large model pauses the engine."""
PROBES: Final = 5
"""Number of pairs of probes at startup, because the weights may change between the two probes of a pair."""
PROBE_TOKEN: Final = 1
MAX_LINE_BYTES: Final = 1 << 20
"""Half of the longest line that is accepted, unless the caller gives a larger value."""
TOKEN_BYTES: Final = 64
"""Upper bound on the bytes of one token with its log-probability, in a line that contains a whole sample."""


def line_bytes(tokens: int) -> int:
    """Return the limit for a line with so many tokens, each with its log-probability."""
    return MAX_LINE_BYTES + TOKEN_BYTES * tokens


class EngineRequests:
    """``silent_s``: longest time without a byte of the answer. ``adapter``: the LoRA adapter that answers; None for the
    model without an adapter.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        engine: str,
        route: Route,
        silent_s: float = SILENT_S,
        adapter: str | None = None,
    ) -> None:
        self._http, self._engine, self._route, self._silent_s = http, engine, route, silent_s
        self._adapter = adapter
        self._url = engine.rstrip("/") + route.path

    async def whole(self, body: dict[str, Any], most_bytes: int = MAX_LINE_BYTES) -> Any:
        """Return the document of a one-line answer. Raises P2PCastError."""
        async for line in self._lines(body, most_bytes):
            return self._document(line)
        raise RemoteError(f"{self._engine} sent an empty answer")

    async def streamed(self, body: dict[str, Any], most_bytes: int = MAX_LINE_BYTES) -> AsyncIterator[Any]:
        """Yield the documents of a stream of server-sent events. Raises P2PCastError."""
        async for line in self._lines(body, most_bytes):
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield self._document(line[len(b"data: ") :])

    def _document(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise RemoteError(f"{self._engine} sent a line that is not JSON") from None

    async def _lines(self, body: dict[str, Any], most_bytes: int) -> AsyncIterator[bytes]:
        if self._adapter is not None:
            body = body | {"model": self._adapter}
        limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._silent_s)
        try:
            async with self._http.post(self._url, json=body, timeout=limit, read_bufsize=most_bytes) as answer:
                if answer.status != 200:
                    text = (await answer.content.read(2000)).decode(errors="replace")
                    if answer.status == 404 and self._adapter is not None and "does not exist" in text:
                        raise LocalError(
                            f"{self._engine} serves no adapter {self._adapter}: start vLLM with --enable-lora "
                            f"--lora-modules {self._adapter}=FOLDER"
                        )
                    raise _refusal(self._engine, self._route, answer.status, text)
                async for line in answer.content:
                    yield line
        except P2PCastError:
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RetryableError(f"{self._engine} does not answer ({type(error).__name__})") from None
        except (LineTooLong, ValueError):  # older releases of aiohttp raise ValueError
            raise RemoteError(f"{self._engine} sent a line of more than {2 * most_bytes} bytes") from None


async def checked(engine: str, route: Route, probe: Callable[[float], Awaitable[tuple[dict[int, float], str]]]) -> str:
    """Return the label of the engine's weights. ``probe``: returns the likeliest tokens' log-probabilities at a
    temperature, and the label. Raises LocalError unless the log-probabilities are those of the sampling distribution.
    """
    for _ in range(PROBES):
        cold, label = await probe(COLD)
        hot, hot_label = await probe(HOT)
        if label == hot_label:
            if (fault := logprobs_fault(cold, hot, route)) is not None:
                raise LocalError(f"{engine}: {fault}")
            return label
    raise RetryableError(f"{engine}: the weights changed during each of {PROBES} probes")


def _refusal(engine: str, route: Route, status: int, text: str) -> P2PCastError:
    if status == 403 and "scale-out" in text:
        return LocalError(f"{engine}: start vLLM with --enable-scale-out, which opens {route.path}")
    if status in (404, 405):
        return LocalError(f"{engine} has no {route.path}: {route.opened}")
    if status in (401, 403):
        return LocalError(f"{engine} refuses requests with status {status}: start it without --api-key")
    if status in REFUSALS:
        return PromptRefusedError(f"{engine} refused the request: {text[:300]}")
    kind = EngineFailedError if status == FAILURE else RetryableError
    return kind(f"{engine} answered {status}: {text[:300]}")
