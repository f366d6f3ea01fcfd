"""The form of JSON documents: paths with the types of values. Names that depend on the run are generalised."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Paths = dict[str, str]

NAMES = [
    (re.compile(r"\d+\.\d+"), "<version>"),
    (re.compile(r"-?\d+"), "<number>"),
    (re.compile(r"[0-9a-f]{8,}"), "<hex>"),
    (re.compile(r".*[:/].*|near|far"), "<name>"),
]
"""Keys that depend on the run: versions, numbers, ids, and names of peers and engines."""
IN_PATHS = [
    (re.compile(r"-[0-9a-f]{8}\.p2pd\b"), "-<8 hex>.p2pd"),
    (re.compile(r"\b\d{8,}\b"), lambda found: f"<{len(found[0])} digits>"),
    (re.compile(r"\b[0-9a-f]{16,}\b"), lambda found: f"<{len(found[0])} hex>"),
    (re.compile(r"\b\d+\.\d+\b"), "<version>"),
]


def key(name: str) -> str:
    return next((general for pattern, general in NAMES if pattern.fullmatch(name)), name)


def path(name: str) -> str:
    """A file's path."""
    for pattern, general in IN_PATHS:
        name = pattern.sub(general, name)
    return name


def kind(value: Any) -> str:
    """An integer where a fraction may be is no other type: JSON has numbers alone."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    raise TypeError(type(value))


def paths(documents: Iterable[Any]) -> Paths:
    """Path → the types that were seen there; ``[]`` is any element of an array."""
    out: dict[str, set[str]] = defaultdict(set)

    def walk(value: Any, where: str) -> None:
        out[where].add(kind(value))
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, f"{where}.{key(name)}" if where else key(name))
        elif isinstance(value, list):
            for inner in value:
                walk(inner, f"{where}[]")

    for document in documents:
        walk(document, "")
    return {where or "(whole)": " | ".join(sorted(types)) for where, types in sorted(out.items())}
