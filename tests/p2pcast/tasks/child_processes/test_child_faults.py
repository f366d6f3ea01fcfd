"""Errors of a user's code by type, file and line."""

from __future__ import annotations

import pytest

from p2pcast.tasks.child_processes.child_faults import MAX_SEEN, SeenErrors


def error_of(kind: str, line: int, file: str = "task.py") -> BaseException:
    """An error that the code of ``file`` raises at ``line``."""
    code = compile("\n" * (line - 1) + f"raise {kind}('text')", file, "exec")
    with pytest.raises(Exception, match="text") as raised:
        exec(code)
    return raised.value


def test_errors_differ_by_type_file_and_line() -> None:
    seen = SeenErrors()
    errors = [("ValueError", 3), ("KeyError", 3), ("ValueError", 4), ("ValueError", 3, "other.py")]
    assert [seen.is_new(error_of(*one)) for one in errors] == [True] * 4  # type: ignore[arg-type]
    assert [seen.is_new(error_of(*one)) for one in errors] == [False] * 4  # type: ignore[arg-type]


def test_an_error_without_a_place_is_known_by_its_type() -> None:
    seen = SeenErrors()
    assert [seen.is_new(ValueError(text)) for text in "ab"] == [True, False]


def test_errors_that_a_process_remembers_are_bounded() -> None:
    seen = SeenErrors()
    errors = [error_of("ValueError", line) for line in range(1, MAX_SEEN + 2)]
    assert [seen.is_new(error) for error in errors] == [True] * MAX_SEEN + [False]
