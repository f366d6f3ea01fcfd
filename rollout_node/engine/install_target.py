"""``--install TARGET``: from its text to an installer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from p2pcast.checkpoint.folder_form import FolderForm
from p2pcast.ground import limits
from p2pcast.ground.errors import UsageError
from p2pcast.rollouts.kv_policy import KvPolicy, recomputes
from rollout_node.engine.multi_host_installer import MultiHostInstaller
from rollout_node.engine.multi_host_leader import MultiHostLeader
from rollout_node.installers.checkpoint_folder import SmallFiles
from rollout_node.installers.engine_server import EngineServer
from rollout_node.installers.install_socket import InstallSocket
from rollout_node.installers.installer import Driver, Installer
from rollout_node.installers.safe_point import SafePoint

Role = Literal["lead", "member"]

KINDS = "safetensors:DIR, vllm:URL, sglang:URL or exec:CMD"
SERVERS = ("vllm", "sglang")
SPANS = "vllm:"
"""Targets whose workers may run on several hosts."""


def check(text: str) -> None:
    """Raises UsageError unless ``text`` names a target."""
    kind, colon, rest = text.partition(":")
    if kind not in ("safetensors", *SERVERS, "exec") or not colon or not rest:
        raise UsageError(f"{text!r} is not an install target: write {KINDS}")


def check_span(targets: Sequence[str], engine: str | None, role: str | None) -> None:
    """Raises UsageError where --engine, --role and the targets contradict each other."""
    if (engine is None) != (role is None):
        raise UsageError(
            "--engine NAME and --role lead or --role member go together: one engine, workers on several hosts"
        )
    if engine is not None and not 1 <= len(engine) <= limits.MAX_SPAN_NAME:
        raise UsageError(f"--engine: a name has 1 to {limits.MAX_SPAN_NAME} characters")
    spans = sum(t.startswith(SPANS) for t in targets)
    if role == "lead" and spans != 1:
        raise UsageError(f"the lead of an engine drives its server: give exactly one --install vllm:URL, not {spans}")
    if role == "member" and spans:
        raise UsageError(
            "a member serves the workers of its host, the lead drives the server: leave --install vllm:URL to the lead"
        )
    if role != "member" and not targets:
        raise UsageError(f"nothing to install into: give --install {KINDS}")


def check_wait(safe_point: str, kv: KvPolicy, driver: str) -> None:
    """Raises UsageError where --commit-safe-point contradicts other options."""
    if safe_point != "drain":
        return
    if not recomputes(kv):
        raise UsageError(
            f"--kv {kv} keeps keys and values of old weights for later requests: --commit-safe-point drain needs --kv "
            "recompute"
        )
    if driver == "external":
        raise UsageError(
            "--commit-safe-point drain is for --driver peer: with --driver external, your orchestrator pauses the "
            "engine, so let it pause with mode=wait"
        )


class Wait(NamedTuple):
    """``limit_s``: longest time for running requests to end, with the safe point ``drain``."""

    safe_point: SafePoint
    limit_s: float


NO_WAIT: Final = Wait("step", 600.0)


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
        wait: Wait,
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
        check(text)
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
