"""Files of prompts in text and in token ids, and lines of another form."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.research.distill import token_ids_of_file
from p2pcast.ground.errors import UsageError
from rollout_node.sparse_calibration.model_calibration import prompts_of_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def test_lines_hold_texts_or_token_ids(file: Path) -> None:
    file.write_text('{"text": "Why?"}\n{"token_ids": [3, 4], "text": "ignored"}\n')
    assert prompts_of_file(file) == ["Why?", [3, 4]]


def test_line_separators_inside_texts_divide_no_line(file: Path) -> None:
    file.write_text('{"text": "one\u2028two\x85three"}\n{"text": "four"}', encoding="utf-8")
    assert prompts_of_file(file) == ["one\u2028two\x85three", "four"]


@pytest.mark.parametrize(
    "line",
    ["", "null", "[1]", "{}", "{", "[" * 9000, '{"text": ""}', '{"text": 5}']
    + [f'{{"token_ids": {ids}}}' for ids in ("5", "[]", "[1.5]", "[-1]", "[true]", '["a"]', '"abc"', "null")],
)
def test_lines_of_another_form_are_named(file: Path, line: str) -> None:
    file.write_text(f'{{"text": "Why?"}}\n{line}\n')
    for read in (prompts_of_file, token_ids_of_file):
        with pytest.raises(UsageError, match="line 2"):
            read(file)


def test_a_file_without_a_line_has_no_prompt(file: Path) -> None:
    file.touch()
    with pytest.raises(UsageError, match="no prompt"):
        prompts_of_file(file)


@pytest.mark.parametrize("other", ['{"text": "Why?"}', '{"token_ids": [3, 4, 5]}'])
def test_trained_prompts_have_one_length(file: Path, other: str) -> None:
    file.write_text('{"token_ids": [3, 4]}\n{"token_ids": [5, 6]}\n')
    assert token_ids_of_file(file) == [[3, 4], [5, 6]]
    with file.open("a") as lines:
        lines.write(other + "\n")
    with pytest.raises(UsageError, match="one length"):
        token_ids_of_file(file)
