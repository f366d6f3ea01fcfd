"""Passes each of the hub's messages to its handler.

Promise: messages that need parts of the peer that do not exist yet are kept in order until these parts do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from p2pcast.ground.errors import RefusedError
from p2pcast.wire.messages import Record

logger = logging.getLogger("p2pcast.peer")

Handler = Callable[[Any], None]
Handlers = Mapping[type[Record], Handler]
"""Each takes the records of its class."""


class Dispatcher:
    """A ``HubSessionOwner``. ``handlers`` serve from the start; ``begin`` adds the others, once the peer is built.
    A message without a handler is ignored.
    """

    def __init__(
        self,
        handlers: Handlers,
        on_refused: Callable[[RefusedError], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._handlers = dict(handlers)
        self._on_refused = on_refused
        self._on_lost = on_lost
        self._early: list[Record] | None = []
        """Messages for handlers that do not exist yet; None once all of them do."""

    def begin(self, handlers: Handlers) -> None:
        self._handlers |= handlers
        early, self._early = self._early or [], None
        for record in early:
            self.on_hub_message(record)

    def on_hub_message(self, record: Record) -> None:
        handler = self._handlers.get(type(record))
        if handler is not None:
            handler(record)
        elif self._early is not None:
            self._early.append(record)

    def on_hub_lost(self) -> None:
        self._on_lost()
        logger.warning("the hub is out of reach; going on with what the swarm has")

    def on_hub_refused(self, error: RefusedError) -> None:
        self._on_refused(error)
