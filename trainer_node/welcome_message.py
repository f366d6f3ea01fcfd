"""The first messages to a peer that has joined: WELCOME, EVICTED, CATALOG, and where to HOLD."""

from __future__ import annotations

from collections.abc import Callable

from p2pcast.ground.addresses import unscoped
from p2pcast.wire.messages import Catalog, Record, Welcome
from topology.plan_tree import Epoch
from trainer_node.admission.admission import Admission
from trainer_node.commit.commits import Commits
from trainer_node.membership.peer_session import PeerSession


class WelcomeMessages:
    """``epoch``: of the plan in force. ``catalog``: a CATALOG with all artifacts of the hub."""

    def __init__(
        self,
        run_key: bytes,
        commits: Commits,
        trust: Admission,
        *,
        epoch: Callable[[], Epoch],
        catalog: Callable[[], Catalog],
        plaintext: bool,
    ) -> None:
        self._run_key = run_key
        self._commits = commits
        self._trust = trust
        self._epoch = epoch
        self._catalog = catalog
        self._plaintext = plaintext

    def messages(self, session: PeerSession) -> list[Record]:
        """In the order in which they are sent."""
        welcome = Welcome(
            key=self._run_key,
            epoch=self._epoch(),
            commit=self._commits.mode,
            target=self._commits.target,
            host=unscoped(session.link.remote_host),
            bearer=None if self._plaintext else self._trust.bearer_of(session.link.remote),
            name=None if session.peer is None else session.peer.name,
        )
        return [welcome, *self._trust.evictions(), self._catalog(), *self._commits.greeting()]
