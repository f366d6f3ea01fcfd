"""Sends the ledger's summary to the hub, which shows it under ``rollouts`` and answers with orders about workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from p2pcast.ground import limits
from p2pcast.ground.errors import RemoteError, RetryableError

SEND_S = 1.0
"""Interval between two summaries, in seconds."""
ANSWER_S = 10.0
MAX_ANSWER_BYTES = 64 * limits.KIB


class SummarySender:
    """``hub``: base URL of the hub's HTTP server; ``bearer``: its token. ``ordered``: gets the orders of each
    answer.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        hub: str,
        bearer: str,
        summary: Callable[[], dict[str, Any]],
        ordered: Callable[[Any], Awaitable[None]],
    ) -> None:
        self._http, self._url = http, f"{hub.rstrip('/')}/rollouts"
        self._headers = {"Authorization": f"Bearer {bearer}"}
        self._summary, self._ordered = summary, ordered

    async def send(self) -> None:
        """Raises RetryableError, RemoteError."""
        try:
            limit = aiohttp.ClientTimeout(total=ANSWER_S)
            async with self._http.post(self._url, json=self._summary(), headers=self._headers, timeout=limit) as answer:
                if answer.status != 200:
                    raise RetryableError(f"{self._url} answered with status {answer.status}")
                if (answer.content_length or 0) > MAX_ANSWER_BYTES:
                    raise RemoteError(f"the answer of {self._url} is larger than {MAX_ANSWER_BYTES} bytes")
                found = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RetryableError(f"{self._url} does not answer ({type(error).__name__})") from None
        except ValueError:
            raise RemoteError(f"the answer of {self._url} is not JSON") from None
        if isinstance(found, dict):
            await self._ordered(found.get("drains"))
