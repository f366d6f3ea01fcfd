"""One rank of an engine. Commands come from the engine; data and reports use the peer's socket.

Guarantee: no exception reaches the engine, whose ranks would get out of step; every outcome is reported to the peer
instead. *prepare* runs in a separate thread while the engine generates, and writes no weight. Only *commit* writes, and
*abort* can undo it until *finish*. A rank whose weights are in doubt forgets its version, so that the next prepare is
dense. A prepare that hangs does not block the next one.

A command: ``{"version": "b.s", "phase": "prepare" | "commit" | "abort" | "audit", "nonce": text, "whole": bool}``.
Reports repeat the nonce, so that a late report is not taken for the answer to a later command. ``whole`` applies to
prepare: take everything from the shadow, whatever is held.

No engine is imported here: its plugin describes it as a ``RankModel``.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from p2pcast.checkpoint.adapter_form import adapters_beside, adapters_of
from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, RemoteError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.sparse.budget_schedule import BudgetSchedule
from rollout_node.in_engine import tensor_accounts
from rollout_node.in_engine.adapter_weights import AdapterWeights, Followers, ModelBesideAdapters
from rollout_node.in_engine.heartbeat import Heartbeat
from rollout_node.in_engine.install_frames import InstallClient
from rollout_node.in_engine.installation import DerivedParts, Installation
from rollout_node.in_engine.shadow_reader import ShadowReader
from rollout_node.in_engine.staged_version import compile_digest_kernels
from rollout_node.in_engine.started_settings import StartedSettings

_MAX_JOBS = 3
"""Limit on this rank's threads: one at work, and others that were cancelled but hang (in a file system, say)."""
_MAX_TEXT = 64
"""Number of characters read from a command's text fields."""


class RankModel(Protocol):
    """One rank's model, and the operations that differ between engines."""

    model: torch.nn.Module
    device: torch.device
    rank: int
    ranks: int
    """Number of ranks in the whole engine, over all kinds of parallelism."""

    @property
    def settings(self) -> StartedSettings | None:
        """The model's settings; None if versions' settings are not compared with them."""

    @property
    def takes_adapters(self) -> bool:
        """Whether requests may name LoRA adapters."""

    @property
    def use_schedule(self) -> Callable[[BudgetSchedule | None], None] | None:
        """A function that sets the schedule for attention from the next step on, or dense attention if called with
        None. It is None itself if the engine's attention is always dense.
        """

    def loading(self) -> AbstractContextManager[Any]:
        """Context manager to hold while using the model's loader and parameters."""

    def loading_form(self) -> AbstractContextManager[None]:
        """Context manager that gives the parameters the shape the loader expects, without moving them to other storage.
        The engine must not compute anything meanwhile.
        """

    def derived_parts(self) -> list[str]:
        """List the parts that compute from derived values (see ``Installation``). Raises LocalError for a model into
        which p2pcast cannot install.
        """

    def followers(self, weights: AdapterWeights) -> Followers:
        """Return the engine's copies of the adapters. Raises LocalError if they cannot be installed."""

    def reload_all(self, shadow: ShadowReader) -> None:
        """Reload all weights, as described at ``installation.ReloadAll``."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """A peer's first command, which may be repeated. ``engine``: the name under which the ranks report, unique per
    engine of the peer. ``run``: the run's id. ``forget``: the weights must not be trusted, whatever was held.
    ``pausing``: the peer is about to pause the engine. ``core``: whether the engine can switch by one command, set by
    the plugin and not by the peer.
    """

    engine: str = ""
    run: str = ""
    nonce: str = ""
    forget: bool = False
    pausing: bool = False
    core: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """The command that a report answers."""

    phase: str
    version: str | None
    nonce: str
    whole: bool = False

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Command:
        """Parse whatever came over the engine's routes."""
        phase, version, nonce = (str(body.get(key, ""))[:_MAX_TEXT] for key in ("phase", "version", "nonce"))
        return cls(phase, version, nonce, body.get("whole") is True)


