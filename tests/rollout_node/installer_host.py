"""A played vLLM server of two ranks, and the installers of the peers beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from played_vllm import Engine, Provider

from p2pcast.ground.version import Version
from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.engine_server import Deadlines
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.rank_reports import Ranks
from rollout_node.installers.vllm_server import VllmServer

ONE, TWO = Version(0, 1), Version(0, 2)
SHADOW = Path("shadow")


class Host:
    """An engine of two ranks; ``installer`` makes another peer's installer for it."""

    def __init__(self, folder: Path) -> None:
        self.socket = InstallSocket(folder / "install.sock", Provider())  # type: ignore[arg-type]
        self.engine = Engine(2, self.socket)
        self.url = ""
        self.drain_s = 60.0
        self.installers: list[EngineInstaller] = []
        self.servers: list[VllmServer] = []

    def installer(self, **options: Any) -> EngineInstaller:
        server = VllmServer(self.url, "e", Deadlines(report=0.05, drain=self.drain_s))
        found = EngineInstaller(server, self.socket, **options)
        self.installers.append(found)
        return found

    async def installed(self, version: Version = ONE, **options: Any) -> EngineInstaller:
        """An installer whose engine has this version."""
        found = self.installer(**options)
        await found.start()
        self.engine.paused = options.get("driver") == "external"
        await found.stage(version, SHADOW)
        await found.commit(version)
        assert (found.committed, found.ready) == (version, True)
        self.engine.calls.clear()
        self.engine.draining.clear()
        return found

    def held(self) -> list[str | None]:
        return [rank.held for rank in self.engine.ranks]

    def ranks(self, given: int | None = 2) -> Ranks:
        """Of another peer, for commands without an installer. ``given``: number of workers that report to it; None: all
        of the server's.
        """
        server = VllmServer(self.url, "e", Deadlines(report=0.05))
        server.open()
        self.servers.append(server)
        return Ranks(server, self.socket, "run", given)
