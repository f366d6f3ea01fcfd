"""Texts that people read, and their sentences: docstrings, comments, help texts, pages, texts of scenarios."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from typing import Any

ITEM = re.compile(r"(?:[-*+]|\d+[.)])\s+")
NO_PROSE = ("|", "#", "<", "!!!", "![", "{", ":::", ">>>")
"""First characters of lines of tables, headings, markup and sessions."""
SENTENCE = re.compile(r"(?<=[.!?])[)\"'*_]*\s+(?=[^a-z]|\w+: |p2pcast|netem|torch|vLLM)")
CODE = re.compile(r"``.*?``|`[^`]*`|\$[^$\n]*\$")
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)\s]*\)")

Text = tuple[int, str]
"""A line's number, and the text that begins there."""


def comments(source: str) -> Iterator[Text]:
    """Line and text of each comment; successive lines of comments are one comment."""
    lines: list[Text] = []
    end = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, words = token.start[0], token.string.lstrip("#").strip()
        if line == end + 1:
            lines[-1] = (lines[-1][0], f"{lines[-1][1]}\n{words}")
        else:
            lines.append((line, words))
        end = line if token.line.lstrip().startswith("#") else -1
    yield from lines


def docstrings(nodes: list[ast.AST]) -> Iterator[Text]:
    """Strings that are statements of their own."""
    for node in nodes:
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, inspect.cleandoc(text)


def help_texts(nodes: list[ast.AST]) -> Iterator[Text]:
    """Help of options and arguments."""
    for node in nodes:
        match node:
            case ast.keyword(arg="help" | "text", value=ast.Constant(value=str(text))):
                yield node.value.lineno, text
            case ast.Call(func=ast.Name(id="setting"), args=[_, ast.Constant(value=str(text)), *_]):
                yield node.lineno, text


def scenario_texts(source: str) -> Iterator[Text]:
    """Comments and texts of a scenario."""

    def texts(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from texts(inner)

    for text in texts(tomllib.loads(source)):
        if " " in text:
            yield 1, text
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("#"):
            yield number, line.lstrip("# ")


def paragraphs(text: str) -> Iterator[Text]:
    """Paragraphs and list items, without code blocks, tables and headings. Lines are counted from 0."""
    start, kept, indent, fenced = 0, list[str](), 0, False
    for number, line in enumerate([*text.splitlines(), ""]):
        bare = line.strip()
        item = ITEM.match(bare)
        fence = bare.startswith(("```", "~~~"))
        fenced ^= fence
        block = not kept and not item and line.startswith(" " * (indent + 4))
        if bare and not (item or fence or fenced or block or bare.startswith(NO_PROSE)):
            start = start if kept else number
            kept.append(bare)
            continue
        if kept:
            yield start, " ".join(kept)
        kept = []
        if item and not fenced:
            start, kept, indent = number, [bare[item.end() :]], len(line) - len(line.lstrip())
        elif bare and not line.startswith(" "):
            indent = 0


def sentences(text: str) -> Iterator[Text]:
    """The sentences of all paragraphs; code is one word, and of a link its text remains."""
    for line, paragraph in paragraphs(text):
        for sentence in SENTENCE.split(CODE.sub("CODE", LINK.sub(lambda link: link[1], paragraph))):
            yield line, sentence


def count_words(sentence: str) -> int:
    return sum(re.search(r"\w", word) is not None for word in sentence.split())
