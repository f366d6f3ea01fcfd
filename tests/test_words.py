"""The rules of docs/contributing.md, section "Words": texts name their actors, and their sentences are short."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # prose

from prose import (
    CODE,
    LINK,
    Text,
    comments,
    count_words,
    docstrings,
    help_texts,
    paragraphs,
    scenario_texts,
    sentences,
)

ROOT = Path(__file__).parent.parent
FOLDERS = ("examples", "netem", "p2pcast", "rollout_node", "tests", "topology", "trainer_node")
NOWHERE = r"(?<![`\w])(?:whom|whoever|nobody|somebody|anybody|everybody)\b"
FIRST = r"(?:who|what|it|its|they|their|those)\b"
LATER = r"[.!?:;]\s+(?:who|what)\b"
TEXT = re.compile(rf"{NOWHERE}|\A{FIRST}|{LATER}", re.IGNORECASE)
MESSAGE = re.compile(NOWHERE, re.IGNORECASE)
COMMENT = re.compile(rf"#.*{NOWHERE}|#\s*{FIRST}|#.*{LATER}", re.IGNORECASE)
METAPHORS = re.compile(r"\b(?:rot|rots|rotted|rotten|shun|shuns|shunned|mend|mends|mended|mending)\b", re.IGNORECASE)
MOST_WORDS = 30
"""Most words of a sentence."""
RECORDS = ("docs/benchmarks.md", "docs/notes/")
"""Pages of measurements: their rows and lists of figures are no prose."""
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


@cache
def pages() -> dict[Path, str]:
    paths = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT): path.read_text() for path in paths}


@cache
def scenarios() -> dict[Path, list[Text]]:
    paths = sorted((ROOT / "netem" / "scenarios").glob("*.toml"))
    return {path.relative_to(ROOT): list(scenario_texts(path.read_text())) for path in paths}


@cache
def prose() -> list[tuple[Path, int, str]]:
    """File, line and text of all docstrings, comments, help texts, pages and texts of scenarios."""
    found: list[tuple[Path, int, str]] = []

    def add(path: Path, texts: Iterator[Text]) -> None:
        found.extend((path, line, text) for line, text in texts)

    for path, (text, nodes) in sources().items():
        add(path, docstrings(nodes))
        add(path, help_texts(nodes))
        add(path, comments(text))
    for path, text in pages().items():
        add(path, iter([(1, text)]))
    for path, texts in scenarios().items():
        add(path, iter(texts))
    return found


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
            found += [
                f"{path}:{line}: {words[:80]}"
                for line, words in ((line, words.replace("\n", " ")) for line, words in comments(text))
                if TEXT.search(words)
            ]
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


def test_pages_name_their_actors() -> None:
    found = []
    for path, text in pages().items():
        plain = CODE.sub("CODE", LINK.sub(lambda link: link[1], text))
        found += [f"{path}: {match[0]}" for match in MESSAGE.finditer(plain)]
        found += [f"{path}:{line + 1}: {said[:80]}" for line, said in paragraphs(plain) if TEXT.search(said)]
    assert found == []


def test_scenarios_name_their_actors() -> None:
    said = [(path, line, text) for path, texts in scenarios().items() for line, text in texts]
    assert [f"{path}:{line}: {text[:80]}" for path, line, text in said if TEXT.search(text)] == []


def test_texts_have_no_metaphors() -> None:
    found = []
    for path, line, text in prose():
        if not str(path).startswith(RECORDS):
            found += [f"{path}:{line}: {word}" for word in METAPHORS.findall(CODE.sub("CODE", text))]
    assert found == []


def test_sentences_are_short() -> None:
    found = []
    for path, line, text in prose():
        if not str(path).startswith(RECORDS):
            for at, sentence in sentences(text):
                if (words := count_words(sentence)) > MOST_WORDS:
                    found.append(f"{path}:{line + at}: {words} words: {sentence[:100]}")
    assert found == []


def test_a_long_sentence_is_found() -> None:
    """In every kind of text, and not in code or tables."""
    words = " ".join(["Word", *["word"] * MOST_WORDS])
    short = " ".join(["Word", *["word"] * (MOST_WORDS - 1)])
    for text in (f"{words}.", f"Short. {words}.", f"- {words}", f"Before:\n\n- one\n- {words}\n", f"a\n{words}\nb"):
        assert max(count_words(sentence) for _, sentence in sentences(text)) > MOST_WORDS, text
    for text in (f"{short}. {short}.", f"```\n{words}\n```", f"| {words} |", f"- {short}\n- {short}", f"`{words}`"):
        assert max((count_words(sentence) for _, sentence in sentences(text)), default=0) <= MOST_WORDS, text
