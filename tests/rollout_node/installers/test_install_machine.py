"""The installer's machine at an engine in memory: its steps, and that no fault leaves an engine mixed or behind."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from installer_host import ONE, TWO
from played_engine import PlayedEngine, Seat, seated
from played_vllm import LAYOUT, digest_of

from p2pcast.ground.errors import IntegrityError, LocalError, P2PCastError, RetryableError
from p2pcast.ground.version import Version
from p2pcast.rollouts.kv_policy import KV_POLICIES, KvPolicy, recomputes
from rollout_node.installers import install_machine
from rollout_node.installers.install_instructions import Act, CoreSwitch, Instruction, Pause, RankCommand, SetLabel
from rollout_node.installers.install_machine import InstallMachine, MachineInputs, Manner
from rollout_node.installers.install_state import (
    KNOWN,
    TRANSITIONS,
    Condition,
    EngineEvent,
    FalseReportError,
    InstallState,
    ServerAwayError,
    StagedVersion,
    StillRunningError,
)
from rollout_node.installers.installer import CommitReport

THREE = Version(0, 3)
ROUTES = ["note a pause", "pause", "commit", "resume"]
BY_ROUTES = {"every_rank": False}


def fails(wanted: Callable[[Instruction], bool], error: BaseException | None = None) -> Callable[[Instruction], Any]:
    return lambda instruction: (error or RetryableError("by a test")) if wanted(instruction) else None


def is_command(phase: str) -> Callable[[Instruction], bool]:
    return lambda instruction: isinstance(instruction, RankCommand) and instruction.phase == phase


# -- the table


def machine_in(condition: Condition) -> InstallMachine:
    inputs = MachineInputs(lambda: LAYOUT, lambda: 0.0, lambda: 0.0, lambda: "t")
    found = InstallMachine("e", Manner("recompute", "peer", "drain", True), inputs)
    found.state = InstallState(condition, ONE if condition in KNOWN else None, staged=StagedVersion(TWO))
    return found


@pytest.mark.parametrize("condition", Condition)
@pytest.mark.parametrize("event", EngineEvent)
def test_each_finding_leads_to_the_condition_of_the_table(event: EngineEvent, condition: Condition) -> None:
    machine = machine_in(condition)
    versions = {EngineEvent.PROVED: TWO, EngineEvent.COMMITTED: TWO}
    machine.note(event, versions.get(event))
    state = machine.state
    state.validate()
    assert state.condition is TRANSITIONS[event].get(condition, condition)
    assert state.committed in (None, versions.get(event, ONE))
    assert state.ready <= (condition in (Condition.READY, Condition.AWAY) or event is EngineEvent.COMMITTED)


def test_only_a_commit_ends_a_failure_or_a_whole_install() -> None:
    for event in (EngineEvent.FAILED, EngineEvent.WHOLE, EngineEvent.PROVED):
        made = {TRANSITIONS[event].get(condition) for condition in KNOWN}
        assert made == {Condition.UNREADY}
    to_ready = {c: [e for e, row in TRANSITIONS.items() if row.get(c) is Condition.READY] for c in Condition}
    assert to_ready[Condition.UNREADY] == [EngineEvent.COMMITTED]
    assert to_ready[Condition.AWAY] == [EngineEvent.ANSWERED, EngineEvent.COMMITTED]


def test_a_restart_or_a_proof_ends_doubts_and_nothing_else_does() -> None:
    doubted = Condition.DOUBTED
    ends = {event for event, row in TRANSITIONS.items() if row.get(doubted, doubted) is not doubted}
    assert ends == {EngineEvent.RESTARTED, EngineEvent.PROVED, EngineEvent.COMMITTED}


def test_a_whole_install_needs_the_shadow_before_its_write() -> None:
    assert InstallState(staged=StagedVersion(TWO, dense=True)).commit_needs_shadow
    assert not InstallState(staged=StagedVersion(TWO, dense=True, report=CommitReport(1.0))).commit_needs_shadow
    assert not InstallState(staged=StagedVersion(TWO)).commit_needs_shadow


def test_one_method_writes_the_state() -> None:
    tree = ast.parse(Path(str(install_machine.__file__)).read_text())
    writers = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "self.state" for target in node.targets)
    ]
    assert writers == ["__init__", "note"]


# -- pauses


@pytest.mark.parametrize("kv", KV_POLICIES)
@pytest.mark.parametrize("core", [False, True])
def test_the_kv_policy_decides_on_caches_and_counts(kv: KvPolicy, core: bool) -> None:
    seat = seated(core=core, kv=kv)
    orders: list[bool] = []
    seat.engine.before = lambda i: orders.append(i.clear_cache) if isinstance(i, Pause | CoreSwitch) else None
    report = seat.install(TWO)
    assert (orders, report.recomputed_tokens) == ([recomputes(kv)], 9 if recomputes(kv) else 0)


@pytest.mark.parametrize(("kv", "trail"), [("recompute", ["clear caches", "commit"]), ("keep", ["commit"])])
def test_with_an_external_driver_nothing_is_paused_or_resumed(kv: KvPolicy, trail: list[str]) -> None:
    seat = seated(driver="external", kv=kv, core=True)
    seat.install(TWO)
    assert seat.engine.take() == ["prepare", *trail]


def test_a_pause_of_another_process_is_never_ended() -> None:
    seat = seated()
    seat.engine.paused = True
    seat.install(TWO)
    assert seat.engine.take() == ["prepare", "pause", "commit"]
    assert (seat.engine.paused, seat.state.pausing, seat.state.committed) == (True, False, TWO)


def test_a_failed_resume_is_made_up_by_the_next_stage() -> None:
    seat = seated()
    seat.engine.before = fails(lambda i: i is Act.RESUME)
    with pytest.raises(RetryableError, match="by a test"):
        seat.install(TWO)
    assert (seat.engine.paused, seat.state.pausing, seat.state.condition) == (True, True, Condition.UNREADY)
    seat.engine.before = lambda i: None
    seat.install(TWO)
    assert seat.engine.take() == ["prepare", *ROUTES[:3], "resume"]


@pytest.mark.parametrize("label", ["0.1", "none"])
def test_the_pause_of_a_peer_that_died_ends_where_all_ranks_agree(caplog: Any, label: str) -> None:
    seat = seated()
    seat.engine.paused = seat.engine.ranks[1].pausing = True
    seat.engine.label = label
    seat.begin()
    seat.run(seat.machine.stage(TWO))
    assert (seat.engine.take(), seat.engine.paused, seat.engine.label) == (["resume", "prepare"], False, "0.1")
    assert "e: was left paused, and is resumed at 0.1" in caplog.text


def test_an_engine_whose_ranks_differ_stays_paused_and_is_written_whole(caplog: Any) -> None:
    seat = seated()
    first = seat.engine.ranks[0]
    first.commit("0.2")
    seat.engine.paused = first.pausing = True
    seat.begin()
    seat.run(seat.machine.stage(TWO))
    assert seat.engine.take() == ["pause", "prepare whole", "note a pause", "pause", "commit", "resume"]
    assert "e: its ranks don't hold one version; it is paused until they do" in caplog.text
    assert (seat.engine.held, seat.engine.paused, seat.state.ready) == (["0.2", "0.2"], False, False)


@pytest.mark.parametrize(("driver", "paused"), [("peer", True), ("external", False)])
def test_an_engine_in_doubt_is_paused_by_its_own_driver_alone(driver: str, paused: bool) -> None:
    seat = seated(driver=driver)
    for rank in seat.engine.ranks:
        rank.live = 7
    audit = seat.run(seat.machine.audit(LAYOUT, {0: digest_of("0.1")}))
    assert (audit.wrong, seat.state.condition, seat.engine.paused) == (["w"], Condition.DOUBTED, paused)
    assert seat.engine.take() == ["audit", "forget", *["note a pause", "pause"] * paused]


# -- staging


@pytest.mark.parametrize(
    ("answer", "logged"),
    [
        ({"from": "0.0"}, "e: the ranks don't build 0.2 on the same version"),
        ({"expected": [[0, 5]]}, "e: the ranks don't build 0.2 on the same version"),
        ({"grown": [[0, 0, [4], [1], 7]]}, "(1 tensors in all): the ranks' live values differ from 0.1"),
    ],
)
def test_ranks_that_do_not_hold_the_base_are_staged_whole(caplog: Any, answer: dict[str, Any], logged: str) -> None:
    seat = seated()
    seat.engine.ranks[1].answers["prepare"] = answer
    seat.run(seat.machine.stage(TWO))
    assert seat.engine.take()[:5] == ["prepare", "forget", "note a pause", "pause", "prepare whole"]
    assert logged in caplog.text


@pytest.mark.parametrize("kind", ["integrity", None])
def test_a_fault_of_the_version_changes_nothing_at_the_engine(kind: str | None) -> None:
    seat = seated()
    seat.engine.ranks[1].answers["prepare"] = {"error": "a patch is damaged", "kind": kind}
    with pytest.raises(P2PCastError, match="e: rank 1, prepare: a patch is damaged"):
        seat.run(seat.machine.stage(TWO))
    assert (seat.engine.take(), seat.state.condition, seat.state.committed) == (["prepare"], Condition.UNREADY, ONE)


def test_a_fault_at_ranks_without_a_common_version_is_repaired() -> None:
    seat = seated()
    seat.engine.paused = True
    seat.engine.ranks[1].answers["prepare"] = {"error": "another base", "kind": "integrity"}
    seat.engine.before = lambda i: setattr(seat.engine.ranks[0], "held", "0.0") if is_command("prepare")(i) else None
    with pytest.raises(IntegrityError, match="another base"):
        seat.run(seat.machine.stage(TWO))
    assert seat.engine.take() == ["prepare", "forget", "pause", "prepare whole"]


def test_one_rank_that_is_written_whole_needs_no_proof_of_the_base() -> None:
    seat = seated(driver="external")
    seat.engine.ranks[1].answers["prepare"] = {"install": "dense"}
    seat.engine.before = fails(lambda i: not isinstance(i, Act | RankCommand) and "Compare" in str(i))
    seat.run(seat.machine.stage(TWO))
    assert seat.state.commit_needs_shadow


def test_a_version_that_was_written_while_staging_is_reported_as_in_use_and_unready() -> None:
    seat = seated()
    for rank in seat.engine.ranks:
        rank.answers["prepare"] = {"install": "dense"}
    seat.run(seat.machine.stage(TWO))
    assert (seat.state.committed, seat.state.condition, seat.engine.label) == (TWO, Condition.UNREADY, "0.2")
    seat.run(seat.machine.stage(THREE))
    assert seat.state.committed in (TWO, THREE), "the ranks still hold what was written"


# -- the switch


def test_figures_of_a_switch_are_named() -> None:
    seat = seated(safe_point="drain")
    assert list(seat.install(TWO).detail) == [
        "began_unix_s", "paused_s", "pausing_s", "writing_s", "resuming_s", "worker_s", "drained_s"
    ]  # fmt: skip
    seat.engine.core = True
    report = seat.install(THREE)
    assert list(report.detail) == ["began_unix_s", "paused_s", "command_s", "worker_s", "drained_s"]
    assert (report.pause_s, report.dense) == (7e-6, False)


@pytest.mark.parametrize("manner", [BY_ROUTES, {"driver": "external"}])
def test_the_core_does_not_switch_for_other_ranks_and_other_drivers(manner: dict[str, Any]) -> None:
    seat = seated(core=True, **manner)
    seat.install(TWO)
    assert "switch" not in seat.engine.take()


@pytest.mark.parametrize("lost", [{"prepared": None}, {"prepared": "0.1"}, {"open": False}])
def test_a_rank_that_is_not_prepared_prevents_the_switch(lost: dict[str, Any]) -> None:
    seat = seated()
    seat.run(seat.machine.stage(TWO))
    seat.engine.ranks[1].answers["init"] = lost
    with pytest.raises(RetryableError, match=r"e: rank 1 isn't prepared for 0\.2 any more; it is staged again"):
        seat.run(seat.machine.commit(TWO))
    assert (seat.engine.take(), seat.engine.paused) == (["prepare", "note a pause"], False)


@pytest.mark.parametrize(("core", "switch"), [(False, ["pause", "commit"]), (True, ["switch"])])
@pytest.mark.parametrize("wrong", [{"mark": 7}, {"mark": None}, {"held": "0.1"}])
def test_a_rank_without_the_prepared_values_is_not_confirmed(
    wrong: dict[str, Any], core: bool, switch: list[str]
) -> None:
    seat = seated(core=core)
    seat.engine.resumes = False
    seat.engine.ranks[1].answers["commit"] = wrong
    with pytest.raises(FalseReportError, match=r"e: rank 1 says that it holds .*prepared for 0\.2 are not there"):
        seat.install(TWO)
    assert seat.engine.take() == ["prepare", "note a pause", *switch, "abort", "resume"]
    assert (seat.engine.held, seat.state.committed, seat.state.ready) == (["0.1", "0.1"], ONE, False)


@pytest.mark.parametrize("hook", ["before", "after"])
def test_an_engine_whose_label_is_not_confirmed_gets_its_old_values_back(hook: str) -> None:
    """Answers from the new weights would have the old version's label, or the other way round."""
    seat = seated()
    setattr(seat.engine, hook, fails(lambda i: i == SetLabel(TWO)))
    with pytest.raises(RetryableError, match="by a test"):
        seat.install(TWO)
    assert (seat.engine.held, seat.engine.label, seat.engine.paused) == (["0.1", "0.1"], "0.1", False)


