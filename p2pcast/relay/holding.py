"""What a node holds of an artifact, and where the rest of it comes from."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from p2pcast.artifact.assembly import Assembly
from p2pcast.artifact.records import Open
from p2pcast.errors import P2PCastError
from p2pcast.relay.artifact import Artifact
from p2pcast.relay.pieces import PieceSet
from p2pcast.store.log import Log

if TYPE_CHECKING:
    from p2pcast.relay.upstream import Upstream


class Sender(Protocol):
    """Where an artifact comes from that is no parent: it ends by itself what it began."""

    live: bool

    def pushes(self, artifact: bytes) -> bool: ...


@dataclass(slots=True, eq=False)
class Holding:
    """An artifact in this node. ``stored``: pieces that are in the log; ``artifact.held``: pieces that are verified."""

    artifact: Artifact
    log: Log
    stored: PieceSet = field(default_factory=PieceSet)
    source: Upstream | Sender | None = None
    """The parent that sends it, while it is incomplete; None while it is pulled."""
    made: bool = False
    """It is made here, and so nobody sends it."""
    finished: bool = False
    """``on_complete`` was called."""
    progress: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever more of it can be decoded, or it is whole, or it was aborted: who stages it waits here."""
    aborted: bool = False
    idle: bool = False
    """An earlier process received a part of it; whether the rest is needed is not known yet. Nobody is offered it, and nobody asked for it."""
    excerpt: bool = False
    """Some of its pieces are fetched, for whoever asked for them: it never becomes whole, leads nowhere, and nobody is offered it."""
    had_bytes: int = 0
    """Of it, by that earlier process."""
    confirmed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the hub is known to hold its version on its disk (``Assembly.confirmed``), or once it was aborted."""
    durable: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the owner once it is sealed in the store, or once it was aborted, or its sealing failed."""
    unsealed: P2PCastError | None = None
    """Why this artifact will never be durable."""
    proof: asyncio.Future[bool] | None = None
    """Of one that is made here: whether it decodes to what its manifest says. Until that is known it is not sealed in the store."""
    opened_at: float = 0.0
    completed_at: float | None = None

    async def until_durable(self) -> None:
        """Raises what sealing it failed with."""
        await self.durable.wait()
        if self.unsealed is not None:
            raise self.unsealed

    def not_sealed(self, error: P2PCastError) -> None:
        """Sealing failed: whoever waits for it is told."""
        self.unsealed = error
        self.durable.set()

    def end(self) -> None:
        """It was aborted, or given up: whoever waits for more of it is woken, and looks at ``aborted``."""
        self.aborted = True
        for waited_for in (self.progress, self.confirmed, self.durable):
            waited_for.set()

    @property
    def open(self) -> Open:
        return self.artifact.open

    @property
    def assembly(self) -> Assembly:
        return self.artifact.assembly

    @property
    def id(self) -> bytes:
        return self.artifact.id
