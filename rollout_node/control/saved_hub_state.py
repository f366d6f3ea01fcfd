"""Facts from the hub's messages that a peer saves, so that it can start while the hub is unreachable.

Guarantees: the run's key is durable before the peer acts on it, and is accepted only if the token pins it. Everything
else is written soon after the message without delaying any version; only the newest value of each fact is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from p2pcast.artifact.signed_records import KEY_BYTES, run_id
from p2pcast.ground.errors import P2PCastError
from p2pcast.ground.version import Version
from p2pcast.process.daemon_process import StateFile

logger = logging.getLogger("p2pcast.peer")

Place = tuple[bytes, str, int]

SETTLE_S = 1.0
"""Seconds between a change and its write, so that a burst of plans costs one write. The hub repeats facts lost in a
crash.
"""

FACTS: dict[str, Any] = {
    "key": "",
    "commit": "auto",
    "target": None,
    "hold": None,
    "newest": None,
    "neighbourhood": None,
    "lead": None,
}


class SavedHubState:
    """``run``: the run's id. ``background`` starts a task of the peer; ``blocking`` runs a function in a thread. These
    tasks must finish before ``close``.
    """

    def __init__(
        self,
        memory: StateFile,
        run: bytes,
        background: Callable[[Coroutine[Any, Any, None], str], None],
        blocking: Callable[..., Awaitable[Any]],
    ) -> None:
        self._memory = memory
        self._run = run
        self._background = background
        self._blocking = blocking
        self._changed = self._closed = self._writing = False

    @property
    def key(self) -> bytes | None:
        """The run's public key, if it was saved and the token pins it."""
        try:
            key = bytes.fromhex(self._memory["key"])
        except (TypeError, ValueError):
            return None
        return key if len(key) == KEY_BYTES and run_id(key) == self._run else None

    async def keep_key(self, key: bytes) -> None:
        """Save the key; it is durable on return. Raises LocalError."""
        if self.key != key:
            await self._blocking(lambda: self._memory.update(key=key.hex()))

    @property
    def commit(self) -> str:
        """When engines switch according to the hub's last order: auto, manual or barrier."""
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
        """The newest version ever staged here, by this process or an earlier one."""
        return _version(self._memory["newest"])

    @property
    def neighbourhood(self) -> tuple[bytes, Place | None, list[Place], list[Place]] | None:
        """The hub's node, and the parent (None: the hub), backups and neighbours in the hub's last messages."""
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
        """The lead of the engine to which this peer belongs as a member."""
        try:
            return None if self._memory["lead"] is None else _place(self._memory["lead"])
        except (TypeError, ValueError):
            return None

    def keep_neighbourhood(
        self, hub: bytes, parent: Place | None, backups: list[Place], neighbours: list[Place]
    ) -> None:
        self.keep(
            neighbourhood={
                "hub": hub.hex(),
                "parent": None if parent is None else row(parent),
                "backups": [row(place) for place in backups],
                "neighbours": [row(place) for place in neighbours],
            }
        )

    def keep(self, **facts: Any) -> None:
        """Save facts, given as JSON values. They are written soon."""
        if all(self._memory[name] == value for name, value in facts.items()):
            return
        self._memory.facts |= facts
        self._changed = True
        if not self._closed and not self._writing:
            self._writing = True
            self._background(self._write(), "memory")

    async def keep_newest(self, version: Version, *, durable: bool) -> None:
        """Save the newest version: on disk on return if ``durable``, otherwise soon. Raises LocalError."""
        if durable:
            await self._blocking(lambda: self._memory.update(newest=str(version)))
        else:
            self.keep(newest=str(version))

    async def _write(self) -> None:
        try:
            while self._changed:
                await asyncio.sleep(SETTLE_S)
                self._changed = False
                await self._blocking(self._memory.update)
        except P2PCastError as error:
            # The next change writes this one too. A full disk stops the peer elsewhere.
            logger.warning("what the hub said is not kept for a start without it: %s", error)
        finally:
            self._writing = False

    def close(self) -> None:
        """Write whatever has not been written yet."""
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
