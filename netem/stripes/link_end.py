"""One end of links as daemons use them: a node with a store, and no staging. Measures the transfer alone."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from p2pcast.artifact.run_key import RunKey
from p2pcast.artifact.signed_records import DELTA, Open, run_id
from p2pcast.codec.layout import Layout, Tensor
from p2pcast.ground import limits
from p2pcast.ground.errors import P2PCastError
from p2pcast.ground.version import Version
from p2pcast.relay.holding import Holding
from p2pcast.relay.node import Node, Parent
from p2pcast.store.artifact_log import ArtifactLog
from p2pcast.store.artifact_store import ArtifactStore
from p2pcast.transport.link import Link, QuietOwner
from p2pcast.trust.join_token import JoinToken
from p2pcast.wire.connection import Identity
from p2pcast.wire.messages import Hello

CELL_BYTES = limits.MIB // 2


class End(QuietOwner):
    """Owner of its node, and acceptor of its links. ``complete``: set by a whole artifact. ``ident``: of the node; None
    makes a new one.
    """

    def __init__(
        self, folder: Path, key: RunKey, secret: bytes, name: str, state_bytes: int, ident: bytes | None = None
    ) -> None:
        self.key = key
        self.store = ArtifactStore(folder, key.public)
        self.node = Node(self, ident or secrets.token_bytes(16), key.public)
        self.downstream = self.node.downstream
        self.identity = Identity(self.node.ident, name, JoinToken(run_id(key.public), secret))
        self.layout = Layout([Tensor("w", "U8", (state_bytes,))], cell_words=CELL_BYTES)
        self.node.add_layout(self.layout)
        self.complete = asyncio.Event()

    def record(self, step: int, piece: int = limits.PIECE_BYTES) -> Open:
        """The record of the delta to version 0.``step``, with pieces of ``piece`` bytes."""
        versions = Version(0, step - 1), Version(0, step)
        ident, run = secrets.token_bytes(16), run_id(self.key.public)
        return Open(ident, versions[0], DELTA, self.layout.layout_id, piece, run, versions[1])

    # -- NodeOwner

    def make_log(self, open_: Open, layout: Layout, *, excerpt: bool) -> ArtifactLog:
        return self.store.begin(open_, layout)

    def on_opened(self, holding: Holding) -> None: ...

    def on_complete(self, holding: Holding) -> None:
        self.complete.set()

    def on_aborted(self, holding: Holding) -> None: ...

    def on_offered(self, upstream: Parent) -> None: ...

    def on_upstream_lost(self, upstream: Parent, error: P2PCastError | None) -> None: ...

    # -- Acceptor

    def accept_link(self, link: Link, hello: Hello) -> None:
        link.owner = self.downstream
        self.downstream.accept(link)