def test_an_engine_that_restarted_after_a_whole_install_is_not_taken_for_ready() -> None:
    seat = seated(None)
    seat.run(seat.machine.stage(ONE))
    seat.engine.restart()
    with pytest.raises(RetryableError, match=r"e: no longer holds 0\.1; it is staged again"):
        seat.run(seat.machine.commit(ONE))
    assert seat.state.condition is Condition.UNKNOWN


def test_a_session_that_stays_open_does_not_fail_the_switch(caplog: Any) -> None:
    seat = seated()
    seat.engine.before = fails(lambda i: i is Act.FINISH)
    seat.install(TWO)
    assert (seat.state.committed, "by a test" in caplog.text) == (TWO, True)


@pytest.mark.parametrize("doubtful", [False, True])
def test_a_switch_that_changed_nothing_is_not_taken_back(doubtful: bool) -> None:
    """Of weights in doubt nothing may be sampled, so that pause stays."""
    seat = seated(core=True, safe_point="drain")
    seat.engine.ranks[1].doubtful = doubtful
    seat.engine.busy = True
    epoch = seat.state.serving_epoch
    with pytest.raises(StillRunningError):
        seat.install(TWO)
    assert (seat.engine.take()[-1], seat.engine.paused) == ("note a pause" if doubtful else "resume", doubtful)
    assert (seat.state.ready, seat.state.pausing, seat.state.serving_epoch is None) == (
        not doubtful,
        doubtful,
        doubtful,
    )
    assert seat.state.serving_epoch != epoch


