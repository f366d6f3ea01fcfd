"""Which peer leads each engine that spans several hosts. The hub records it on disk, and informs members and leads.

Guarantee: after a restart of the hub, an engine's name is still reserved for its last lead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

from p2pcast.process.background_tasks import Work
from p2pcast.process.daemon_process import StateFile
from p2pcast.wire import messages
from topology.reachability import Reach
from trainer_node.membership.multi_host_engines import MultiHostEngines
from trainer_node.membership.peer_record import PeerRecord
from trainer_node.membership.peer_session import PeerSession

LEADS = "leads"
"""The key of the claims in the hub's state file: engine → node of its last lead, in hex."""


class LeadDirectory:
    """``later`` starts a background task; ``in_thread`` runs a blocking call."""

    def __init__(
        self,
        sessions: Mapping[str, PeerSession],
        reach: Reach,
        memory: StateFile,
        *,
        later: Callable[[Work, str], None],
        in_thread: Callable[..., Coroutine[Any, Any, Any]],
    ) -> None:
        self._sessions = sessions
        self._reach = reach
        self._memory = memory
        self._later = later
        self._in_thread = in_thread
        self._groups = MultiHostEngines()
        self._saved: dict[str, str] = {}

    def recall(self) -> None:
        """Load the claims that an earlier process saved."""
        self._saved = dict(self._memory.facts[LEADS])
        self._groups.recall(self._saved, time.monotonic())

    def join(self, peer: PeerRecord, engine: tuple[str, str] | None, now: float) -> None:
        """``engine``: its name and the peer's role. Raises RefusedError for a second lead."""
        self._groups.join(peer.ident, peer.name, engine, peer.place, now)
        self._save()

    def leave(self, ident: str, now: float) -> None:
        self._groups.leave(ident, now)

    def evict(self, nodes: Iterable[bytes]) -> None:
        """Release the names of the engines that these nodes led."""
        for node in nodes:
            self._groups.leave(node.hex(), time.monotonic(), evicted=True)
        self._save()

    def send_rosters(self) -> None:
        """Send each lead the nodes of its members, if they have changed."""
        for ident, engine, members in self._groups.changed_rosters():
            self._sessions[ident].link.send(messages.Engine(engine, None, members))

    def send_leads(self) -> None:
        """Call ``send_rosters``, then send each member the address of its lead, if it has changed."""
        self.send_rosters()
        for ident, engine, lead in self._groups.changed_leads():
            if lead is not None and (ways := self._reach.ways(ident, lead[0].hex())):
                lead = (lead[0], *ways[0])
            self._sessions[ident].link.send(messages.Engine(engine, lead))

    def _save(self) -> None:
        if (claims := self._groups.claims) != self._saved:
            self._saved = claims
            # Set on the loop, written in a thread: of two simultaneous writes, each has the newest claims.
            self._memory.facts[LEADS] = claims
            self._later(partial(self._in_thread, self._memory.update), "leads of engines")
