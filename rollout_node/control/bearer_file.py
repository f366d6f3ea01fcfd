"""The bearer token of the peer's HTTP server, and the file from which local commands read it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from p2pcast.files.atomic_files import atomic_write
from p2pcast.trust import bearer_tokens


class BearerFile:
    """``blocking`` runs a function in a thread; ``background`` starts a task of the peer."""

    def __init__(
        self,
        token: str,
        state: Path,
        blocking: Callable[..., Awaitable[None]],
        background: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:
        self.token = token
        self._path = state / bearer_tokens.FILE
        self._blocking = blocking
        self._background = background
        self._accept: Callable[[str], None] | None = None

    def write(self) -> None:
        """Write the token to the file. Blocks. Raises LocalError."""
        atomic_write(self._path, f"{self.token}\n".encode(), 0o600)

    def serve(self, accept: Callable[[str], None]) -> None:
        """From now on, pass each new token to ``accept``, the HTTP server, and write it to the file."""
        self._accept = accept

    def replace(self, token: str) -> None:
        """Use the token that the hub assigned to this peer."""
        if token == self.token:
            return
        self.token = token
        if self._accept is not None:
            self._accept(token)
            self._background(self._rewrite(), "bearer")

    async def _rewrite(self) -> None:
        await self._blocking(self.write)
