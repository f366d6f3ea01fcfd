"""A played vLLM server of two ranks, and the installers of the peers beside it, whole or in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from played_vllm import Engine, Provider

from p2pcast.ground.version import Version
from p2pcast.rollouts.kv_policy import KvPolicy
from rollout_node.installers.engine_installer import EngineInstaller
from rollout_node.installers.engine_pause import EnginePause
from rollout_node.installers.engine_server import Deadlines
from rollout_node.installers.engine_switch import EngineSwitch
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.install_state import InstallState
from rollout_node.installers.installer import Driver
from rollout_node.installers.rank_preparation import RankPreparation
from rollout_node.installers.rank_reports import Ranks
from rollout_node.installers.safe_point import SafePoint, SwitchPoint
from rollout_node.installers.switch_rollback import SwitchRollback
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

    def parts(self, **options: Any) -> Parts:
        return Parts(self, **options)


class Parts:
    """The parts of an installer, for tests of each by itself."""

    def __init__(
        self,
        host: Host,
        *,
        kv: KvPolicy = "recompute",
        driver: Driver = "peer",
        safe_point: SafePoint = "step",
        given: int | None = 2,
    ) -> None:
        """``given``: number of workers that report to this peer; None: all of the server's."""
        self.server = VllmServer(host.url, "e", Deadlines(report=0.05))
        self.server.open()
        self.state = InstallState()
        self.ranks = Ranks(self.server, host.socket, "run", given)
        self.pause = EnginePause(self.server, self.ranks, self.state, kv=kv, driver=driver)
        self.point = SwitchPoint(self.server, self.state, safe_point, host.drain_s)
        self.preparation = RankPreparation(self.ranks, self.state, host.socket.layout_document, self.pause.distrust)
        self.rollback = SwitchRollback(self.server, self.ranks, self.state, self.pause, self.point)
        self.switch = EngineSwitch(self.server, self.ranks, self.state, self.pause, self.point)
        host.servers.append(self.server)


def broken_invariants(state: InstallState) -> list[str]:
    """Of the invariants that ``install_state`` states, those that do not hold."""
    wrong = {
        "ready without a committed version": state.ready and state.committed is None,
        "away without a committed version": state.away and state.committed is None,
        "away and ready": state.away and state.ready,
        "a stretch without a committed version": state.stretch is not None and state.committed is None,
        "a report without a staged version": state.installed is not None and state.staged is None,
        "a dense preparation without a staged version": state.dense and state.staged is None,
    }
    return [name for name, broken in wrong.items() if broken]
