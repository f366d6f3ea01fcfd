"""The weight transfer engine in vLLM's workers: commands come from vLLM, data and reports go over the peer's socket.

Promise: no exception reaches vLLM, whose workers would get out of step; every outcome is reported to the peer instead.
*prepare* runs in its own thread while the engine generates, and writes no weight. Only *commit* writes, and *abort* can
undo it until *finish*. A rank with doubtful weights forgets its version, so that the next prepare is dense. A prepare
that hangs does not block the next one.

Commands (the body of ``/update_weights``): ``{"version": "b.s", "phase": "prepare" | "commit" | "abort" | "audit",
"nonce": text, "whole": bool}``. Reports repeat the nonce, so that a late report is not taken for an answer to a later
command. ``whole`` applies to prepare: take everything from the shadow, whatever is held.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from p2pcast.codec.layout import Layout
from p2pcast.errors import IntegrityError, LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.version import Version
from rollout_node.in_engine.install_frames import InstallClient
from rollout_node.in_engine.installation import Installation
from rollout_node.in_engine.staged_version import compile_digest_kernels
from rollout_node.vllm_plugin import SOCKET_VARIABLE, cpu_weights
from rollout_node.vllm_plugin.dense_reload import reload_all
from rollout_node.vllm_plugin.derived_weights import derived_parts

log = logging.getLogger("vllm.p2pcast")


@dataclass
class P2PCastInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """``engine``: the name under which the workers report; the peer gives each engine its own. ``run``: the run's id.

    ``forget``: the weights are not to be trusted, whatever was held. ``pausing``: the peer will pause the engine next.
    ``core``: set by the engine core, not by the peer: the core can switch by itself.
    """

    engine: str = ""
    run: str = ""
    nonce: str = ""
    forget: bool = False
    pausing: bool = False
    core: bool = False


@dataclass
class P2PCastUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    phase: str = ""
    version: str = ""
    nonce: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class _Command:
    """The command that a report answers."""

    phase: str
    version: str | None
    nonce: str


_MAX_JOBS = 3
"""Threads of this rank: one at work, and others that were cancelled and hang (in a file system, for example)."""


class _Job:
    """Work in its own thread. After ``stop`` it ends at its next step, without any further effect."""

    def __init__(self, name: str, work: Callable[[Callable[[], bool]], None]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=work, args=(self._stop.is_set,), name=f"p2pcast-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()


class P2PCastEngine(WeightTransferEngine[P2PCastInitInfo, P2PCastUpdateInfo]):  # type: ignore[misc]
    init_info_cls = P2PCastInitInfo
    update_info_cls = P2PCastUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        self._rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._incarnation = secrets.token_hex(8)
        self._engine = self._run = ""
        self._client = InstallClient(Path(os.environ.get(SOCKET_VARIABLE, "")))
        self._installation: Installation | None = None
        self._jobs: list[_Job] = []
        self._open = self._pausing = False
        self._commit_reports: list[dict[str, Any]] | None = None
        """Reports collected for ``commit_here`` instead of being sent."""

    # -- called by vLLM

    def init_transfer_engine(self, init_info: P2PCastInitInfo) -> None:
        """Record the mapping, unless it is known, and report the version that this rank holds. May be called again at
        any time.
        """
        self._engine = init_info.engine
        self._run_and_report(_Command("init", None, init_info.nonce), lambda: self._init(init_info))

    def start_weight_update(self) -> None:
        """Note that vLLM's session is open, which reports include. Weights change only in ``commit``."""
        self._open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Replaces the base class's method, which raises on bad input and synchronises an accelerator that may be
        missing.
        """
        texts = {key: str(update_info.get(key, ""))[:64] for key in ("phase", "version", "nonce")}
        self.receive_weights(P2PCastUpdateInfo(**texts, whole=update_info.get("whole") is True))

    def receive_weights(self, update_info: P2PCastUpdateInfo) -> None:
        command = _Command(update_info.phase, update_info.version, update_info.nonce)
        phases: dict[str, Callable[[Version], dict[str, Any] | None]] = {
            "prepare": lambda version: self._prepare(version, command, update_info.whole),
            "commit": self._commit,
            "abort": self._abort,
            "audit": lambda version: self._audit(version, command),
        }
        work = phases.get(command.phase)
        if work is None:
            error = f"phase {command.phase!r} is not one of {', '.join(phases)}"
            self._report(command, error=error, kind=RemoteError.wire_code)
            return
        self._run_and_report(command, lambda: work(Version.parse(update_info.version)))

    def commit_here(self, version: str, nonce: str) -> dict[str, Any] | None:
        """For the engine core: commit, and return the report instead of sending it."""
        self._commit_reports = []
        try:
            self.receive_weights(P2PCastUpdateInfo("commit", version, nonce))
            return self._commit_reports[0] if self._commit_reports else None
        finally:
            self._commit_reports = None

    def settle_here(self) -> None:
        """For the engine core: make its commit permanent. vLLM's session stays open for later commands."""
        if self._installation is not None:
            self._installation.finish()

    def finish_weight_update(self) -> None:
        """Make the commit permanent and free the overwritten values."""
        self._open = self._pausing = False
        if self._installation is not None:
            self._installation.finish()

    def shutdown(self) -> None:
        self._stop_jobs()

    # -- phases

    def _init(self, info: P2PCastInitInfo) -> dict[str, Any]:
        if self._installation is None:
            if self.device.type == "cpu" and (packed := cpu_weights.packed_layers(self.model)):
                raise LocalError(
                    f"{len(packed)} layers, first {packed[0]}, compute from packed copies of their weights; "
                    f"set {SOCKET_VARIABLE} before the server starts "
                    "(int8 weights are packed by vLLM's CPU build in any case)"
                )
            layout = Layout.from_document(self._client.layout_document())
            with set_current_vllm_config(self.vllm_config):
                reload_model = partial(reload_all, model=self.model, model_config=self.model_config)
                self._installation = Installation(self.model, layout, derived_parts(self.model), reload_model)
            compile_digest_kernels(layout)
        found = self._installation
        found.require_layout(Layout.from_document(self._client.layout_document()))
        if info.run != self._run:
            self._stop_jobs()
            self._run = info.run
            found.change_run()
        if info.forget:
            self._stop_jobs()
            found.forget()
        self._pausing |= info.pausing
        return {
            "open": self._open,
            "pausing": self._pausing,
            "core": info.core,
            "doubtful": found.doubtful,
            "prepared": str(found.prepared) if found.prepared else None,
            "blocks": sum(len(b) for b in found.mapping.blocks.values()),
            "reload": len(found.mapping.reload),
            "reason": next(iter([*found.derived, *found.mapping.reload.values()]), None),
        }

    def _prepare(self, version: Version, command: _Command, whole: bool) -> None:
        """Fetch and stage in a thread, which reports its end."""
        found = self._ready()
        self._stop_jobs(room=True)
        with set_current_vllm_config(self.vllm_config):
            found.check_storages()
        self._start(command, lambda cancelled: found.prepare(self._client, version, cancelled, whole=whole))

    def _commit(self, version: Version) -> dict[str, Any]:
        """Switch synchronously: the engine is paused meanwhile."""
        found = self._ready()
        with set_current_vllm_config(self.vllm_config):
            mark = found.commit(version)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return {"mark": mark}

    def _abort(self, version: Version) -> dict[str, Any]:
        self._stop_jobs()
        return {"rolled_back": self._ready().abort()}

    def _audit(self, version: Version, command: _Command) -> None:
        """Compute digests of the live weights in a thread, which reports them."""
        found = self._ready()
        self._stop_jobs(room=True)

        def audit(cancelled: Callable[[], bool]) -> dict[str, Any] | None:
            if found.held != version:
                raise IntegrityError(f"this rank holds {found.held or 'no known version'}, not {version}")
            entries = found.audit(self._client, version, cancelled)
            return None if cancelled() else {"digests": entries}

        self._start(command, audit)

    # -- plumbing

    def _ready(self) -> Installation:
        if self._installation is None:
            raise LocalError("this rank isn't initialised: call /init_weight_transfer_engine first")
        return self._installation

    def _start(self, command: _Command, work: Callable[[Callable[[], bool]], dict[str, Any] | None]) -> None:
        self._jobs.append(_Job(command.phase, lambda cancelled: self._run_and_report(command, lambda: work(cancelled))))

    def _stop_jobs(self, *, room: bool = False) -> None:
        """Cancel all jobs. ``room``: make room for one more; raises RetryableError if too many hang."""
        for job in self._jobs:
            job.stop()
        self._jobs = [job for job in self._jobs if job.alive]
        if room and len(self._jobs) >= _MAX_JOBS:
            raise RetryableError(
                f"{len(self._jobs)} earlier commands still hang in this rank; "
                "see the server's log, or restart the server"
            )

    def _run_and_report(self, command: _Command, work: Callable[[], dict[str, Any] | None]) -> None:
        """Run ``work`` and report its result or error. None is not reported: the work reports later or not at all."""
        began = time.monotonic()
        try:
            if self.device.type != "cpu":
                torch.accelerator.set_device_index(self.device.index or 0)
            outcome = work()
        except P2PCastError as error:
            self._report(command, error=str(error), kind=error.wire_code)
        except Exception as error:
            log.exception("p2pcast: %s of version %s failed", command.phase, command.version)
            self._report(command, error=f"{type(error).__name__}: {error}"[:2000], kind=LocalError.wire_code)
        else:
            if outcome is not None:
                self._report(command, took_us=int((time.monotonic() - began) * 1e6), **outcome)

    def _report(self, command: _Command, *, error: str | None = None, **details: Any) -> None:
        held = self._installation.held if self._installation else None
        parallel = self.parallel_config
        report = {
            "engine": self._engine,
            "rank": self._rank,
            "ranks": parallel.world_size * parallel.data_parallel_size,
            "incarnation": self._incarnation,
            "phase": command.phase,
            "version": command.version,
            "nonce": command.nonce,
            "held": str(held) if held else None,
            "error": error,
            **details,
        }
        if self._commit_reports is not None and command.phase == "commit":  # other phases report from their own threads
            self._commit_reports.append(report)
            return
        try:
            self._client.report(report)
        except P2PCastError as failure:
            outcome = error or "done"
            log.error(
                "p2pcast: %s of version %s (%s) could not be reported: %s",
                command.phase,
                command.version,
                outcome,
                failure,
            )
