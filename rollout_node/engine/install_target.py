"""``--install TARGET``: from its text to an installer."""

from __future__ import annotations

from pathlib import Path

from p2pcast.checkpoint.folder_form import FolderForm
from p2pcast.ground.errors import UsageError
from p2pcast.rollouts.kv_policy import KvPolicy
from rollout_node.engine.multi_host_installer import MultiHostInstaller
from rollout_node.engine.multi_host_leader import MultiHostLeader
from rollout_node.installers.checkpoint_folder import SmallFiles
from rollout_node.installers.engine_server import EngineServer
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.installer import Installer
from rollout_node.peer_config import SERVERS, SPANS, Driver, SafePointWait, valid_target


class Targets:
    """Makes installers, with what they need of their peer."""

    def __init__(
        self,
        files: SmallFiles,
        socket: InstallSocket,
        state: Path,
        keep: int,
        form: FolderForm,
        kv: KvPolicy,
        driver: Driver,
        run: str,
        wait: SafePointWait,
    ) -> None:
        self._files = files
        self._socket = socket
        self._state = state
        self._keep, self._form = keep, form
        self._kv: KvPolicy = kv
        self._driver: Driver = driver
        self._run = run
        self._wait = wait
        self._commands = 0

    def led(self, text: str, lead: MultiHostLeader) -> Installer:
        """``lead`` leads the engine, if ``text`` names one. Raises UsageError."""
        found = self.installer(text)
        return MultiHostInstaller(found, lead) if text.startswith(SPANS) else found

    def installer(self, text: str) -> Installer:
        """Raises UsageError."""
        valid_target(text)
        kind, _, rest = text.partition(":")
        if kind == "safetensors":
            from rollout_node.installers.checkpoint_folder import FolderInstaller

            return FolderInstaller(Path(rest), self._files, keep=self._keep, form=self._form)
        if kind in SERVERS:
            from rollout_node.installers.engine_installer import EngineInstaller

            return EngineInstaller(
                self._server(kind, rest),
                self._socket,
                run=self._run,
                kv=self._kv,
                driver=self._driver,
                safe_point=self._wait.safe_point,
            )
        from rollout_node.installers.command import CommandInstaller

        self._commands += 1
        return CommandInstaller(rest, self._state / f"exec-{self._commands}", self._files)

    def _server(self, kind: str, url: str) -> EngineServer:
        from rollout_node.installers.engine_server import Deadlines
        from rollout_node.installers.sglang_server import SglangServer
        from rollout_node.installers.vllm_server import VllmServer

        if kind == SglangServer.target and self._wait.safe_point == "drain":
            raise UsageError("SGLang cannot hold new requests while running ones end: --commit-safe-point step")
        servers: dict[str, type[EngineServer]] = {VllmServer.target: VllmServer, SglangServer.target: SglangServer}
        return servers[kind](url, deadlines=Deadlines(drain=self._wait.limit_s))