# -- the roll-back


@pytest.mark.parametrize(
    ("held", "mark"), [(["0.1", "0.2"], None), ([None, None], None), (["0.2", "0.2"], 7)], ids=["mixed", "lost", "lie"]
)
def test_ranks_in_doubt_keep_the_engine_paused(caplog: Any, held: list[str | None], mark: int | None) -> None:
    seat = seated()
    for rank, each in zip(seat.engine.ranks, held, strict=True):
        rank.answers["commit"] = {"error": "by a test"} if mark is None else {"mark": mark}
        rank.answers["abort"] = {"held": each}
    with pytest.raises(P2PCastError):
        seat.install(TWO)
    assert seat.engine.take()[-3:] == ["abort", "forget", "pause"]
    assert (seat.engine.paused, seat.state.condition) == (True, Condition.DOUBTED)
    why = "e: 0.2 could not be taken back (its ranks hold different versions): it stays paused until it is repaired"
    assert why in caplog.text


def test_ranks_that_agree_on_the_new_version_go_on_unready() -> None:
    """All ranks had committed, and none could take its values back: their proofs are in order."""
    seat = seated(core=True)
    seat.engine.after = fails(lambda i: isinstance(i, CoreSwitch))
    with pytest.raises(RetryableError):
        seat.install(TWO)
    assert seat.engine.take() == ["prepare", "note a pause", "switch", "abort", "resume"]
    assert (seat.engine.label, seat.engine.paused, seat.state.condition) == ("0.2", False, Condition.UNKNOWN)


