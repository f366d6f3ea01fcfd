"""The weight transfer engine that vLLM's workers hold: commands come from vLLM, data and answers go by the peer's socket.

Promise: nothing raises into vLLM, whose workers fall out of step when one of them does; every outcome is reported to the
peer instead. *prepare* works in a thread of its own while the engine generates and writes no weight; *commit* alone
writes, and until *finish* it can be undone with *abort*. A rank whose weights are in doubt forgets its version, so
that the next prepare is a dense one.

Commands (the body of ``/update_weights``): ``{"version": "b.s", "phase": "prepare" | "commit" | "abort" | "audit"}``.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from p2pcast.codec.layout import Layout
from p2pcast.errors import IntegrityError, LocalError, P2PCastError, RemoteError
from p2pcast.version import Version
from rollout_node.install_frames import InstallClient
from rollout_node.vllm_plugin import SOCKET_VARIABLE, cpu
from rollout_node.vllm_plugin.audit import digests
from rollout_node.vllm_plugin.derived import derived_parts
from rollout_node.vllm_plugin.installation import Installation
from rollout_node.vllm_plugin.staging import warm

log = logging.getLogger("vllm.p2pcast")


@dataclass
class P2PCastInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """``engine``: the name under which the workers report; the peer gives each engine its own. ``run``: the run's id."""

    engine: str = ""
    run: str = ""


@dataclass
class P2PCastUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    phase: str = ""
    version: str = ""


class _Job:
    """Work in a thread of its own, which ``stop`` ends at its next step."""

    def __init__(self, name: str, work: Callable[[Callable[[], bool]], None]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=work, args=(self._stop.is_set,), name=f"p2pcast-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


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
        self._job: _Job | None = None
        self._open = False

    # -- what vLLM calls

    def init_transfer_engine(self, init_info: P2PCastInitInfo) -> None:
        """Learn the mapping, unless it is known; report what this rank holds. May be called again at any time."""
        self._engine = init_info.engine
        self._guard("init", None, lambda: self._init(init_info.run))

    def start_weight_update(self) -> None:
        """Weights change in ``commit`` alone; vLLM's session is only noted, for whoever must know whether one is open."""
        self._open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Replaces the base class's, which raises on bad input and synchronises an accelerator that may not be there."""
        phase, version = update_info.get("phase"), update_info.get("version")
        self.receive_weights(P2PCastUpdateInfo(phase=str(phase), version=str(version)))

    def receive_weights(self, update_info: P2PCastUpdateInfo) -> None:
        phases = {"prepare": self._prepare, "commit": self._commit, "abort": self._abort, "audit": self._audit}
        work = phases.get(update_info.phase)
        if work is None:
            error = f"phase {update_info.phase[:40]!r} is none of {', '.join(phases)}"
            self._report(update_info.phase[:40], update_info.version[:40], error=error, kind=RemoteError.wire_code)
            return
        self._guard(update_info.phase, update_info.version, lambda: work(Version.parse(update_info.version)))

    def finish_weight_update(self) -> None:
        """From here on a commit can't be undone, and the overwritten values are let go."""
        self._open = False
        if self._installation is not None:
            self._installation.finish()

    def shutdown(self) -> None:
        self._stop_job()

    # -- phases

    def _init(self, run: str) -> dict[str, Any]:
        if self._installation is None:
            if self.device.type == "cpu" and (packed := cpu.check(self.model)):
                raise LocalError(
                    f"{len(packed)} layers, {packed[0]} first, compute from packed copies of their weights; "
                    f"set {SOCKET_VARIABLE} before the server starts (mixtures of experts don't work on vLLM's CPU build)"
                )
            layout = Layout.from_document(self._client.layout_document())
            with set_current_vllm_config(self.vllm_config):
                self._installation = Installation(self.model, self.model_config, layout, derived_parts(self.model))
            warm(layout)
        found = self._installation
        found.require_layout(Layout.from_document(self._client.layout_document()))
        if run != self._run:  # versions of another run are other weights
            self._stop_job()
            self._run, found.held = run, None
        return {
            "open": self._open,
            "blocks": sum(len(b) for b in found.mapping.blocks.values()),
            "reload": len(found.mapping.reload),
            "reason": next(iter([*found.derived, *found.mapping.reload.values()]), None),
        }

    def _prepare(self, version: Version) -> None:
        """Fetch and stage, in a thread; its end is reported."""
        self._stop_job()
        found = self._ready()
        with set_current_vllm_config(self.vllm_config):
            found.check_storages()

        def work(cancelled: Callable[[], bool]) -> None:
            self._guard("prepare", str(version), lambda: found.prepare(self._client, version, cancelled))

        self._job = _Job("prepare", work)

    def _commit(self, version: Version) -> dict[str, Any]:
        """Switch. Done when this returns: the engine is paused meanwhile."""
        found = self._ready()
        with set_current_vllm_config(self.vllm_config):
            found.commit(version)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return {}

    def _abort(self, version: Version) -> dict[str, Any]:
        self._stop_job()
        return {"rolled_back": self._ready().abort()}

    def _audit(self, version: Version) -> None:
        """Digest of the live weights, in a thread; reported."""
        self._stop_job()
        found = self._ready()

        def look(cancelled: Callable[[], bool]) -> dict[str, Any]:
            if found.held != version:
                raise IntegrityError(f"this rank holds {found.held or 'no known version'}, not {version}")
            return {"digests": digests(found.layout, found.mapping, found.storages, cancelled)}

        self._job = _Job("audit", lambda cancelled: self._guard("audit", str(version), lambda: look(cancelled)))

    # -- plumbing

    def _ready(self) -> Installation:
        if self._installation is None:
            raise LocalError("this rank isn't initialised: call /init_weight_transfer_engine first")
        return self._installation

    def _stop_job(self) -> None:
        if self._job is not None:
            self._job.stop()
            self._job = None

    def _guard(self, phase: str, version: str | None, work: Callable[[], dict[str, Any] | None]) -> None:
        """Run ``work`` and report what it returns, or its error; None is reported by somebody else, later."""
        began = time.monotonic()
        try:
            if self.device.type != "cpu":
                torch.accelerator.set_device_index(self.device.index or 0)
            outcome = work()
        except P2PCastError as error:
            self._report(phase, version, error=str(error), kind=error.wire_code)
        except Exception as error:
            log.exception("p2pcast: %s of version %s failed", phase, version)
            self._report(phase, version, error=f"{type(error).__name__}: {error}"[:2000], kind=LocalError.wire_code)
        else:
            if outcome is not None:
                self._report(phase, version, took_us=int((time.monotonic() - began) * 1e6), **outcome)

    def _report(self, phase: str, version: str | None, *, error: str | None = None, **details: Any) -> None:
        held = self._installation.held if self._installation else None
        parallel = self.parallel_config
        report = {
            "engine": self._engine,
            "rank": self._rank,
            "ranks": parallel.world_size * parallel.data_parallel_size,
            "incarnation": self._incarnation,
            "phase": phase,
            "version": version,
            "held": str(held) if held else None,
            "error": error,
            **details,
        }
        try:
            self._client.report(report)
        except P2PCastError as failure:
            log.error("p2pcast: %s of version %s (%s) could not be reported: %s", phase, version, error or "done", failure)
