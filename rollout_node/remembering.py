"""What a peer keeps of the hub's word, for a start while the hub is away.

Promises: the run's key is durable before the peer acts on it, and counts only where the token pins it; everything else is written soon after it was said,
off the path of a version, the newest word of each kind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from p2pcast.artifact.records import KEY_BYTES, run_id
from p2pcast.daemon import Memory
from p2pcast.errors import P2PCastError
from p2pcast.version import Version

logger = logging.getLogger("p2pcast.peer")

Place = tuple[bytes, str, int]

SETTLE_S = 1.0
"""Between a change and its write: a burst of plans costs one write. What a crash loses of it is told again by the hub."""

FACTS: dict[str, Any] = {
    "key": "",
    "commit": "auto",
    "target": None,
    "hold": None,
    "newest": None,
    "neighbourhood": None,
    "lead": None,
}


class Remembering:
    """``later`` starts a task of the peer's, ``blocking`` runs a function in a thread. ``close`` once those tasks have ended."""

    def __init__(
        self,
        memory: Memory,
        run: bytes,
        later: Callable[[Coroutine[Any, Any, None], str], None],
        blocking: Callable[..., Awaitable[Any]],
    ) -> None:
        self._memory = memory
        self._run = run
        self._later = later
        self._blocking = blocking
        self._changed = self._closed = self._writing = False

    @property
    def key(self) -> bytes | None:
        """The run's public key, if it was learnt before and is the one that the token pins."""
        try:
            key = bytes.fromhex(self._memory["key"])
        except (TypeError, ValueError):
            return None
        return key if len(key) == KEY_BYTES and run_id(key) == self._run else None

    async def keep_key(self, key: bytes) -> None:
        """Durable when it returns. Raises LocalError."""
        if self.key != key:
            await self._blocking(lambda: self._memory.update(key=key.hex()))

    @property
    def commit(self) -> str:
        """When engines switch, by the hub's last word: auto, manual or barrier."""
        known = self._memory["commit"]
        return known if known in ("auto", "manual", "barrier") else "auto"

    @property
    def target(self) -> Version | None:
        return _version(self._memory["target"])

    @property
    def hold(self) -> Version | None:
        return _version(self._memory["hold"])

    @property
    def newest(self) -> Version | None:
        """The newest version that was staged here, by this process or an earlier one."""
        return _version(self._memory["newest"])

    @property
    def neighbourhood(self) -> tuple[bytes, Place | None, list[Place], list[Place]] | None:
        """The hub's node, the parent (None: the hub), backups and neighbours, by the hub's last word."""
        kept = self._memory["neighbourhood"]
        try:
            return (
                bytes.fromhex(kept["hub"]),
                None if kept["parent"] is None else _place(kept["parent"]),
                [_place(row) for row in kept["backups"]],
                [_place(row) for row in kept["neighbours"]],
            )
        except (TypeError, KeyError, ValueError):
            return None

    @property
    def lead(self) -> Place | None:
        """Where the lead of the engine is of which this peer is a member."""
        try:
            return None if self._memory["lead"] is None else _place(self._memory["lead"])
        except (TypeError, ValueError):
            return None

    def keep_neighbourhood(self, hub: bytes, parent: Place | None, backups: list[Place], neighbours: list[Place]) -> None:
        self.keep(
            neighbourhood={
                "hub": hub.hex(),
                "parent": None if parent is None else row(parent),
                "backups": [row(place) for place in backups],
                "neighbours": [row(place) for place in neighbours],
            }
        )

    def keep(self, **facts: Any) -> None:
        """Facts as JSON has them. Written soon."""
        if all(self._memory[name] == value for name, value in facts.items()):
            return
        self._memory.facts |= facts
        self._changed = True
        if not self._closed and not self._writing:
            self._writing = True
            self._later(self._write(), "memory")

    async def _write(self) -> None:
        try:
            while self._changed:
                await asyncio.sleep(SETTLE_S)
                self._changed = False
                await self._blocking(self._memory.update)
        except P2PCastError as error:
            # Told again by the hub, and written with the next change; a disk that is full ends the peer elsewhere.
            logger.warning("what the hub said is not kept for a start without it: %s", error)
        finally:
            self._writing = False

    def close(self) -> None:
        """Write what has not been written yet."""
        self._closed = True
        if self._changed:
            try:
                self._memory.update()
            except P2PCastError as error:
                logger.warning("what the hub said is not kept for a start without it: %s", error)


def _version(kept: object) -> Version | None:
    try:
        return None if kept is None else Version.parse(str(kept))
    except P2PCastError:
        return None


def _place(row: Any) -> Place:
    node, host, port = row
    return bytes.fromhex(node), str(host), int(port)


def row(place: Place) -> list[Any]:
    return [place[0].hex(), place[1], place[2]]