@pytest.mark.parametrize(("driver", "stays"), [("peer", "it stays paused"), ("external", "it must stay paused")])
def test_a_server_that_refuses_the_roll_back_stays_paused(caplog: Any, driver: str, stays: str) -> None:
    seat = seated(driver=driver)
    seat.run(seat.machine.stage(TWO))
    seat.engine.paused = driver == "external"
    seat.engine.after = fails(is_command("commit"))
    seat.engine.before = fails(is_command("abort"))
    with pytest.raises(RetryableError):
        seat.run(seat.machine.commit(TWO))
    assert f": {stays} until it is repaired" in caplog.text
    assert (seat.engine.paused, seat.state.condition) == (True, Condition.UNKNOWN)


def test_a_cancellation_amid_a_roll_back_is_not_lost() -> None:
    seat = seated()
    seat.engine.after = fails(is_command("commit"))
    seat.engine.before = fails(is_command("abort"), asyncio.CancelledError())
    with pytest.raises(asyncio.CancelledError):
        seat.install(TWO)
    assert (seat.engine.paused, seat.state.condition) == (True, Condition.UNKNOWN)


# -- a fault at each instruction

PLANS: dict[str, Callable[[], Seat]] = {
    "first": lambda: seated(None),
    "routes": seated,
    "core": lambda: seated(core=True),
    "drain": lambda: seated(core=True, safe_point="drain"),
    "drain by routes": lambda: seated(safe_point="drain"),
    "external": lambda: seated(driver="external"),
    "foreign change": lambda: rewritten(seated()),
    "foreign change, core": lambda: rewritten(seated(core=True)),
}
ERRORS: list[BaseException] = [
    RetryableError("no answer"),
    LocalError("refused"),
    IntegrityError("wrong"),
    ServerAwayError("away"),
    StillRunningError("busy"),
    asyncio.CancelledError(),
]


