"""Creates the installers for ``--install TARGET``."""

from __future__ import annotations

from pathlib import Path

from p2pcast.ground.errors import UsageError
from rollout_node.engine.multi_host_installer import MultiHostInstaller
from rollout_node.engine.multi_host_leader import MultiHostLeader
from rollout_node.installers.checkpoint_folder import SmallFiles
from rollout_node.installers.engine_server import EngineServer
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.installer import Installer
from rollout_node.peer_config import SERVERS, SPANS, PeerConfig, valid_target


class Targets:
    """Creates the installers of a peer."""

    def __init__(self, config: PeerConfig, files: SmallFiles, socket: InstallSocket) -> None:
        self._config, self._files, self._socket = config, files, socket
        self._commands = 0

    def led(self, text: str, lead: MultiHostLeader) -> Installer:
        """Return an installer whose engine ``lead`` leads, if its ranks may be on several hosts. Raises UsageError."""
        found = self.installer(text)
        return MultiHostInstaller(found, lead) if text.startswith(SPANS) else found

    def installer(self, text: str) -> Installer:
        """Return the installer for the target ``text``. Raises UsageError."""
        valid_target(text)
        config, (kind, _, rest) = self._config, text.partition(":")
        if kind == "safetensors":
            from rollout_node.installers.checkpoint_folder import FolderInstaller

            return FolderInstaller(Path(rest), self._files, keep=config.keep, form=config.folder_form)
        if kind in SERVERS:
            from rollout_node.installers.engine_installer import EngineInstaller

            return EngineInstaller(
                self._server(kind, rest),
                self._socket,
                run=config.token.run.hex(),
                kv=config.kv,
                driver=config.driver,
                safe_point=config.wait.safe_point,
            )
        from rollout_node.installers.command import CommandInstaller

        self._commands += 1
        return CommandInstaller(rest, config.state / f"exec-{self._commands}", self._files)

    def _server(self, kind: str, url: str) -> EngineServer:
        from rollout_node.installers.engine_server import Deadlines
        from rollout_node.installers.sglang_server import SglangServer
        from rollout_node.installers.vllm_server import VllmServer

        wait = self._config.wait
        if kind == SglangServer.target and wait.safe_point == "drain":
            raise UsageError("SGLang cannot hold new requests while running ones end: --commit-safe-point step")
        servers: dict[str, type[EngineServer]] = {VllmServer.target: VllmServer, SglangServer.target: SglangServer}
        return servers[kind](url, deadlines=Deadlines(drain=wait.limit_s))
