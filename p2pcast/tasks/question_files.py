"""Reads questions and answers from a JSON Lines file, or from a folder with a Hugging Face dataset.

A folder contains JSON Lines, Parquet or Arrow files, as ``hf download --repo-type dataset`` and ``save_to_disk`` write
them. Files are read in the order of their names, so that equal folders give equal questions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from p2pcast.ground import limits
from p2pcast.ground.errors import LocalError
from p2pcast.tasks.math_answers import last_box

MAX_FILE_BYTES: Final = 2 * limits.GIB
MAX_QUESTIONS: Final = 4_000_000
MAX_TEXT: Final = 64 * limits.KIB
"""Most characters of a question or an answer, because jobs contain both."""
_LINES: Final = (".jsonl", ".ndjson")
_TABLES: Final = (".parquet", ".arrow")
_LAST_LINE: Final = re.compile(r"####\s*(.+?)\s*\Z")
"""Precedes the answer in GSM8K's solutions."""
Row = Mapping[str, Any]


def read_questions(path: Path, split: str, question: str, answer: str) -> list[tuple[str, str]]:
    """Read all questions. ``split``: of a folder's files. ``question``, ``answer``: column names. Raises LocalError."""
    found = []
    for file in _files(path, split):
        for number, row in enumerate(_rows(file), 1):
            found.append(_pair(row, question, answer, f"{file}, row {number}"))
            if len(found) > MAX_QUESTIONS:
                raise LocalError(f"{path} has more than {MAX_QUESTIONS} questions: give a part of the data")
    if not found:
        raise LocalError(f"{path} has no question")
    return found


def final_answer(text: str) -> str:
    r"""The answer that a solution ends with: in ``\boxed{…}``, behind ``####``, or the whole text."""
    if (box := last_box(text)) is not None:
        return box[0].strip()
    if (line := _LAST_LINE.search(text[-MAX_TEXT:])) is not None:
        return line[1].replace(",", "")
    return text.strip()


def _pair(row: Any, question: str, answer: str, place: str) -> tuple[str, str]:
    if not isinstance(row, Mapping):
        raise LocalError(f"{place} is no object with columns")
    for option, column in (("question_column", question), ("answer_column", answer)):
        if column not in row:
            known = ", ".join(sorted(map(str, row))[:20])
            raise LocalError(f"{place} has no column {column!r}: give {option}=, one of {known}")
    asked, right = row[question], row[answer]
    if type(right) in (int, float):
        right = str(right)
    if type(asked) is not str or type(right) is not str:
        raise LocalError(f"{place}: question and answer have to be text")
    if max(len(asked), len(right)) > MAX_TEXT:
        raise LocalError(f"{place}: a question or answer has more than {MAX_TEXT} characters")
    right = final_answer(right)
    if not asked.strip() or not right:
        raise LocalError(f"{place}: the question or the answer is empty")
    return asked, right


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        if path.suffix not in (*_LINES, *_TABLES):
            raise LocalError(f"{path} is no .jsonl, .parquet or .arrow file")
        return [path]
    if not path.is_dir():
        raise LocalError(f"{path}: no such file or folder")
    known = sorted(
        file
        for ending in (*_LINES, *_TABLES)
        for file in path.rglob(f"*{ending}")
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    of_split = [file for file in known if _split(file.relative_to(path)) in (split, None)]
    if not of_split:
        splits = ", ".join(sorted({_split(file.relative_to(path)) or "" for file in known})) or "no data files"
        raise LocalError(f"{path} has no split {split!r}: give split=, one of: {splits}")
    return of_split


def _split(file: Path) -> str | None:
    """The split that the file belongs to, by its name or its folder's name; None if neither gives one."""
    for name in (file.name, *reversed(file.parts[:-1])):
        if found := re.match(r"(train|test|validation|valid|dev|eval)(?![a-z])", name):
            return found[1]
    return None


def _rows(file: Path) -> Iterator[Any]:
    if file.stat().st_size > MAX_FILE_BYTES:
        raise LocalError(f"{file} is larger than {MAX_FILE_BYTES} bytes: give a part of the data")
    return _table(file) if file.suffix in _TABLES else _lines(file)


def _lines(file: Path) -> Iterator[Any]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise LocalError(f"{file}, line {number} is no JSON: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError(f"cannot read {file}: {error}") from None


def _table(file: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise LocalError(f"{file}: Parquet and Arrow need pyarrow: pip install 'p2pcast[math]'") from None
    try:
        if file.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(file) as opened:
                for batch in opened.iter_batches(batch_size=1024):
                    yield from batch.to_pylist()
            return
        with pyarrow.memory_map(str(file)) as source:
            for batch in pyarrow.ipc.open_stream(source):
                yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise LocalError(f"cannot read {file}: {error}") from None
