"""The peer process: it builds a peer in two phases, runs it, and hands over its children before it exits."""

from __future__ import annotations

from contextlib import AsyncExitStack

from p2pcast.process.background_tasks import Tasks
from p2pcast.process.events import Events
from p2pcast.store.state_format import state_lock
from rollout_node.peer import Peer, build_peer
from rollout_node.peer_config import PeerConfig
from rollout_node.peer_startup import start_up


class PeerDaemon:
    """Builds the peer and runs it until cancelled."""

    def __init__(self, config: PeerConfig) -> None:
        self.config = config
        self.events = Events()
        self.tasks = Tasks(self.events)
        self.peer: Peer | None = None
        """None until the run's key is known."""

    async def run(self) -> None:
        """Build the peer and run it until cancelled. Raises P2PCastError, possibly inside an exception group."""
        with state_lock(self.config.state), self.tasks.watching():
            async with AsyncExitStack() as ends:
                startup = await start_up(self.config, self.events, self.tasks, ends)
                self.peer = await build_peer(startup, await startup.run_key.obtain())
                await self.peer.run()

    async def drain(self) -> None:
        if self.peer is not None:
            await self.peer.drain()
