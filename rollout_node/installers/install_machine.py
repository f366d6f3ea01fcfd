"""Decides the next step of an installer at its engine. It does no I/O: events come in, instructions go out.

Each installer call is a *flow*: ``meet``, ``check``, ``stage``, ``commit`` or ``audit``. A flow yields an instruction;
its caller sends back the answer, or throws the error, including a cancellation. One flow runs at a time. Only
``InstallMachine.note`` writes the state, using the table ``install_state.TRANSITIONS``.

Guarantees:

- The engine generates while a version is staged. It is paused only for the commit, and no request fails.
- **Mixed weights are never served.** An engine is resumed only after every rank has confirmed the same version: all
  ranks committed, or all rolled back. A rank confirms a version by a digest of the values read back after writing
  (``in_engine.install_proof``). Otherwise the engine stays paused, its requests wait, and the next ``stage`` writes the
  whole state under the same pause.
- A delta is prepared only on the version that it needs. All ranks together prove this: they digest their live values at
  the changed places, and the sum must equal the patch's.
- The ranks note this peer's pause before it starts. If the peer then dies, its successor resumes the engine if all
  ranks agree, and repairs it if they do not. Another process's pause is never ended here.
- With ``driver="external"``, another process pauses and resumes the engine, and this peer does neither. ``commit`` then
  requires a paused engine, and may write the whole state there.

An engine may switch at one of two safe points. With ``step``, a running request continues with the new weights. With
``drain``, new requests are held at the engine and running ones finish with the old weights, as with vLLM's
``pause?mode=wait`` or at the end of SparrowRL's current generation batch (section 5.2), so each request has one
version. If requests outlast the limit, the engine is resumed and stays ready, at its old version.

``kv`` is explained in ``p2pcast.rollouts.kv_policy``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

from p2pcast.checkpoint.adapter_form import adapter_of
from p2pcast.codec.layout import Layout
from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.rollouts.kv_policy import KvPolicy, recomputes
from rollout_node.in_engine import tensor_accounts
from rollout_node.in_engine.tensor_accounts import Account
from rollout_node.installers.install_instructions import (
    Act,
    Compare,
    CoreSwitch,
    Instruction,
    Introduce,
    Meet,
    Pause,
    RankCommand,
    Report,
    SetLabel,
    common_version,
    raise_first,
)
from rollout_node.installers.install_state import (
    KNOWN,
    NOTHING_STAGED,
    TRANSITIONS,
    Condition,
    EngineEvent,
    FalseReportError,
    InstallState,
    ServerAwayError,
    StagedVersion,
    StillRunningError,
    Traits,
)
from rollout_node.installers.installer import Audit, CommitReport, Driver

log = logging.getLogger("p2pcast.peer")

SafePoint = Literal["step", "drain"]
T = TypeVar("T")
Flow = Generator[Instruction, Any, T]


class Manner(NamedTuple):
    """How a peer drives its engine. ``every_rank``: whether all of the server's ranks report to this peer."""

    kv: KvPolicy
    driver: Driver
    safe_point: SafePoint
    every_rank: bool


class MachineInputs(NamedTuple):
    """``layout`` returns the run's layout, ``steady_s`` and ``unix_s`` the time, ``token`` a new name at each call."""

    layout: Callable[[], Layout]
    steady_s: Callable[[], float]
    unix_s: Callable[[], float]
    token: Callable[[], str]


