"""Kinds of events and the names of their facts, as source tells them, wherever it lies, and as the guide lists them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from pinned import ROOT, check, sources

TELLING = ("emit", "told")
"""Methods whose first argument is an event's kind, where that is a word."""


def words(node: ast.expr) -> list[str]:
    """The texts that an argument may be: a constant, or one of two."""
    if isinstance(node, ast.IfExp):
        return words(node.body) + words(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def calls(tree: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[ast.Call, list[str]]]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        if node.func.attr in names:
            yield node, words(node.args[0])


def facts(call: ast.Call) -> set[str]:
    return {k.arg for k in call.keywords if k.arg is not None}


def passed_on(tree: ast.AST, call: ast.Call) -> dict[str, list[str]]:
    """First word → facts, of the calls of the function around ``call``, which hands their facts on."""
    out: dict[str, set[str]] = defaultdict(set)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and call in ast.walk(function):
            for outer, said in calls(tree, (function.name,)):
                for word in said:
                    out[word] |= facts(outer)
    return {word: sorted(names) for word, names in out.items()}


def told() -> dict[str, list[dict[str, object]]]:
    """Kind → its different forms, each once."""
    found: dict[str, list[dict[str, object]]] = defaultdict(list)
    for _, text in sources():
        tree = ast.parse(text)
        for call, kinds in calls(tree, TELLING):
            for kind in kinds:
                form: dict[str, object] = {"facts": sorted(facts(call))}
                if any(k.arg is None for k in call.keywords):
                    form["and by first word"] = passed_on(tree, call)
                if form not in found[kind]:
                    found[kind].append(form)
    return {kind: sorted(forms, key=str) for kind, forms in found.items()}


def in_the_guide() -> dict[str, list[str]]:
    """Kind at a daemon → the text after it in the guide's table."""
    text = (ROOT / "docs" / "reference" / "events.md").read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (hub|peer|both|ledger|all) \| (.*?) ?\|$", text, re.MULTILINE)
    out: dict[str, list[str]] = defaultdict(list)
    for names, where, said in rows:
        named = re.match(r"`([\w ]+)`(?! of)", said)
        for name in re.findall(r"\w+", names):
            out[name].append(f"{where}: {named[1] if named else ''}")
    return {kind: sorted(rows) for kind, rows in out.items()}


def test_every_event_that_source_tells_was_pinned() -> None:
    found = told()
    assert len(found) > 30
    check("event_kinds", found)


def test_the_guide_lists_every_kind_and_no_other() -> None:
    assert told().keys() == in_the_guide().keys()
    check("event_kinds_in_the_guide", in_the_guide())
