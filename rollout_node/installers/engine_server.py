"""An inference engine's server, as an installer uses it, and the HTTP requests that all kinds of server share.

Guarantees: every request has a deadline, and a failed request raises one of p2pcast's errors, with advice. It is a
RetryableError if the server is down, dying or too slow, and a LocalError if the server was not started for p2pcast.
Nothing here makes decisions.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import aiohttp

from p2pcast.ground.errors import LocalError, RetryableError
from rollout_node.installers.install_state import ServerAwayError


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Time limits in seconds:
    - ``request``: one command, which waits for the current step; a prefill may take long.
    - ``init``: learning the mapping.
    - ``prepare``: staging.
    - ``dense``: writing a whole model while the engine is paused.
    - ``undo``: restoring the previous version.
    - ``report``: reports that ranks sent before the server answered.
    - ``drain``: running requests finishing, with the safe point ``drain``.
    """

    request: float = 120.0
    init: float = 300.0
    prepare: float = 300.0
    commit: float = 60.0
    dense: float = 1800.0
    undo: float = 30.0
    report: float = 10.0
    drain: float = 600.0


class EngineServer(ABC):
    """``name`` starts its error messages; it defaults to the install target."""

    target: ClassVar[str]
    """The kind of install target."""
    kind: ClassVar[str]
    """The engine's name, for error messages."""
    hint: ClassVar[str]
    """Advice to a user whose server does not have a route."""

    def __init__(self, url: str, name: str | None = None, deadlines: Deadlines | None = None) -> None:
        self.url, self.name = url.rstrip("/"), name or f"{self.target}:{url}"
        self.deadlines = deadlines or Deadlines()
        self._http: aiohttp.ClientSession | None = None

    def open(self) -> None:
        if self._http is None:
            # One connection per command: the server closes idle connections, and would lose a command sent just then.
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    # -- queries

    async def health(self) -> None:
        await self._get("/health")

    async def answer(self, deadline_s: float) -> None:
        """Wait for the front end's answer, which comes even while the engine computes."""
        await self._request("GET", "/health", None, deadline_s)

    @abstractmethod
    async def world_size(self) -> int:
        """Number of ranks, over all kinds of parallelism."""

    @abstractmethod
    async def label(self) -> str:
        """The version that the server includes in its answers; ``none`` before the first install. Asks the engine, not
        the ranks.
        """

    @abstractmethod
    async def is_paused(self) -> bool: ...

    @abstractmethod
    async def cached_tokens(self) -> int | None:
        """Tokens in the blocks held by running requests; None if unknown."""

    # -- commands

    @abstractmethod
    async def pause(self, *, clear_cache: bool) -> None:
        """Stop scheduling. Running requests stay; with ``clear_cache``, their tokens are recomputed later."""

    @abstractmethod
    async def drain(self, deadline_s: float) -> None:
        """Hold new requests, and return once the running ones have finished. Caches stay. If the caller goes away, the
        server continues to drain until ``resume``.
        """

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def clear_caches(self) -> None:
        """Clear the caches that ``pause`` clears, while another process's pause is in effect."""

    @abstractmethod
    async def set_label(self, version: str) -> None: ...

    @abstractmethod
    async def init(self, info: dict[str, Any]) -> None:
        """Send an ``Introduction`` to every rank."""

    @abstractmethod
    async def begin(self) -> None:
        """Open a command session."""

    @abstractmethod
    async def update(self, info: dict[str, Any], deadline_s: float) -> None:
        """Send a ``Command`` to every rank."""

    @abstractmethod
    async def switch(
        self, order: dict[str, Any], deadline_s: float
    ) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
        """Pause, commit and resume in one command. Returns the ranks' reports and the engine's own."""

    @abstractmethod
    async def finish(self) -> None:
        """Make a commit permanent and close the session."""

    # -- HTTP

    async def _get(self, path: str) -> Any:
        text = await self._request("GET", path, None, self.deadlines.request)
        try:
            return json.loads(text) if text else None
        except ValueError:
            raise LocalError(f"{self.name}: GET {path}: not JSON; is this a {self.kind} server?") from None

    async def _post(self, path: str, body: dict[str, Any] | None = None, deadline_s: float | None = None) -> None:
        await self._request("POST", path, body, deadline_s or self.deadlines.request)

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float) -> str:
        if self._http is None:
            raise LocalError(f"{self.name}: not started")
        where = f"{self.name}: {method} {path.split('?')[0]}"
        try:
            timeout = aiohttp.ClientTimeout(total=deadline_s)
            async with self._http.request(method, self.url + path, json=body, timeout=timeout) as response:
                text = await response.text()
                if response.status == 200:
                    return text
        except aiohttp.ClientConnectorError as error:
            raise ServerAwayError(f"{where}: {error}; is the server up?") from None
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            reason = str(error) or f"no answer within {deadline_s:g} s"
            raise RetryableError(f"{where}: {reason}; is the server up?") from None
        if response.status >= 500:
            raise RetryableError(f"{where}: status {response.status}: {text[:300]}; see the server's log")
        hint = f"; {self.hint}" if response.status == 404 else ""
        raise LocalError(f"{where}: status {response.status}: {text[:300]}{hint}")
