"""A played vLLM server of two ranks, and the installers of the peers beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from played_vllm import Engine, Provider

from p2pcast.version import Version
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.vllm import VllmInstaller
from rollout_node.installers.vllm_server import Deadlines

ONE, TWO = Version(0, 1), Version(0, 2)
SHADOW = Path("shadow")


class Host:
    """An engine of two ranks; ``installer`` makes another peer's installer for it."""

    def __init__(self, folder: Path) -> None:
        self.socket = InstallSocket(folder / "install.sock", Provider())  # type: ignore[arg-type]
        self.engine = Engine(2, self.socket)
        self.url = ""
        self.drain_s = 60.0
        self.installers: list[VllmInstaller] = []

    def installer(self, **options: Any) -> VllmInstaller:
        found = VllmInstaller(
            self.url, self.socket, name="e", deadlines=Deadlines(report=0.05, drain=self.drain_s), **options
        )
        self.installers.append(found)
        return found

    async def installed(self, version: Version = ONE, **options: Any) -> VllmInstaller:
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