def rewritten(seat: Seat) -> Seat:
    for rank in seat.engine.ranks:
        rank.live = 7
    return seat


def whole_run(seat: Seat) -> None:
    seat.run(seat.machine.check())
    seat.install(TWO)
    seat.run(seat.machine.audit(LAYOUT, {0: digest_of("0.2")}))
    seat.run(seat.machine.check())


def length_of(plan: str) -> int:
    seat, seen = PLANS[plan](), []
    seat.engine.before = seen.append  # type: ignore[assignment]
    whole_run(seat)
    return len(seen)


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("lost", [False, True], ids=["fails", "answer lost"])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("plan", PLANS)
def test_no_fault_at_any_instruction_leaves_an_engine_mixed_behind_or_stuck(
    plan: str, lasting: bool, lost: bool, error: BaseException
) -> None:
    if lost and isinstance(error, StillRunningError):
        return  # this error says that there was no effect
    for at in range(length_of(plan)):
        seat = PLANS[plan]()
        seen = 0

        def fault(instruction: Instruction, at: int = at) -> BaseException | None:
            nonlocal seen
            seen += 1
            return error if seen - 1 == at or (lasting and seen > at) else None

        setattr(seat.engine, "after" if lost else "before", fault)
        try:
            whole_run(seat)
        except (P2PCastError, asyncio.CancelledError):
            pass
        state = seat.state
        assert state.committed is None or set(seat.engine.held) == {str(state.committed)}, f"instruction {at}"
        seat.engine.before = seat.engine.after = lambda i: None
        seat.heal(THREE)
        assert (state := seat.state).ready
        assert (state.committed, seat.engine.held, seat.engine.paused) == (THREE, ["0.3", "0.3"], False), at


class AnyOrder(RuleBasedStateMachine):
    """Calls, faults, restarts and successors in any order; each step checks the engine and the state."""

    def __init__(self) -> None:
        super().__init__()
        self.seat = Seat(PlayedEngine())
        self.newest = 0

    @rule(core=st.booleans())
    def core(self, core: bool) -> None:
        self.seat.engine.core = core

    @rule(at=st.integers(0, 12), lost=st.booleans(), error=st.sampled_from(ERRORS))
    def fault(self, at: int, lost: bool, error: BaseException) -> None:
        left = at

        def fault(instruction: Instruction) -> BaseException | None:
            nonlocal left
            left -= 1
            return error if left == -1 else None

        setattr(self.seat.engine, "after" if lost else "before", fault)

    @rule()
    def restart(self) -> None:
        self.seat.engine.restart()

    @rule()
    def succeed(self) -> None:
        self.seat.begin()

    @rule()
    def damage(self) -> None:
        rewritten(self.seat)

    @rule(what=st.sampled_from(["stage", "stage newer", "commit", "check", "audit", "meet"]))
    def call(self, what: str) -> None:
        machine, version = self.seat.machine, Version(0, self.newest)
        if what == "stage newer":
            self.newest += 1
            version = Version(0, self.newest)
        flows = {
            "commit": lambda: machine.commit(version),
            "check": machine.check,
            "meet": machine.meet,
            "audit": lambda: machine.audit(LAYOUT, {0: digest_of(str(self.seat.state.committed or version))}),
        }
        try:
            self.seat.run(flows.get(what, lambda: machine.stage(version))())
        except (P2PCastError, asyncio.CancelledError):
            pass

    @invariant()
    def valid(self) -> None:
        self.seat.state.validate()

    def teardown(self) -> None:
        engine = self.seat.engine
        engine.before = engine.after = lambda i: None
        self.newest += 1
        self.seat.heal(Version(0, self.newest))
        assert engine.held == [f"0.{self.newest}"] * 2


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase
