"""Passes a link dialled by another node to the right part: a child to the downstream, a parent to the connector, a
member to the engine's lead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from p2pcast.ground.errors import RefusedError, RemoteError, RetryableError
from p2pcast.relay.downstream import Downstream
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.wire import messages
from p2pcast.wire.connection import PARENT


class Receiver(Protocol):
    def accept(self, link: Link, hello: messages.Hello) -> None: ...


@dataclass(frozen=True, slots=True)
class Receivers:
    """``lead``: None if this peer leads no engine. ``links``: returns all links that carry versions."""

    downstream: Downstream
    connector: Receiver
    lead: Receiver | None
    links: Callable[[], Iterable[Link]]


class PeerLinkAcceptor(QuietOwner):
    """An ``Acceptor``. Until ``begin``, it turns away links for versions."""

    def __init__(self) -> None:
        self._receivers: Receivers | None = None

    def begin(self, receivers: Receivers) -> None:
        self._receivers = receivers

    def links(self) -> Iterable[Link]:
        return () if self._receivers is None else self._receivers.links()

    def accept_link(self, link: Link, hello: messages.Hello) -> None:
        """Pass on the link. Raises RefusedError, RemoteError, RetryableError."""
        receivers = self._receivers
        if hello.purpose == "engine":
            if receivers is None or receivers.lead is None:
                raise RefusedError("this peer leads no engine")
            receivers.lead.accept(link, hello)
            return
        if hello.purpose != "data":
            raise RemoteError("a peer has no control connections; dial the hub")
        if receivers is None:
            raise RetryableError("not joined yet")
        if hello.role == PARENT:
            receivers.connector.accept(link, hello)
            return
        link.owner = receivers.downstream
        receivers.downstream.accept(link)
