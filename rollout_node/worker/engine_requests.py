"""Requests to an engine's sampling route, and the check of its log-probabilities; the same for every route.

Promise: a cancelled request ends at the engine too; a failure is one of our errors, with what to do.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import aiohttp

from p2pcast.errors import LocalError, P2PCastError, RemoteError, RetryableError
from rollout_node.worker import generate_form
from rollout_node.worker.generate_form import COLD, HOT

CONNECT_S: Final = 10.0
SILENT_S: Final = 300.0
"""Longest time in seconds between two tokens: a commit of a large model pauses the engine."""
PROBES: Final = 5
"""Pairs of probes at the start, in case the weights change between the two of a pair."""
PROBE_TOKEN: Final = 1
MAX_LINE_BYTES: Final = 1 << 20


class EngineRequests:
    """``silent_s``: longest time without a byte of an answer."""

    def __init__(self, http: aiohttp.ClientSession, engine: str, path: str, silent_s: float = SILENT_S) -> None:
        self._http, self._engine, self._path, self._silent_s = http, engine, path, silent_s
        self._url = engine.rstrip("/") + path

    async def whole(self, body: dict[str, Any]) -> Any:
        """The document of an answer in one line. Raises P2PCastError."""
        async for line in self._lines(body):
            return self._document(line)
        raise RemoteError(f"{self._engine} sent an empty answer")

    async def streamed(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        """The documents of a stream of server-sent events. Raises P2PCastError."""
        async for line in self._lines(body):
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield self._document(line[len(b"data: ") :])

    def _document(self, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise RemoteError(f"{self._engine} sent a line that is not JSON") from None

    async def _lines(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._silent_s)
        try:
            async with self._http.post(self._url, json=body, timeout=limit, read_bufsize=MAX_LINE_BYTES) as answer:
                if answer.status != 200:
                    text = (await answer.content.read(2000)).decode(errors="replace")
                    raise _refusal(self._engine, self._path, answer.status, text)
                async for line in answer.content:
                    yield line
        except P2PCastError:
            raise
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RetryableError(f"{self._engine} does not answer ({type(error).__name__})") from None


async def checked(engine: str, probe: Callable[[float], Awaitable[tuple[dict[int, float], str]]]) -> str:
    """The label of the engine's weights. ``probe``: log-probabilities of the likeliest tokens at a temperature, and the
    label. Raises LocalError unless the log-probabilities are those of the sampling distribution.
    """
    for _ in range(PROBES):
        cold, label = await probe(COLD)
        hot, hot_label = await probe(HOT)
        if label == hot_label:
            if (fault := generate_form.logprobs_fault(cold, hot)) is not None:
                raise LocalError(f"{engine}: {fault}")
            return label
    raise RetryableError(f"{engine}: the weights changed during each of {PROBES} probes")


def _refusal(engine: str, path: str, status: int, text: str) -> P2PCastError:
    if status == 403 and "scale-out" in text:
        return LocalError(f"{engine}: start vLLM with --enable-scale-out, which opens {path}")
    if status in (404, 405):
        needed = "vLLM 0.32 or newer is needed"
        if path == generate_form.PATH:
            needed += ", started with --enable-scale-out"
        return LocalError(f"{engine} has no {path}: {needed}")
    if status in (401, 403):
        return LocalError(f"{engine} refuses requests with status {status}: start it without --api-key")
    if status in (400, 413, 422):
        return RemoteError(f"{engine} refused the request: {text[:300]}")
    return RetryableError(f"{engine} answered {status}: {text[:300]}")
