"""An eviction takes effect: connections of evicted nodes are closed, and all peers are told.

Promise: when ``enforce`` returns, no connection of an evicted node is left.
"""

from __future__ import annotations

from collections.abc import Collection

from p2pcast.ground import limits
from p2pcast.ground.errors import RefusedError
from p2pcast.transport.link import Link
from p2pcast.transport.listener import Listener
from p2pcast.wire import messages
from trainer_node.membership.lead_directory import LeadDirectory
from trainer_node.membership.peer_session import Sessions


class EvictionEnforcer:
    """``children``: the links of peers that the hub feeds."""

    def __init__(
        self, sessions: Sessions, leads: LeadDirectory, connections: Listener, children: Collection[Link]
    ) -> None:
        self._sessions = sessions
        self._leads = leads
        self._connections = connections
        self._children = children

    def enforce(self, nodes: frozenset[bytes], signed: list[bytes]) -> None:
        """``nodes``: all evicted nodes; ``signed``: the new statements."""
        for node in nodes:
            if (session := self._sessions.get(node.hex())) is not None:
                # The end of an evicted peer's session is no failure of the network.
                session.farewell = True
        self._leads.evict(nodes)
        error = RefusedError("this node was evicted from the run")
        self._connections.drop(nodes, error)
        for link in [link for link in self._children if link.remote in nodes]:
            link.close(error)
        for at in range(0, len(signed), limits.MAX_STATEMENTS):
            part = signed[at : at + limits.MAX_STATEMENTS]
            self._sessions.send_all(messages.Evicted(sorted(nodes), part))
