"""Passes each of the hub's messages to its handler.

Guarantee: messages for parts of the peer that do not exist yet are kept in order until they do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from p2pcast.ground.errors import RefusedError
from p2pcast.wire.connection import Message
from p2pcast.wire.dispatch import Handlers, dispatch
from p2pcast.wire.messages import Record

logger = logging.getLogger("p2pcast.peer")


class Dispatcher:
    """A ``HubSessionOwner``. ``handlers`` are used from the start; ``begin`` adds the others once the peer is built.
    Messages without a handler are then ignored.
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
        """Messages for handlers that do not exist yet; None once all handlers exist."""

    def begin(self, handlers: Handlers) -> None:
        self._handlers |= handlers
        early, self._early = self._early or [], None
        for record in early:
            self.on_hub_message(record)

    def on_hub_message(self, record: Record) -> None:
        if not dispatch(self._handlers, Message(record.type, record)) and self._early is not None:
            self._early.append(record)

    def on_hub_lost(self) -> None:
        self._on_lost()
        logger.warning("the hub is out of reach; going on with what the swarm has")

    def on_hub_refused(self, error: RefusedError) -> None:
        self._on_refused(error)
