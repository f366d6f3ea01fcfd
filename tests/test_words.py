"""Texts name their actors: the words that docs/contributing.md, section "Words", excludes are in no Python file."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("examples", "netem", "p2pcast", "rollout_node", "tests", "topology", "trainer_node")
NOWHERE = r"(?<![`\w])(?:whom|whoever|nobody|somebody|anybody|everybody)\b"
FIRST = r"(?:who|what|it|its|they|their|those)\b"
LATER = r"[.!?:;]\s+(?:who|what)\b"
TEXT = re.compile(rf"{NOWHERE}|\A{FIRST}|{LATER}", re.IGNORECASE)
MESSAGE = re.compile(NOWHERE, re.IGNORECASE)
COMMENT = re.compile(rf"#.*{NOWHERE}|#\s*{FIRST}|#.*{LATER}", re.IGNORECASE)
PINNED = {"evict nobody"}
"""Keys of golden files."""
NAME = re.compile(
    r"_(?:who|whom|whoever|what|whatever|nobody|somebody|anybody|everybody|it|them|they|those|ones)(?=_|$)"
)


@cache
def sources() -> dict[Path, tuple[str, list[ast.AST]]]:
    """Text and syntax nodes of every file but this one."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    texts = {path.relative_to(ROOT): path.read_text() for path in paths if path != Path(__file__)}
    return {path: (text, list(ast.walk(ast.parse(text)))) for path, text in texts.items()}


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment; successive lines of comments are one comment."""
    lines: list[tuple[int, str]] = []
    end = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, words = token.start[0], token.string.lstrip("#").strip()
        if line == end + 1:
            lines[-1] = (lines[-1][0], f"{lines[-1][1]} {words}")
        else:
            lines.append((line, words))
        end = line if token.line.lstrip().startswith("#") else -1
    yield from lines


def test_docstrings_name_their_subject() -> None:
    found = []
    for path, (_, nodes) in sources().items():
        for node in nodes:
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))) if TEXT.search(text.strip()):
                    found.append(f"{path}:{node.lineno}: {text[:80]}")
    assert found == []


def test_comments_name_their_subject() -> None:
    found = []
    for path, (text, _) in sources().items():
        if COMMENT.search(text):
            found += [f"{path}:{line}: {words[:80]}" for line, words in comments(text) if TEXT.search(words)]
    assert found == []


def test_messages_name_their_actor() -> None:
    found = []
    for path, (_, nodes) in sources().items():
        for node in nodes:
            match node:
                case ast.Constant(value=str(text)) if " " in text and MESSAGE.search(text) and text not in PINNED:
                    found.append(f"{path}:{node.lineno}: {text[:80]}")
    assert found == []


def test_names_of_tests_have_nouns() -> None:
    found = []
    for path, (_, nodes) in sources().items():
        for node in nodes:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test_"):
                    found += [f"{path}:{node.lineno}: {name}"] if NAME.search(name) else []
    assert found == []
