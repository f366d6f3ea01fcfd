"""The weight transfer engine that vLLM's workers hold: commands come from vLLM, data and answers go by the peer's socket.

Promise: nothing raises into vLLM, whose workers fall out of step when one of them does; every outcome is reported to the
peer instead. *prepare* works in a thread of its own while the engine generates and writes no weight; *commit* alone
writes, and until *finish* it can be undone with *abort*. A rank whose weights are in doubt forgets its version, so
that the next prepare is a dense one. A prepare that hangs holds nothing up: the next one begins beside it.

Commands (the body of ``/update_weights``): ``{"version": "b.s", "phase": "prepare" | "commit" | "abort" | "audit",
"nonce": text, "whole": bool}``. Reports repeat the nonce, so that a late one is not taken for an answer to a later
command. ``whole`` is for prepare: take everything from the shadow, whatever is held.
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
from p2pcast.errors import IntegrityError, LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.version import Version
from rollout_node.install_frames import InstallClient
from rollout_node.vllm_plugin import SOCKET_VARIABLE, cpu
from rollout_node.vllm_plugin.derived import derived_parts
from rollout_node.vllm_plugin.installation import Installation
from rollout_node.vllm_plugin.staging import warm

log = logging.getLogger("vllm.p2pcast")


@dataclass
class P2PCastInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """``engine``: the name under which the workers report; the peer gives each engine its own. ``run``: the run's id.
    ``forget``: the weights are not to be trusted, whatever was held. ``pausing``: the peer will pause the engine now.
    ``core``: not the peer's, but the engine core's: it can switch by itself."""

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
class _Asked:
    """What a report answers."""

    phase: str
    version: str | None
    nonce: str


_MOST_JOBS = 3
"""Threads of this rank: one at work, and others that were told to stop and hang (in a file system, say)."""


class _Job:
    """Work in a thread of its own. After ``stop`` it ends at its next step, and what it does till then has no effect."""

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
        self._caught: list[dict[str, Any]] | None = None
        """Reports of a commit, for whoever called ``commit_here``."""

    # -- what vLLM calls

    def init_transfer_engine(self, init_info: P2PCastInitInfo) -> None:
        """Learn the mapping, unless it is known; report what this rank holds. May be called again at any time."""
        self._engine = init_info.engine
        self._guard(_Asked("init", None, init_info.nonce), lambda: self._init(init_info))

    def start_weight_update(self) -> None:
        """Weights change in ``commit`` alone; vLLM's session is only noted, for whoever must know whether one is open."""
        self._open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Replaces the base class's, which raises on bad input and synchronises an accelerator that may not be there."""
        texts = {key: str(update_info.get(key, ""))[:64] for key in ("phase", "version", "nonce")}
        self.receive_weights(P2PCastUpdateInfo(**texts, whole=update_info.get("whole") is True))

    def receive_weights(self, update_info: P2PCastUpdateInfo) -> None:
        asked = _Asked(update_info.phase, update_info.version, update_info.nonce)
        phases: dict[str, Callable[[Version], dict[str, Any] | None]] = {
            "prepare": lambda version: self._prepare(version, asked, update_info.whole),
            "commit": self._commit,
            "abort": self._abort,
            "audit": lambda version: self._audit(version, asked),
        }
        work = phases.get(asked.phase)
        if work is None:
            error = f"phase {asked.phase!r} is none of {', '.join(phases)}"
            self._report(asked, error=error, kind=RemoteError.wire_code)
            return
        self._guard(asked, lambda: work(Version.parse(update_info.version)))

    def commit_here(self, version: str, nonce: str) -> dict[str, Any] | None:
        """For ``core``: commit, and give the report back instead of sending it."""
        self._caught = []
        try:
            self.receive_weights(P2PCastUpdateInfo("commit", version, nonce))
            return self._caught[0] if self._caught else None
        finally:
            self._caught = None

    def settle_here(self) -> None:
        """For ``core``: what it committed can't be undone any more. vLLM's session stays open, for commands that are still to come."""
        if self._installation is not None:
            self._installation.finish()

    def finish_weight_update(self) -> None:
        """From here on a commit can't be undone, and the overwritten values are let go."""
        self._open = self._pausing = False
        if self._installation is not None:
            self._installation.finish()

    def shutdown(self) -> None:
        self._stop_jobs()

    # -- phases

    def _init(self, info: P2PCastInitInfo) -> dict[str, Any]:
        if self._installation is None:
            if self.device.type == "cpu" and (packed := cpu.check(self.model)):
                raise LocalError(
                    f"{len(packed)} layers, {packed[0]} first, compute from packed copies of their weights; "
                    f"set {SOCKET_VARIABLE} before the server starts (vLLM's CPU build packs int8 weights even so)"
                )
            layout = Layout.from_document(self._client.layout_document())
            with set_current_vllm_config(self.vllm_config):
                self._installation = Installation(self.model, self.model_config, layout, derived_parts(self.model))
            warm(layout)
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

    def _prepare(self, version: Version, asked: _Asked, whole: bool) -> None:
        """Fetch and stage, in a thread; its end is reported."""
        found = self._ready()
        self._stop_jobs(room=True)
        with set_current_vllm_config(self.vllm_config):
            found.check_storages()
        self._start(asked, lambda cancelled: found.prepare(self._client, version, cancelled, whole=whole))

    def _commit(self, version: Version) -> dict[str, Any]:
        """Switch. Done when this returns: the engine is paused meanwhile."""
        found = self._ready()
        with set_current_vllm_config(self.vllm_config):
            mark = found.commit(version)
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return {"mark": mark}

    def _abort(self, version: Version) -> dict[str, Any]:
        self._stop_jobs()
        return {"rolled_back": self._ready().abort()}

    def _audit(self, version: Version, asked: _Asked) -> None:
        """Digest of the live weights, in a thread; reported."""
        found = self._ready()
        self._stop_jobs(room=True)

        def look(cancelled: Callable[[], bool]) -> dict[str, Any] | None:
            if found.held != version:
                raise IntegrityError(f"this rank holds {found.held or 'no known version'}, not {version}")
            entries = found.audit(self._client, version, cancelled)
            return None if cancelled() else {"digests": entries}

        self._start(asked, look)

    # -- plumbing

    def _ready(self) -> Installation:
        if self._installation is None:
            raise LocalError("this rank isn't initialised: call /init_weight_transfer_engine first")
        return self._installation

    def _start(self, asked: _Asked, work: Callable[[Callable[[], bool]], dict[str, Any] | None]) -> None:
        self._jobs.append(_Job(asked.phase, lambda cancelled: self._guard(asked, lambda: work(cancelled))))

    def _stop_jobs(self, *, room: bool = False) -> None:
        """Whoever still works does so in vain. ``room``: for one more; raises RetryableError when too many hang."""
        for job in self._jobs:
            job.stop()
        self._jobs = [job for job in self._jobs if job.alive]
        if room and len(self._jobs) >= _MOST_JOBS:
            raise RetryableError(
                f"{len(self._jobs)} earlier commands still hang in this rank; see the server's log, or restart it"
            )

    def _guard(self, asked: _Asked, work: Callable[[], dict[str, Any] | None]) -> None:
        """Run ``work`` and report what it returns, or its error; None is reported by somebody else, later, or not at all."""
        began = time.monotonic()
        try:
            if self.device.type != "cpu":
                torch.accelerator.set_device_index(self.device.index or 0)
            outcome = work()
        except P2PCastError as error:
            self._report(asked, error=str(error), kind=error.wire_code)
        except Exception as error:
            log.exception("p2pcast: %s of version %s failed", asked.phase, asked.version)
            self._report(asked, error=f"{type(error).__name__}: {error}"[:2000], kind=LocalError.wire_code)
        else:
            if outcome is not None:
                self._report(asked, took_us=int((time.monotonic() - began) * 1e6), **outcome)

    def _report(self, asked: _Asked, *, error: str | None = None, **details: Any) -> None:
        held = self._installation.held if self._installation else None
        parallel = self.parallel_config
        report = {
            "engine": self._engine,
            "rank": self._rank,
            "ranks": parallel.world_size * parallel.data_parallel_size,
            "incarnation": self._incarnation,
            "phase": asked.phase,
            "version": asked.version,
            "nonce": asked.nonce,
            "held": str(held) if held else None,
            "error": error,
            **details,
        }
        if self._caught is not None and asked.phase == "commit":  # other phases report from threads of their own
            self._caught.append(report)
            return
        try:
            self._client.report(report)
        except P2PCastError as failure:
            outcome = error or "done"
            log.error("p2pcast: %s of version %s (%s) could not be reported: %s", asked.phase, asked.version, outcome, failure)