class InstallMachine:
    """Decides for one engine. ``name`` starts its error messages."""

    def __init__(self, name: str, manner: Manner, inputs: MachineInputs) -> None:
        self.state = InstallState()
        self._name, self._manner, self._inputs = name, manner, inputs
        self._clears = recomputes(manner.kv)
        self._drives = manner.driver == "peer"

    def note(self, event: EngineEvent, version: Version | None = None, **found: Any) -> None:
        """Apply an event to the state; nothing else does. ``version``: proved or committed. ``found``: other fields."""
        was = self.state
        condition = TRANSITIONS[event].get(was.condition, was.condition)
        known, epoch = condition in KNOWN, was.serving_epoch
        if event in (EngineEvent.RESTORED, EngineEvent.COMMITTED):
            epoch = self._inputs.token() if self._manner.safe_point == "drain" else None
        if not known or event is EngineEvent.WRITING:
            epoch = None
        self.state = replace(
            was,
            condition=condition,
            committed=(version or was.committed) if known else None,
            serving_epoch=epoch,
            **({"staged": None if event in NOTHING_STAGED else was.staged} | found),
        )

    # -- calls of the installer

    def meet(self) -> Flow[list[Report]]:
        """Learn the ranks' versions, and their description of the engine. A restart discards earlier events. If the
        run's layout has changed, the ranks hold no version of the run, and compute from the previous one.
        """
        reports: list[Report]
        reports, ranks = yield Meet()
        # One sparse rank is enough to change what the engine samples. A pipeline's first rank may have only dense
        # layers.
        follows = any(r.get("follows") is True for r in reports)
        lacks = tuple(sorted({str(name) for r in reports for name in r.get("lacks", ())}))
        skipped, unknown = self._accounts([r["accounts"] for r in reports if "accounts" in r])
        incarnations = {r["rank"]: r["incarnation"] for r in reports}
        traits = Traits(incarnations, ranks, follows, lacks, frozenset(skipped))
        if incarnations == self.state.traits.incarnations:
            self.note(EngineEvent.MET, traits=traits)
        else:
            self.note(EngineEvent.RESTARTED, traits=traits, pausing=False)
        if (common_version(reports) or common_version(reports, "before")) != self.state.committed:
            self.note(EngineEvent.LOST)
        if unknown:
            raise LocalError(
                f"{self._name}: the run is refused: the engine reads nothing from {len(unknown)} of its tensors, the "
                f"first {unknown[0]}; start the engine on a folder of the run's newest version, or leave the tensors "
                "out of the run"
            )
        return reports

    def check(self) -> Flow[None]:
        try:
            label, committed = (yield Act.READ_LABEL), self.state.committed
            if committed is None:
                return
            if label != str(committed):  # a different server, or another process set the label: ask the ranks
                held = common_version((yield from self.meet()))
                if held != committed:
                    self.note(EngineEvent.LOST)
                    log.warning(
                        "%s: holds %s now: restarted, or changed by another process", self._name, held or "nothing"
                    )
                    return
                yield SetLabel(held)
            self.note(EngineEvent.ANSWERED)
        except P2PCastError as error:
            self._unreachable(error)
            raise

    def stage(self, version: Version) -> Flow[None]:
        try:
            self.note(EngineEvent.DROPPED)
            reports = yield from self.meet()
            held = common_version(reports)
            if any(r["doubtful"] for r in reports) or len({r["held"] for r in reports}) > 1:
                self.note(EngineEvent.DOUBTED)
            yield from self._begin(reports)
            if self._drives:
                yield from self._settle(reports, held)
            if held == version and self.state.condition is not Condition.DOUBTED:
                if (yield Act.READ_LABEL) != str(version):
                    yield SetLabel(version)
                yield Act.FINISH
                self.note(EngineEvent.STAGED, staged=StagedVersion(version, report=CommitReport(0.0, 0)))
                return
            prepared = yield from self._prepare(version)
            dense = any(r["install"] == "dense" for r in prepared)
            if dense:
                self.note(EngineEvent.WHOLE)
            staged = StagedVersion(version, {r["rank"]: r["mark"] for r in prepared}, dense)
            if dense and self._drives:
                staged = replace(staged, report=(yield from self._switch(staged, EngineEvent.PROVED)))
            self.note(EngineEvent.STAGED, staged=staged)
        except BaseException as error:
            self._failed(error)
            raise

    def commit(self, version: Version) -> Flow[CommitReport]:
        staged = self.state.staged
        if staged is None or staged.version != version:
            raise LocalError(f"{self._name}: {version} isn't staged, {staged.version if staged else 'nothing'} is")
        if not self._drives and staged.report is None and not (yield Act.ASK_PAUSED):
            raise RetryableError(
                f"{self._name}: not paused; with --driver external, pause the engine around the commit"
            )
        try:
            if (report := staged.report) is None:
                report = yield from self._switch(staged, EngineEvent.COMMITTED)
            elif (yield Act.READ_LABEL) == str(version):
                self.note(EngineEvent.COMMITTED, version)
            else:
                self.note(EngineEvent.LOST)
                raise RetryableError(f"{self._name}: no longer holds {version}; it is staged again")
        except BaseException as error:
            self._failed(error)
            raise
        if lacks := self.state.traits.lacks:
            report = replace(report, detail={**report.detail, "lacks": ", ".join(lacks)})
        return report

    def audit(self, layout: Layout, digests: Mapping[int, int]) -> Flow[Audit]:
        try:
            version = self.state.committed
            if version is None:
                raise LocalError(f"{self._name}: nothing is committed, so there is nothing to audit")
            self.note(EngineEvent.DROPPED)
            reports = yield from self.meet()
            if common_version(reports) != version:
                if common_version(reports, "before") == version:
                    raise RetryableError(f"{self._name}: the run has other tensors since {version}: nothing to compare")
                raise RetryableError(f"{self._name}: no longer holds {version}; it is installed anew")
            yield from self._begin(reports)
            try:
                reports = yield RankCommand("audit", version)
            finally:
                yield Act.FINISH
            wrong, unknown = yield Compare(layout, [entry for r in reports for entry in r["digests"]], digests)
            if wrong:
                log.error("%s: %d tensors aren't those of %s, %s first", self._name, len(wrong), version, wrong[0])
                yield from self._distrust()
            lacks, skipped = self.state.traits.lacks, self.state.traits.skipped
            unknown = [name for name in unknown if adapter_of(name) not in lacks and name not in skipped]
            return Audit(version, wrong, unknown, lacks)
        except P2PCastError as error:
            self._unreachable(error)
            raise

    # -- errors

    def _failed(self, error: BaseException) -> None:
        self.note(EngineEvent.DROPPED if isinstance(error, StillRunningError) else EngineEvent.FAILED)
        self._forget_process(error)

    def _unreachable(self, error: P2PCastError) -> None:
        self.note(EngineEvent.UNREACHABLE)
        self._forget_process(error)

    def _forget_process(self, error: BaseException) -> None:
        if isinstance(error, ServerAwayError):
            self.note(EngineEvent.LOST)

    # -- staging

    def _accounts(self, packed: list[bytes]) -> tuple[list[str], list[str]]:
        """Names of the run's tensors that all ranks together skip, and of those unknown to them."""
        if not packed:  # ranks of an earlier release do not account for tensors
            return [], []
        tensors = self._inputs.layout().tensors
        found = list(zip(tensors, tensor_accounts.together(packed, len(tensors)), strict=True))
        skipped, unknown = ([t.name for t, a in found if a is k] for k in (Account.SKIPPED, Account.UNKNOWN))
        return skipped, unknown

    def _begin(self, reports: list[Report]) -> Flow[None]:
        """Open the server's session, unless the ranks report an open one because a peer died during an update."""
        opened = {bool(r["open"]) for r in reports}
        if len(opened) > 1:
            raise LocalError(f"{self._name}: its workers disagree whether an update is under way; restart the server")
        if opened == {False}:
            yield Act.BEGIN

    def _prepare(self, version: Version) -> Flow[list[Report]]:
        """Stage the version at every rank. If the live weights differ from the version that the ranks reported, stage
        the whole state.
        """
        if self.state.condition is not Condition.DOUBTED:
            try:
                return (yield from self._prepare_once(version, whole=False))
            except IntegrityError as error:
                if not isinstance(error, FalseReportError) and common_version((yield Introduce())) is not None:
                    raise  # the version is at fault: the engine keeps its current version
                log.error("%s", error)
                yield from self._distrust()
        return (yield from self._prepare_once(version, whole=True))

    def _prepare_once(self, version: Version, *, whole: bool) -> Flow[list[Report]]:
        reports: list[Report] = yield RankCommand("prepare", version, whole=whole)
        sparse = [r for r in reports if r["install"] == "sparse"]
        if len({r["from"] for r in sparse}) > 1 or len({str(r["expected"]) for r in sparse}) > 1:
            raise FalseReportError(f"{self._name}: the ranks don't build {version} on the same version")
        if sparse and len(sparse) == len(reports):
            entries = [entry for r in sparse for entry in r["grown"]]
            wrong, _ = yield Compare(self._inputs.layout(), entries, dict(sparse[0]["expected"]))
            if wrong:
                raise FalseReportError(
                    f"{self._name}: {wrong[0]} ({len(wrong)} tensors in all): the ranks' live values differ from "
                    f"{sparse[0]['from']}"
                )
        return reports

    # -- this peer's pause

    def _pause(self) -> Flow[None]:
        ours = self.state.pausing or not (yield Act.ASK_PAUSED)
        if ours and not self.state.pausing:
            yield Introduce(pausing=True)
        self.note(EngineEvent.PAUSE, pausing=ours)
        yield Pause(self._clears)

    def _resume(self) -> Flow[None]:
        """Resume the engine, unless another process paused it."""
        if self.state.pausing:
            yield Act.RESUME
            self.note(EngineEvent.PAUSE, pausing=False)

    def _settle(self, reports: list[Report], held: Version | None) -> Flow[None]:
        """If all ranks agree, end the pause left by a peer that died, or by this peer after a failure. Pause the engine
        if a rank's version is in doubt.
        """
        paused = yield Act.ASK_PAUSED
        self.note(EngineEvent.PAUSE, pausing=self.state.pausing or (paused and any(r["pausing"] for r in reports)))
        if self.state.condition is Condition.DOUBTED:
            log.error("%s: its ranks don't hold one version; it is paused until they do", self._name)
            yield from self._pause()
        elif paused and self.state.pausing and held is not None:
            log.warning("%s: was left paused, and is resumed at %s", self._name, held)
            yield SetLabel(held)
            yield from self._resume()

    def _distrust(self) -> Flow[None]:
        """Ignore the ranks' versions and pause the engine until a dense install has been confirmed."""
        self.note(EngineEvent.DOUBTED)
        yield Introduce(forget=True)
        if self._drives:
            yield from self._pause()

    # -- the switch

    def _switch(self, staged: StagedVersion, done: EngineEvent) -> Flow[CommitReport]:
        """Pause, commit on all ranks, resume, finish. Before it raises, it undoes everything that can be undone.
        ``done``: the event to note once the engine runs with the new version.
        """
        paused = yield Act.ASK_PAUSED
        ours = self._drives and (self.state.pausing or not paused)
        reports = yield Introduce(pausing=ours)
        for report in reports:
            if not report["open"] or report["prepared"] != str(staged.version):
                raise RetryableError(
                    f"{self._name}: rank {report['rank']} isn't prepared for {staged.version} any more; it is staged "
                    "again"
                )
        self.note(EngineEvent.PAUSE, pausing=ours)
        waited = yield from self._reach_safe_point(ours=ours, paused=paused)
        tokens = (yield Act.COUNT_TOKENS) if self._clears else 0
        began_unix_s = self._inputs.unix_s()
        self.note(EngineEvent.WRITING)
        in_core = self._in_core(reports)
        try:
            took, proofs = yield from (self._write_in_core if in_core else self._write_by_routes)(staged, ours)
        except BaseException as error:
            if not in_core or not isinstance(error, StillRunningError):
                yield from self._roll_back(staged.version, error)
                raise
            self.note(EngineEvent.RESTORED)  # nothing was written
            if self.state.condition is not Condition.DOUBTED:
                yield from self._resume()
            raise
        if in_core:
            self.note(EngineEvent.PAUSE, pausing=False)
        else:
            self.note(EngineEvent.PROVED, staged.version)
            proved = self._inputs.steady_s()
            yield from self._resume()
            resuming_s = self._inputs.steady_s() - proved
            took |= {name: took[name] + resuming_s for name in ("paused_s", "resuming_s")}
        self.note(done, staged.version)
        try:
            yield Act.FINISH
        except P2PCastError as error:  # the version is in use already, and the next stage finds the session open
            log.warning("%s: %s", self._name, error)
        took |= {"worker_s": max(r["took_us"] for r in proofs) / 1e6} | waited
        detail = {"began_unix_s": round(began_unix_s, 6)} | {name: round(seconds, 6) for name, seconds in took.items()}
        return CommitReport(took["paused_s"], tokens, detail, dense=staged.dense)

    def _reach_safe_point(self, *, ours: bool, paused: bool) -> Flow[dict[str, float]]:
        """Wait until the engine may switch. Returns durations by name. After an error, the engine resumes.

        ``ours``: whether no other program has paused the engine. Under this peer's own pause it does not wait: that is
        a repair, and wrong weights must not produce more tokens. Under another program's pause, no request finishes.
        """
        if self._manner.safe_point == "step":
            return {}
        if not ours:
            raise RetryableError(
                f"{self._name}: paused by another program, so that running requests cannot end before the switch "
                "(--commit-safe-point drain); resume the engine"
            )
        if paused:
            return {"drained_s": 0.0}
        began = self._inputs.steady_s()
        try:
            yield Act.DRAIN
        except BaseException:
            try:
                yield from self._resume()
            except P2PCastError:  # the ranks know of this pause, and the next stage ends it
                pass
            raise
        return {"drained_s": self._inputs.steady_s() - began}

    def _in_core(self, reports: Sequence[Report]) -> bool:
        """Whether the engine core can switch by itself (``vllm_plugin.engine_core``) and all of its ranks report here.
        In vLLM, the data-parallel ranks of a dense model are separate engines, each with its own core, so no rank
        counts all ranks.
        """
        alone = all(r["core"] and r["ranks"] == self.state.traits.ranks for r in reports)
        return alone and self._drives and self._manner.every_rank

    def _write_in_core(self, staged: StagedVersion, ours: bool) -> Flow[tuple[dict[str, float], Sequence[Report]]]:
        """Switch by one command, after which the engine runs with the new version or is paused. Returns durations by
        name, and the ranks' reports.
        """
        began, version = self._inputs.steady_s(), staged.version
        reports, core, deadline_s = yield CoreSwitch(version, staged.marks, self._clears, ours, staged.dense)
        if (missing := self.state.traits.ranks - len(reports)) > 0:
            raise RetryableError(f"{self._name}: {missing} workers gave no report of the commit")
        raise_first(self._name, reports, "commit")
        self._confirm(staged, reports)
        if ours and not core["resumed"]:
            raise RetryableError(f"{self._name}: switching to {version} took longer than {deadline_s:g} s")
        return {"paused_s": core["pause_us"] / 1e6, "command_s": self._inputs.steady_s() - began}, reports

    def _write_by_routes(self, staged: StagedVersion, ours: bool) -> Flow[tuple[dict[str, float], Sequence[Report]]]:
        """Like ``_write_in_core``, but with one command per step, for an engine that another process pauses or that has
        several cores. The engine stays paused.
        """
        clock = self._inputs.steady_s
        began = clock()
        if self._drives:
            yield Pause(self._clears)
        elif self._clears:
            yield Act.CLEAR_CACHES
        paused = clock()
        reports = yield RankCommand("commit", staged.version, dense=staged.dense)
        self._confirm(staged, reports)
        written = clock()
        yield SetLabel(staged.version)
        labelled = clock()
        took = {"paused_s": labelled - began, "pausing_s": paused - began, "writing_s": written - paused}
        return took | {"resuming_s": labelled - written}, reports

    def _confirm(self, staged: StagedVersion, reports: Sequence[Report]) -> None:
        """Raises FalseReportError unless every rank holds the values that it prepared."""
        for report in reports:
            rank, mark = report["rank"], report.get("mark")
            if report["held"] != str(staged.version) or mark is None or mark != staged.marks.get(rank):
                raise FalseReportError(
                    f"{self._name}: rank {rank} says that it holds {report['held']}, but the values prepared for "
                    f"{staged.version} are not there"
                )

    def _roll_back(self, version: Version, cause: BaseException) -> Flow[None]:
        """Restore every rank's old values after the switch to ``version`` failed with ``cause``. The engine resumes if
        all ranks confirm the same version. Otherwise it stays paused, its version is unknown, and the next ``stage``
        writes the whole state. Raises no P2PCastError, because the caller raises ``cause``.
        """
        self.note(EngineEvent.FAILED)
        try:
            held = common_version((yield RankCommand("abort", version)))
            if held is None or (held == version and isinstance(cause, FalseReportError)):
                yield from self._distrust()
                raise IntegrityError("its ranks hold different versions")
            self.note(EngineEvent.LOST if held != self.state.committed else EngineEvent.RESTORED)
            if (yield Act.READ_LABEL) != str(held):
                yield SetLabel(held)
            yield from self._resume()
            yield Act.FINISH
        except BaseException as error:
            self.note(EngineEvent.LOST)
            stays, why = "it stays paused" if self._drives else "it must stay paused", str(error) or "cancelled"
            log.error("%s: %s could not be taken back (%s): %s until it is repaired", self._name, version, why, stays)
            if not isinstance(error, P2PCastError):
                raise
