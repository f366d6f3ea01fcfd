"""`make check` runs the pure tests that depend on a change, and names the others."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import check
from tests.check import ALWAYS, MOST_S, OTHER_S, SLOW_S, TEST_FILES, chosen, is_pure, not_run


def test_named_files_are_pure_tests() -> None:
    assert {*SLOW_S, *ALWAYS} <= TEST_FILES.keys()
    assert all(is_pure(TEST_FILES[path]) for path in SLOW_S)


def test_tests_of_processes_and_sockets_are_not_pure() -> None:
    """By their imports, by those of a module under test, by a fixture, and by a helper in another folder."""
    for path in ("test_prove.py", "p2pcast/transport/test_listener.py", "test_kill.py", "daemons/hub/test_http.py"):
        assert not is_pure(TEST_FILES[f"tests/{path}"]), path


def test_a_module_selects_its_dependent_tests() -> None:
    run, _, left = chosen(["topology/plan.py"])
    assert "tests/topology/test_plan.py" in run
    assert "tests/p2pcast/codec/test_cell.py" not in run
    assert "tests/trainer_node/membership/test_peer_session.py" in {*run, *left}
    assert not {*run} & {*left}


def test_a_page_selects_the_rules_alone() -> None:
    run, _, left = chosen(["docs/design/security.md"])
    assert run == ALWAYS
    assert "tests/test_threats.py" in left


@pytest.mark.parametrize("path", ["Makefile", "tests/trainer_node/conftest.py", "topology/gone.py", "pyproject.toml"])
def test_unknown_effects_select_everything(path: str) -> None:
    run, reason, left = chosen([path])
    assert {*run, *left} == {*TEST_FILES}
    assert path in reason


def test_a_check_is_short_and_names_omitted_tests() -> None:
    run, _, left = chosen(["p2pcast/ground/errors.py"])
    assert sum(SLOW_S.get(path, OTHER_S) for path in run if path not in ALWAYS) <= MOST_S
    assert "tests/p2pcast/codec/test_fuzz.py" in left
    assert "tests/p2pcast (" in not_run(left)


def test_changed_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In commits since the branch point, in the working tree, untracked, and gone."""

    def git(*words: str) -> None:
        person = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *person, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--initial-branch=main")
    for name in "abcd":
        (tmp_path / name).write_text(name)
    git("add", ".")
    git("commit", "-m", "first")
    git("switch", "-c", "branch")
    (tmp_path / "a").write_text("in a commit")
    git("commit", "-a", "-m", "second")
    (tmp_path / "b").write_text("in the tree")
    (tmp_path / "c").unlink()
    (tmp_path / "new").write_text("untracked")
    monkeypatch.setattr(check, "ROOT", tmp_path)
    assert check.changed(check.branch_point()) == ["a", "b", "c", "new"]
