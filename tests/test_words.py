"""The rules of docs/contributing.md, section "Words": sentences are short, and one word is used for one thing."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # prose

from prose import CODE, Text, comments, count_words, docstrings, help_texts, scenario_texts, sentences

ROOT = Path(__file__).parent.parent
FOLDERS = ("examples", "netem", "p2pcast", "rollout_node", "tests", "topology", "trainer_node")
GLOSSARY = Path("docs/concepts.md")
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|([^|]*)\|$", re.MULTILINE)
MOST_WORDS = 40
"""Most words of a sentence."""
RECORDS = ("docs/benchmarks.md", "docs/notes/")
"""Pages of measurements: their rows and lists of figures are not prose."""


@cache
def glossary() -> dict[str, list[str]]:
    """Each term, and the phrases that are not used for it."""
    text = (ROOT / GLOSSARY).read_text()
    rows = ROW.findall(text[text.index("## Glossary") :])[2:]
    return {term: [phrase.strip() for phrase in phrases.split(";") if phrase.strip()] for term, _, phrases in rows}


@cache
def prose() -> list[tuple[Path, int, str]]:
    """File, line and text of all docstrings, comments, help texts, pages and texts of scenarios."""
    found: list[tuple[Path, int, str]] = []

    def add(path: Path, texts: Iterator[Text]) -> None:
        found.extend((path.relative_to(ROOT), line, text) for line, text in texts)

    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            nodes = list(ast.walk(ast.parse(text)))
            add(path, docstrings(nodes))
            add(path, help_texts(nodes))
            add(path, comments(text))
    for path in [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        add(path, iter([(1, path.read_text())]))
    for path in sorted((ROOT / "netem" / "scenarios").glob("*.toml")):
        add(path, scenario_texts(path.read_text()))
    return found


def long_sentences(text: str) -> list[str]:
    return [sentence for _, sentence in sentences(text) if count_words(sentence) > MOST_WORDS]


def test_sentences_are_short() -> None:
    found = []
    for path, line, text in prose():
        if not str(path).startswith(RECORDS):
            found += [f"{path}:{line}: {sentence[:100]}" for sentence in long_sentences(text)]
    assert found == []


def other_words(text: str, phrases: list[str]) -> list[str]:
    """The phrases that a text contains outside of code."""
    plain = " ".join(CODE.sub("CODE", text).split())
    return [phrase for phrase in phrases if re.search(rf"\b{re.escape(phrase)}\b", plain, re.IGNORECASE)]


def test_terms_of_the_glossary_are_used() -> None:
    phrases = [phrase for others in glossary().values() for phrase in others]
    assert len(phrases) > 5
    found = []
    for path, line, text in prose():
        searched = text.partition("## Glossary")[0] if path == GLOSSARY else text
        found += [f"{path}:{line}: {phrase}" for phrase in other_words(searched, phrases)]
    assert found == []


def test_the_glossary_has_each_term_once_and_in_order() -> None:
    rows = ROW.findall((ROOT / GLOSSARY).read_text().partition("## Glossary")[2])[2:]
    assert len(rows) == len(glossary()) > 40
    terms = [term.lower() for term, _, _ in rows]
    assert terms == sorted(terms)
    phrases = [phrase for others in glossary().values() for phrase in others]
    assert not {phrase.lower() for phrase in phrases} & set(terms)
    assert len(phrases) == len(set(phrases))


def test_a_long_sentence_is_found() -> None:
    """In every kind of text, and not in code or tables."""
    words = " ".join(["Word", *["word"] * MOST_WORDS])
    short = " ".join(["Word", *["word"] * (MOST_WORDS - 1)])
    for text in (f"{words}.", f"Short. {words}.", f"- {words}", f"Before:\n\n- one\n- {words}\n", f"a\n{words}\nb"):
        assert long_sentences(text), text
    for text in (f"{short}. {short}.", f"```\n{words}\n```", f"| {words} |", f"- {short}\n- {short}", f"`{words}`"):
        assert not long_sentences(text), text


def test_another_word_for_a_term_is_found() -> None:
    assert other_words("A Fallback\n  parent, and `fallback parent`.", ["fallback parent", "leader"]) == [
        "fallback parent"
    ]
    assert other_words("leaders, `leader`", ["leader"]) == []
