"""An engine of two ranks in memory, which carries out an installer's instructions at once, and fails on command."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from installer_host import ONE
from played_vllm import LAYOUT, Rank, digest_of

from p2pcast.ground.errors import P2PCastError
from p2pcast.ground.version import Version
from rollout_node.installers.install_instructions import (
    Act,
    Compare,
    CoreAnswer,
    CoreSwitch,
    Instruction,
    Introduce,
    Meet,
    Met,
    Pause,
    RankCommand,
    Report,
    SetLabel,
    raise_first,
)
from rollout_node.installers.install_machine import Flow, InstallMachine, MachineInputs, Manner
from rollout_node.installers.install_state import InstallState, StillRunningError

Fault = Callable[[Instruction], BaseException | None]


def no_fault(instruction: Instruction) -> None: ...


class PlayedEngine:
    """``trail``: changes at the engine, in order. ``before`` and ``after``: errors instead of an instruction, and
    of an answer that is lost. ``resumes``: the core is in time.
    """

    def __init__(self, *, core: bool = False) -> None:
        self.ranks = [Rank(0), Rank(1)]
        self.core, self.resumes, self.busy, self.paused = core, True, False, False
        self.label, self.incarnation = "none", 0
        self.clears: bool | None = None
        self.trail: list[str] = []
        self.before: Fault = no_fault
        self.after: Fault = no_fault
        self.restarted = False
        """No call has succeeded since: the installer may not have noticed."""
        self._epochs: dict[str, set[str | None]] = {}

    @property
    def held(self) -> list[str | None]:
        return [rank.held for rank in self.ranks]

    def take(self) -> list[str]:
        found, self.trail = self.trail, []
        return found

    def restart(self) -> None:
        self.ranks = [Rank(0), Rank(1)]
        self.incarnation, self.label, self.paused = self.incarnation + 1, "none", False
        self.restarted = True

    def check(self, state: InstallState) -> None:
        """Holds before and after each instruction."""
        state.validate()
        if not self.paused:
            assert len({rank.live for rank in self.ranks}) == 1, "mixed weights are served"
            assert self.label == "none" or {self.label} == set(self.held), "answers have another version's label"
            if state.ready and not self.restarted:
                assert {self.label, *self.held} == {str(state.committed)}, "ready, and behind"
        if state.serving_epoch is not None:
            assert self._epochs.setdefault(state.serving_epoch, set(self.held)) == set(self.held), (
                "one epoch, one version"
            )

    # -- instructions

    def carry_out(self, instruction: Instruction) -> Any:
        if (fault := self.before(instruction)) is not None:
            raise fault
        answer = self._answer(instruction)
        if (lost := self.after(instruction)) is not None:
            raise lost
        return answer

    def _answer(self, instruction: Instruction) -> Any:
        match instruction:
            case Meet():
                return Met(self._introduced(Introduce()), len(self.ranks))
            case Introduce():
                return self._introduced(instruction)
            case RankCommand(phase, version, dense, whole):
                reports = self._command(phase, str(version), dense=dense, whole=whole)
                raise_first("e", reports, phase)
                return reports
            case Compare(_, entries, digests):
                return (["w"] if any(entry[4] != digests[0] for entry in entries) else []), []
            case Pause(clear_cache):
                self.trail.append("pause")
                self.paused, self.clears = True, clear_cache
            case SetLabel(version):
                self.label = str(version)
            case CoreSwitch():
                return self._switch(instruction)
            case Act():
                return self._act(instruction)
        return None

    def _act(self, act: Act) -> Any:
        match act:
            case Act.READ_LABEL:
                return self.label
            case Act.ASK_PAUSED:
                return self.paused
            case Act.COUNT_TOKENS:
                return 9
            case Act.BEGIN | Act.FINISH:
                for rank in self.ranks:
                    rank.open = act is Act.BEGIN
                    if act is Act.FINISH:
                        rank.before, rank.pausing = None, False
            case Act.DRAIN:
                self.trail.append("drain")
                self.paused = True
            case Act.RESUME:
                self.trail.append("resume")
                self.paused = False
            case Act.CLEAR_CACHES:
                self.trail.append("clear caches")
        return None

    def _introduced(self, info: Introduce) -> list[Report]:
        self.trail += ["note a pause"] * info.pausing + ["forget"] * info.forget
        found = []
        for rank in self.ranks:
            rank.pausing |= info.pausing
            if info.forget:
                rank.held = None
            report = {"rank": rank.number, "ranks": 2, "held": rank.held, "open": rank.open, "pausing": rank.pausing}
            report |= {"prepared": rank.prepared, "doubtful": rank.doubtful, "core": self.core}
            found.append(report | {"incarnation": f"{self.incarnation}"} | rank.answers.get("init", {}))
        if {self.label} != set(self.held):  # as vLLM's core with p2pcast's plugin
            self.label = "none"
        return found

    def _command(self, phase: str, version: str, *, dense: bool, whole: bool = False) -> list[Report]:
        self.trail.append(f"{phase} whole" if whole else phase)
        found = []
        for rank in self.ranks:
            made: dict[str, Any] = {"rank": rank.number, "error": None}
            match phase:
                case "prepare":
                    made |= rank.prepare(version, whole=whole)
                case "commit":
                    made |= rank.commit(version)
                    rank.before, rank.doubtful = None if dense else rank.before, False
                case "abort":
                    made |= rank.abort()
                    rank.before = rank.prepared = None
                case _:
                    made |= {"digests": [rank.entry]}
            found.append(made | rank.answers.get(phase, {}))
        return found

    def _switch(self, order: CoreSwitch) -> CoreAnswer:
        if self.busy:
            raise StillRunningError("busy")
        reports = self._command("commit", str(order.version), dense=order.dense)
        self.trail[-1] = "switch"
        good = self.resumes and all(r["error"] is None and r.get("mark") == order.marks[r["rank"]] for r in reports)
        if good:
            self.label = str(order.version)
            for rank in self.ranks:
                rank.before = None
        self.paused = not (good and order.ours)
        return CoreAnswer(reports, {"resumed": good and order.ours, "pause_us": 7}, 60.0)


class Seat:
    """A peer's machine at an engine; a successor takes its place without its memory."""

    def __init__(self, engine: PlayedEngine, **manner: Any) -> None:
        self.engine, self.manner = engine, manner
        self.begin()

    def begin(self) -> None:
        ticks, names = itertools.count(), itertools.count()
        given = {"kv": "recompute", "driver": "peer", "safe_point": "step", "every_rank": True} | self.manner
        inputs = MachineInputs(
            lambda: LAYOUT, lambda: float(next(ticks)), lambda: 5e8, lambda: f"{id(self)}-{next(names)}"
        )
        self.machine = InstallMachine("e", Manner(**given), inputs)

    @property
    def state(self) -> InstallState:
        return self.machine.state

    def run(self, flow: Flow[Any]) -> Any:
        """The flow's result; the engine and the state are checked around each instruction."""
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                instruction = flow.send(answer) if error is None else flow.throw(error)
            except StopIteration as ended:
                self.engine.restarted = False
                assert self.state.committed is None or set(self.engine.held) == {str(self.state.committed)}
                return ended.value
            finally:
                self.engine.check(self.state)
            try:
                answer, error = self.engine.carry_out(instruction), None
            except BaseException as raised:  # noqa: BLE001 - the flow raises it again
                answer, error = None, raised

    def install(self, version: Version) -> Any:
        """With an external driver, under its pause."""
        self.run(self.machine.stage(version))
        external = self.manner.get("driver") == "external"
        self.engine.paused |= external
        report = self.run(self.machine.commit(version))
        if external:
            self.engine.paused = False
        return report

    def heal(self, version: Version) -> None:
        """Install the version as a runner does: again until that has succeeded."""
        for _ in range(4):
            try:
                self.install(version)
            except P2PCastError:
                continue
            return
        raise AssertionError(f"{version} is not in use after four tries")


def seated(version: Version | None = ONE, *, core: bool = False, **manner: Any) -> Seat:
    """A machine whose engine serves the version."""
    seat = Seat(PlayedEngine(core=core), **manner)
    seat.run(seat.machine.meet())
    if version is not None:
        seat.install(version)
        assert (seat.state.ready, seat.engine.label) == (True, str(version))
        assert {rank.live for rank in seat.engine.ranks} == {digest_of(str(version))}
    seat.engine.take()
    return seat
