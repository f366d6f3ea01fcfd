"""Measures of the code's size and order: ``python tests/measure_house.py [--verbose]``.

``docs/design/rules.md`` records the highest value of each. A value is raised there only with a reason beside it.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("topology", "p2pcast", "rollout_node", "trainer_node", "netem")
SMALL_LINES = 60
WIDE_ARGUMENTS = 8


def _sources(folder: str) -> dict[Path, str]:
    return {path: path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}


def _lines(sources: dict[Path, str]) -> int:
    return sum(text.count("\n") for text in sources.values())


def _classes(sources: dict[Path, str]) -> Iterator[tuple[Path, ast.ClassDef]]:
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                yield path, node


def _constructor_arguments(node: ast.ClassDef) -> int:
    """Arguments of a constructor that is written out, without ``self``."""
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
            return len(inner.args.args) + len(inner.args.kwonlyargs) - 1
    return 0


def measures() -> dict[str, list[str] | int]:
    """By name: a number, or the list of what counts."""
    product = {path: text for folder in PRODUCT for path, text in _sources(folder).items()}
    classes = [(path, node) for path, node in _classes(product) if not node.name.startswith("_")]
    names = Counter(node.name for _, node in classes)
    documents = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    return {
        "lines of product": _lines(product),
        "lines of netem": _lines(_sources("netem")),
        "lines of tests": _lines(_sources("tests")),
        "small files": [
            str(path.relative_to(ROOT))
            for path, text in product.items()
            if text.count("\n") < SMALL_LINES and path.name != "__init__.py"
        ],
        "doubled class names": sorted(name for name, count in names.items() if count > 1),
        "wide constructors": [
            f"{path.relative_to(ROOT)}: {node.name}"
            for path, node in classes
            if _constructor_arguments(node) >= WIDE_ARGUMENTS
        ],
        "words of docs": sum(len(path.read_text().split()) for path in documents),
    }


def values() -> dict[str, int]:
    return {name: found if isinstance(found, int) else len(found) for name, found in measures().items()}


def main() -> None:
    print(json.dumps(measures() if "--verbose" in sys.argv else values(), indent=1))


if __name__ == "__main__":
    main()
