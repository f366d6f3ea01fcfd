"""Completion traffic for a running vLLM server, and the probes that check its weights.

Promises: each client sends one streamed request after the other, without a pause. A request with an error status, a
broken stream or too few tokens counts as failed. Probes run alone while the clients pause, since batches of another
size round differently.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

MODEL = "policy"
"""The model's name at the server."""
CLIENTS = 3
TOKENS = 48
"""Tokens of one streamed answer; with the prompt, fewer than the model's 64 positions."""
PROBES = ("17+25=", "40+59=", "33+48=", "61+12=", "28+36=", "55+44=")
PROBE_TOKENS = 12
REQUEST_S = 60.0
AFTER_FAILURE_S = 0.2
SHOWN_ERRORS = 5

Answer = dict[str, list[Any]]
"""``tokens`` and their ``logprobs``. The logprobs are floats that distinguish two versions even if both choose the same
tokens.
"""


@dataclass(slots=True)
class TrafficCounts:
    ok: int = 0
    failed: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)
    """The first few errors."""


def _one_off_connections(*, raise_for_status: bool = False) -> aiohttp.ClientSession:
    """A connection for each request. vLLM closes connections that are idle for 5 s, and a request that meets such an
    end fails, whatever the weights do.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True),
        raise_for_status=raise_for_status,
        timeout=aiohttp.ClientTimeout(total=REQUEST_S),
    )


class Traffic:
    """Runs until ``stop``. ``run`` owns the clients."""

    def __init__(self, url: str, clients: int = CLIENTS, tokens: int = TOKENS) -> None:
        self._url, self._clients, self._tokens = url.rstrip("/"), clients, tokens
        self.counts = TrafficCounts()
        self.gaps: list[tuple[int, float, float]] = []
        """Client number → gaps between consecutive pieces of one answer, as (start, end) by ``time.monotonic``. A piece
        is one token unless the client reads slowly.
        """
        self.salt: str | None = None
        """Cache salt of new requests: the server shares cached blocks only among requests with the same salt."""
        self._stopped = False
        self._open = asyncio.Event()
        self._open.set()
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended = asyncio.Condition()

    async def run(self) -> None:
        async with (
            _one_off_connections() as http,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._clients):
                group.create_task(self._client(http, number), name=f"client {number}")

    def stop(self) -> None:
        """End each client after its current request."""
        self._stopped = True
        self._open.set()

    @contextlib.asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """Pause the clients while the block runs; no request is active then."""
        self._open.clear()
        try:
            await self._idle.wait()
            yield
        finally:
            self._open.set()

    async def ended(self, requests: int) -> None:
        """Return when ``requests`` further requests have ended, successfully or not."""
        last = self.counts.ok + self.counts.failed + requests
        async with self._ended:
            await self._ended.wait_for(lambda: self.counts.ok + self.counts.failed >= last)

    async def probe(self, prompts: Sequence[str] = PROBES) -> list[Answer]:
        """Greedy answers, one prompt at a time. Raises aiohttp.ClientError, TimeoutError."""
        body = {
            "model": MODEL,
            "max_tokens": PROBE_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            **self._salted(),
        }
        found = []
        async with _one_off_connections(raise_for_status=True) as http:
            for prompt in prompts:
                async with http.post(
                    f"{self._url}/v1/completions", json=body | {"prompt": prompt, "return_token_ids": True}
                ) as response:
                    choice = (await response.json())["choices"][0]
                found.append({"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]})
        return found

    async def _client(self, http: aiohttp.ClientSession, number: int) -> None:
        chance = random.Random(number)
        while not self._stopped:
            await self._open.wait()
            self._under_way += 1
            self._idle.clear()
            failed = None
            try:
                first = chance.randrange(10, 90)
                await self._stream(http, number, f"{first}+{chance.randrange(10, 100 - first)}=")
                self.counts.ok += 1
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, IndexError) as error:
                failed = f"{type(error).__name__}: {error}"
                self.counts.failed += 1
                if len(self.counts.errors) < SHOWN_ERRORS:
                    self.counts.errors.append(failed)
            finally:
                self._under_way -= 1
                if not self._under_way:
                    self._idle.set()
                async with self._ended:
                    self._ended.notify_all()
            if failed is not None:
                await asyncio.sleep(AFTER_FAILURE_S)

    async def _stream(self, http: aiohttp.ClientSession, number: int, prompt: str) -> None:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": self._tokens,
            "temperature": 1,
            "ignore_eos": True,
            "stream": True,
            **self._salted(),
        }
        tokens, ended, last_s = 0, False, None
        async with http.post(
            f"{self._url}/v1/completions", json=body | {"stream_options": {"include_usage": True}}
        ) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                text = line.decode().strip()
                if text == "data: [DONE]":
                    ended = True
                elif text.startswith("data: "):
                    piece = json.loads(text[6:])
                    tokens = (piece.get("usage") or {}).get("completion_tokens", tokens)
                    if piece["choices"]:
                        now_s = time.monotonic()
                        if last_s is not None:
                            self.gaps.append((number, last_s, now_s))
                        last_s = now_s
        self.counts.tokens += tokens
        if not ended or tokens != self._tokens:
            raise ValueError(f"the stream ended after {tokens} of {self._tokens} tokens")

    def _salted(self) -> dict[str, str]:
        return {} if self.salt is None else {"cache_salt": self.salt}
