from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2pcast.ground.errors import LocalError
from p2pcast.tasks.question_files import final_answer, read_questions

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra math")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra math")

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "2+2?", "answer": "So \\boxed{4}."}]
PAIRS = [("1+1?", "2"), ("2+2?", "4")]


def lines(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def read(path: Path, split: str = "train") -> list[tuple[str, str]]:
    return read_questions(path, split, "question", "answer")


def test_a_file_of_lines_gives_its_questions(tmp_path: Path) -> None:
    assert read(lines(tmp_path / "q.jsonl", ROWS)) == PAIRS


def test_a_downloaded_dataset_gives_its_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / ".cache").mkdir()
    for part, rows in (("train-00000-of-00002", ROWS[:1]), ("train-00001-of-00002", ROWS[1:]), ("test-00000", ROWS)):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data" / f"{part}.parquet")
    lines(tmp_path / ".cache" / "train.jsonl", [{}])
    (tmp_path / "dataset_info.json").write_text("{}")
    assert read(tmp_path) == PAIRS
    assert len(read(tmp_path, "test")) == 2
    with pytest.raises(LocalError, match=r"no split 'valid': give split=, one of: test, train"):
        read(tmp_path, "valid")


def test_a_saved_dataset_gives_its_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        table = pyarrow.Table.from_pylist(ROWS)
        with pyarrow.ipc.new_stream(tmp_path / split / "data-00000-of-00001.arrow", table.schema) as stream:
            stream.write_table(table)
    assert read(tmp_path) == PAIRS


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("7", "7"),
        ("a #### 1,234\n", "1234"),
        ("\\boxed{1} so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("an open \\boxed{1", "an open \\boxed{1"),
    ],
)
def test_the_final_answer_of_a_solution_is_found(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"question": "a"}, "row 1 has no column 'answer': give answer_column=, one of question"),
        ({"problem": "a", "answer": "b"}, "give question_column=, one of answer, problem"),
        ({"question": ["a"], "answer": "b"}, "have to be text"),
        ({"question": "a", "answer": " "}, "is empty"),
        ({"question": "a", "answer": "b" * 70_000}, "more than 65536 characters"),
        ([1], "no object"),
    ],
)
def test_a_bad_row_is_refused_with_its_place(tmp_path: Path, row: Any, why: str) -> None:
    with pytest.raises(LocalError, match=why):
        read(lines(tmp_path / "q.jsonl", [row]))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("q.jsonl", b"{}\n{", "row 1 has no column"),
        ("q.jsonl", b'{"question": "1", "answer": "1"}\n{', "line 2 is no JSON"),
        ("q.jsonl", b"[" * 99_999, "line 1 is no JSON"),
        ("q.jsonl", b"\xff\xfe", "cannot read"),
        ("q.jsonl", b"", "no question"),
        ("q.parquet", b"PAR1junkPAR1", "cannot read"),
        ("q.arrow", b"junk", "cannot read"),
        ("q.csv", b"", "no .jsonl"),
    ],
)
def test_a_damaged_file_is_refused_with_its_place(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LocalError, match=why):
        read(tmp_path / name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no such file or folder"):
        read(tmp_path / "none")
    with pytest.raises(LocalError, match="no data files"):
        read(tmp_path)
