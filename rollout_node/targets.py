"""``--install TARGET``: from its text to an installer."""

from __future__ import annotations

from pathlib import Path

from p2pcast.errors import UsageError
from rollout_node.install_socket import InstallSocket
from rollout_node.installers.base import Installer
from rollout_node.installers.folder import SmallFiles

KINDS = "safetensors:DIR, vllm:URL or exec:CMD"


def check(text: str) -> None:
    """Raises UsageError when ``text`` is no target."""
    kind, colon, rest = text.partition(":")
    if kind not in ("safetensors", "vllm", "exec") or not colon or not rest:
        raise UsageError(f"{text!r} is not an install target: write {KINDS}")


class Targets:
    """What installers need of their peer."""

    def __init__(self, files: SmallFiles, socket: InstallSocket, state: Path, keep: int, kv: str, run: str) -> None:
        self._files = files
        self._socket = socket
        self._state = state
        self._keep = keep
        self._kv = kv
        self._run = run
        self._commands = 0

    def installer(self, text: str) -> Installer:
        """Raises UsageError."""
        check(text)
        kind, _, rest = text.partition(":")
        if kind == "safetensors":
            from rollout_node.installers.folder import FolderInstaller

            return FolderInstaller(Path(rest), self._files, keep=self._keep)
        if kind == "vllm":
            from rollout_node.installers.vllm import VllmInstaller

            return VllmInstaller(rest, self._socket, run=self._run, kv="keep" if self._kv == "keep" else "recompute")
        from rollout_node.installers.command import CommandInstaller

        self._commands += 1
        return CommandInstaller(rest, self._state / f"exec-{self._commands}", self._files)
