"""The hub's connections. Each is passed to the component that its HELLO asks for. A peer that has joined gets the first
messages. An evicted node keeps no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from p2pcast.ground import limits
from p2pcast.ground.addresses import unscoped
from p2pcast.ground.errors import RefusedError
from p2pcast.relay.downstream import Downstream
from p2pcast.transport.link import Link, LinkOwner, QuietOwner
from p2pcast.transport.listener import Listener
from p2pcast.trust.dial_permissions import ENROL
from p2pcast.wire import messages
from p2pcast.wire.connection import PARENT
from p2pcast.wire.messages import Catalog, Record, Welcome
from topology.plan_tree import Epoch
from trainer_node.admission.admission import Admission
from trainer_node.commit.commits import Commits
from trainer_node.membership.lead_directory import LeadDirectory
from trainer_node.membership.peer_session import PeerSession, Sessions
from trainer_node.ranks.rank_intake import RankIntake


class HubLinkAcceptor(QuietOwner):
    """``session(link, token)`` returns a control connection's owner; ``token``: id of the peer's token."""

    def __init__(
        self,
        children: Downstream,
        ranks: RankIntake,
        enrolment: Admission,
        session: Callable[[Link, bytes], LinkOwner],
    ) -> None:
        self._children = children
        self._ranks = ranks
        self._enrolment = enrolment
        self._session = session

    def accept_link(self, link: Link, hello: messages.Hello) -> None:
        """Assign the link to its owner. Raises RemoteError or RefusedError, and the link is then closed."""
        purpose = hello.purpose
        if purpose == "data":
            if hello.role == PARENT:
                raise RefusedError("a hub has no parent")
            link.owner = self._children
            self._children.accept(link)
        elif purpose == "publish":
            self._ranks.accept(link, hello)
        elif purpose == ENROL:
            self._enrolment.accept(link, hello)
        elif purpose == "engine":
            raise RefusedError("a hub leads no engine; dial the peer that does")
        else:
            link.owner = self._session(link, hello.token)
            link.expect_first_message("JOIN")


class EvictionEnforcer:
    """Puts evictions into effect: closes the connections of evicted nodes, and informs all peers. ``children``: links
    of the peers that the hub feeds.
    """

    def __init__(
        self, sessions: Sessions, leads: LeadDirectory, connections: Listener, children: Collection[Link]
    ) -> None:
        self._sessions = sessions
        self._leads = leads
        self._connections = connections
        self._children = children

    def enforce(self, nodes: frozenset[bytes], signed: list[bytes]) -> None:
        """Close all connections of the evicted ``nodes``. ``signed``: the new statements, which all peers are sent."""
        for node in nodes:
            if (session := self._sessions.get(node.hex())) is not None:
                # An evicted peer's session that closes is not a network failure.
                session.farewell = True
        self._leads.evict(nodes)
        error = RefusedError("this node was evicted from the run")
        self._connections.drop(nodes, error)
        for link in [link for link in self._children if link.remote in nodes]:
            link.close(error)
        for at in range(0, len(signed), limits.MAX_STATEMENTS):
            part = signed[at : at + limits.MAX_STATEMENTS]
            self._sessions.send_all(messages.Evicted(sorted(nodes), part))


class WelcomeMessages:
    """The first messages to a peer that has joined: WELCOME, EVICTED, CATALOG, and HOLD. ``epoch``: epoch of the plan
    in force. ``catalog``: a CATALOG with all of the hub's artifacts.
    """

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
        """The messages, in the order in which to send them."""
        welcome = Welcome(
            key=self._run_key,
            epoch=self._epoch(),
            commit=self._commits.mode,
            target=self._commits.target.version,
            host=unscoped(session.link.remote_host),
            bearer=None if self._plaintext else self._trust.bearer_of(session.link.remote),
            name=None if session.peer is None else session.peer.name,
        )
        return [welcome, *self._trust.evictions(), self._catalog(), *self._commits.greeting()]
