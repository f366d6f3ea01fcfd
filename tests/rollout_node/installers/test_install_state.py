"""The state of an installer: invariants after every call, and one writer of each field."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from installer_host import ONE, TWO, broken_invariants

import rollout_node.installers
from rollout_node.installers.install_state import InstallState
from rollout_node.installers.installer import CommitReport

FOLDER = Path(rollout_node.installers.__file__).parent
WRITERS = {("engine_pause", "pausing"), ("rank_preparation", "marks"), ("safe_point", "stretch")}
"""Writes to the state from outside, as the module states them."""

Call = Callable[[InstallState], None]


def sparse(state: InstallState) -> None:
    state.drop()
    state.prepare(dense=False)
    state.stage(TWO, None)


def dense(state: InstallState) -> None:
    """Another process pauses the engine for the commit."""
    state.drop()
    state.prepare(dense=True)
    state.stage(TWO, None)


def dense_at_once(state: InstallState) -> None:
    state.drop()
    state.prepare(dense=True)
    state.trust()
    state.stage(TWO, CommitReport(1.0, dense=True))


def failed(state: InstallState) -> None:
    state.drop()
    state.prepare(dense=True)
    state.fail()
    state.drop()


def committed(state: InstallState) -> None:
    if state.staged is not None:
        state.commit(state.staged)
        state.stretch = "a"


def restarted(state: InstallState) -> None:
    state.meet({0: str(id(object()))})
    state.lose_version()


def distrusted(state: InstallState) -> None:
    state.doubt()
    state.lose_version()


CALLS: list[Call] = [
    sparse,
    dense,
    dense_at_once,
    failed,
    committed,
    restarted,
    distrusted,
    InstallState.lose_contact,
    InstallState.restore_contact,
]


@given(st.lists(st.sampled_from(CALLS), max_size=30))
def test_invariants_hold_after_every_call(calls: list[Call]) -> None:
    state = InstallState()
    assert broken_invariants(state) == []
    for call in calls:
        call(state)
        assert broken_invariants(state) == [], call.__name__


def test_only_a_lost_contact_is_restored() -> None:
    state = InstallState()
    sparse(state)
    committed(state)
    state.lose_contact()
    state.lose_contact()
    assert (state.ready, state.committed) == (False, TWO)
    state.restore_contact()
    assert state.ready
    state.lose_contact()
    state.fail()
    state.restore_contact()
    assert not state.ready, "an install failed meanwhile"


def test_a_version_that_differs_in_one_rank_leaves_the_engine_unready_until_a_commit() -> None:
    state = InstallState(committed=ONE, ready=True)
    dense(state)
    assert (state.ready, state.commit_needs_shadow) == (False, True)
    state.commit(TWO)
    assert (state.committed, state.ready, state.commit_needs_shadow) == (TWO, True, False)


def test_a_dense_install_that_is_done_needs_no_shadow() -> None:
    state = InstallState()
    dense_at_once(state)
    assert not state.commit_needs_shadow


def test_a_restart_ends_doubts_and_pauses_and_nothing_else_does() -> None:
    state = InstallState()
    state.meet({0: "first"})
    state.doubt()
    state.pausing = True
    state.meet({0: "first"})
    state.lose_version()
    assert (state.uncertain, state.pausing) == (True, True)
    state.meet({0: "second"})
    assert (state.uncertain, state.pausing) == (False, False)


def test_every_field_has_the_writers_that_the_module_states() -> None:
    names = {each.name for each in fields(InstallState)}
    found = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in (inner for each in targets for inner in ast.walk(each)):
                    if isinstance(target, ast.Attribute) and target.attr in names:
                        on = target.value
                        if (isinstance(on, ast.Attribute) and on.attr == "_state") or (
                            isinstance(on, ast.Name) and on.id == "state"
                        ):
                            found.add((path.stem, target.attr))
    assert found == WRITERS
