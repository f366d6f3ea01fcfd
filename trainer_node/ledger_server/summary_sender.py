"""Sends the ledger's summary to the hub, which shows it under ``rollouts``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp

from p2pcast.errors import RetryableError

SEND_S = 1.0
"""Interval between two summaries, in seconds."""
ANSWER_S = 10.0


class SummarySender:
    """``hub``: base URL of the hub's HTTP server; ``bearer``: its token."""

    def __init__(
        self, http: aiohttp.ClientSession, hub: str, bearer: str, summary: Callable[[], dict[str, Any]]
    ) -> None:
        self._http, self._url = http, f"{hub.rstrip('/')}/rollouts"
        self._headers = {"Authorization": f"Bearer {bearer}"}
        self._summary = summary

    async def send(self) -> None:
        """Raises RetryableError."""
        try:
            limit = aiohttp.ClientTimeout(total=ANSWER_S)
            async with self._http.post(self._url, json=self._summary(), headers=self._headers, timeout=limit) as answer:
                if answer.status != 200:
                    raise RetryableError(f"{self._url} answered with status {answer.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RetryableError(f"{self._url} does not answer ({type(error).__name__})") from None