class _Job:
    """Work in a separate thread. After ``stop``, it finishes at its next step without any further effect."""

    def __init__(self, name: str, work: Callable[[Callable[[], bool]], None]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=work, args=(self._stop.is_set,), name=f"p2pcast-{name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()


class RankInstaller:
    """``socket``: the peer's. ``log``: the engine's logger."""

    def __init__(self, model: RankModel, socket: Path, log: logging.Logger) -> None:
        self._model, self._log = model, log
        self._incarnation = secrets.token_hex(8)
        self._engine = self._run = ""
        self._client, self._heartbeat = InstallClient(socket), Heartbeat(socket)
        self._installation: Installation | None = None
        self._lacks: tuple[str, ...] = ()
        """Adapters of the run that this engine does not load."""
        self._jobs: list[_Job] = []
        self._open = self._pausing = False
        self._commit_reports: list[dict[str, Any]] | None = None
        """Reports collected for ``commit_here`` instead of being sent."""

    @property
    def held(self) -> str | None:
        """The version of this rank's weights; None if unknown."""
        held = self._installation.held if self._installation else None
        return str(held) if held else None

    @property
    def serves(self) -> str | None:
        """Like ``held``, but includes a version with a different layout: the version from which this rank computes."""
        return self.held or (str(i.before) if (i := self._installation) and i.before else None)

    def introduce(self, introduction: Introduction) -> None:
        """Record the mapping unless the layout's mapping is known, and report the version that this rank holds."""
        self._engine = introduction.engine
        rank = {"rank": self._model.rank, "ranks": self._model.ranks}
        self._heartbeat.begin(engine=self._engine, incarnation=self._incarnation, **rank)
        self._run_and_report(Command("init", None, introduction.nonce), lambda: self._introduce(introduction))

    def begin(self) -> None:
        """Note that a session is open, which reports then include. Weights change only in ``commit``."""
        self._open = True

    def obey(self, command: Command) -> None:
        """Execute ``command``, and report."""
        phases: dict[str, Callable[[Version], dict[str, Any] | None]] = {
            "prepare": lambda version: self._prepare(version, command),
            "commit": self._commit,
            "abort": self._abort,
            "audit": lambda version: self._audit(version, command),
        }
        work = phases.get(command.phase)
        if work is None:
            error = f"phase {command.phase!r} is not one of {', '.join(phases)}"
            self._report(command, error=error, kind=RemoteError.wire_code)
            return
        self._run_and_report(command, lambda: work(Version.parse(command.version or "")))

    def commit_here(self, version: str, nonce: str) -> dict[str, Any] | None:
        """Commit for a switch by one command, and return the report instead of sending it."""
        self._commit_reports = []
        try:
            self.obey(Command("commit", version, nonce))
            return self._commit_reports[0] if self._commit_reports else None
        finally:
            self._commit_reports = None

    def settle(self) -> None:
        """Make the commit permanent. The session stays open for later commands."""
        if self._installation is not None:
            self._installation.finish()

    def finish(self) -> None:
        """Make the commit permanent, free the overwritten values, and close the session."""
        self._open = self._pausing = False
        self.settle()

    def stop(self) -> None:
        for job in self._jobs:
            job.stop()

    def close(self) -> None:
        self.stop()
        self._heartbeat.end()

    # -- phases

    def _introduce(self, introduction: Introduction) -> dict[str, Any]:
        found = self._installation_for(Layout.from_document(self._client.layout_document()))
        if introduction.run != self._run:
            self.stop()
            self._run = introduction.run
            found.change_run()
        if introduction.forget:
            self.stop()
            found.forget()
        self._pausing |= introduction.pausing
        return {
            "open": self._open,
            "pausing": self._pausing,
            "core": introduction.core,
            "doubtful": found.doubtful,
            "before": str(found.before) if found.before else None,
            "follows": self._model.use_schedule is not None,
            "lacks": list(self._lacks),
            "accounts": tensor_accounts.pack(found.accounts(self._lacks)),
            "prepared": str(found.prepared) if found.prepared else None,
            "blocks": sum(len(b) for b in found.mapping.blocks.values()),
            "reload": len(found.mapping.reload),
            "reason": next(iter(found.mapping.reload.values()), None),
        }

    def _installation_for(self, layout: Layout) -> Installation:
        """Return the current installation, or a new one if the run's layout has changed, for example by an added
        adapter. In that case, the weights are none of the run's versions.
        """
        was = self._installation
        if was is not None and was.layout == layout:
            return was
        self.stop()
        found = self._installation_of(layout)
        if was is not None:
            found.doubtful, found.before = was.doubtful, was.held or was.before
        compile_digest_kernels(layout)
        self._installation = found
        return found

    def _installation_of(self, layout: Layout) -> Installation:
        """Create an installation of the model, of the run's adapters, or of both if the run has both. If the engine
        takes no adapters, only the model is installed.
        """
        model, names = self._model, [tensor.name for tensor in layout.tensors]
        self._lacks = ()
        if alone := adapters_of(names):
            weights = AdapterWeights(layout, alone)
            with model.loading():
                followers = model.followers(weights)
                return Installation(weights, layout, None, model.use_schedule, followers)
        derived = model.derived_parts()
        beside = adapters_beside(names)
        if beside and derived:
            raise LocalError(
                "the run has LoRA adapters beside its model, and p2pcast installs these beside models that it edits in"
                f" place; it loads this one as a whole ({derived[0]})"
            )
        with model.loading():
            whole, found = self._with_adapters(layout, beside) if beside else (model.model, None)
            return Installation(
                whole,
                layout,
                DerivedParts(derived, model.reload_all) if derived else None,
                model.use_schedule,
                found,
                loading_form=model.loading_form,
                settings=model.settings,
            )

    def _with_adapters(self, layout: Layout, adapters: tuple[str, ...]) -> tuple[ModelBesideAdapters, Followers | None]:
        if not self._model.takes_adapters:
            self._lacks = adapters
            self._log.warning(
                "p2pcast: this server takes no LoRA adapters, and the run has %s: it gets the model alone",
                ", ".join(adapters),
            )
            return ModelBesideAdapters(self._model.model, adapters, None), None
        weights = AdapterWeights(layout, adapters)
        followers = self._model.followers(weights)
        return ModelBesideAdapters(self._model.model, adapters, weights), followers

    def _prepare(self, version: Version, command: Command) -> None:
        """Fetch and stage in a thread, which reports when it is done."""
        found = self._ready()
        self._make_room()
        with self._model.loading():
            found.check_storages()
        self._start(command, lambda cancelled: found.prepare(self._client, version, cancelled, whole=command.whole))

    def _commit(self, version: Version) -> dict[str, Any]:
        """Switch synchronously; the engine runs no step meanwhile."""
        found = self._ready()
        with self._model.loading():
            mark = found.commit(version)
        if self._model.device.type != "cpu":
            torch.accelerator.synchronize()
        return {"mark": mark}

    def _abort(self, version: Version) -> dict[str, Any]:
        self.stop()
        return {"rolled_back": self._ready().abort()}

    def _audit(self, version: Version, command: Command) -> None:
        """Compute digests of the live weights in a thread, which reports them."""
        found = self._ready()
        self._make_room()
        differing = found.differing_copies()  # not in the thread, because the engine moves its copies between steps

        def audit(cancelled: Callable[[], bool]) -> dict[str, Any] | None:
            if found.held != version:
                raise IntegrityError(f"this rank holds {found.held or 'no known version'}, not {version}")
            entries = found.audit(self._client, version, cancelled, differing)
            return None if cancelled() else {"digests": entries}

        self._start(command, audit)

    # -- plumbing

    def _ready(self) -> Installation:
        if self._installation is None:
            raise LocalError("this rank isn't initialised: the peer introduces itself first")
        return self._installation

    def _start(self, command: Command, work: Callable[[Callable[[], bool]], dict[str, Any] | None]) -> None:
        self._jobs.append(_Job(command.phase, lambda cancelled: self._run_and_report(command, lambda: work(cancelled))))

    def _make_room(self) -> None:
        """Cancel all jobs before one more is started. Raises RetryableError if too many hang."""
        self.stop()
        self._jobs = [job for job in self._jobs if job.alive]
        if len(self._jobs) >= _MAX_JOBS:
            raise RetryableError(
                f"{len(self._jobs)} earlier commands still hang in this rank; "
                "see the server's log, or restart the server"
            )

    def _run_and_report(self, command: Command, work: Callable[[], dict[str, Any] | None]) -> None:
        """Run ``work`` and report its result or error. If it returns None, it reports later or not at all."""
        began = time.monotonic()
        try:
            device = self._model.device
            if device.type != "cpu":
                torch.accelerator.set_device_index(device.index or 0)
            outcome = work()
        except P2PCastError as error:
            self._report(command, error=str(error), kind=error.wire_code)
        except Exception as error:  # noqa: BLE001 - the report carries it
            self._log.exception("p2pcast: %s of version %s failed", command.phase, command.version)
            self._report(command, error=f"{type(error).__name__}: {error}"[:2000], kind=LocalError.wire_code)
        else:
            if outcome is not None:
                self._report(command, took_us=int((time.monotonic() - began) * 1e6), **outcome)

    def _report(self, command: Command, *, error: str | None = None, **details: Any) -> None:
        report = {
            "engine": self._engine,
            "rank": self._model.rank,
            "ranks": self._model.ranks,
            "incarnation": self._incarnation,
            "phase": command.phase,
            "version": command.version,
            "nonce": command.nonce,
            "held": self.held,
            "error": error,
            **details,
        }
        if self._commit_reports is not None and command.phase == "commit":  # other phases report from their own threads
            self._commit_reports.append(report)
            return
        try:
            self._client.report(report)
        except Exception as failure:  # noqa: BLE001 - a value that cannot be sent must not reach the engine
            outcome = error or "done"
            self._log.error(
                "p2pcast: %s of version %s (%s) could not be reported: %s",
                command.phase,
                command.version,
                outcome,
                failure,
            )
