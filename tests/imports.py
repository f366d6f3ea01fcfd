"""Imports of the product, of its tests and of the examples, read from the sources: no module runs for it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
OURS = ("p2pcast", "topology", "trainer_node", "rollout_node", "netem")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for package in OURS for path in sorted((ROOT / package).rglob("*.py"))}
TESTS = {name_of(path): path for folder in ("examples", "tests") for path in sorted((ROOT / folder).rglob("*.py"))}
"""Tests, their helpers, and the examples, which tests import."""
HELPERS: dict[str, list[str]] = defaultdict(list)
"""By file name: the helpers that tests import by it, from folders that a conftest.py puts on the path."""
for _name, _path in TESTS.items():
    if not _path.name.startswith("test_") and _path.name not in ("conftest.py", "__init__.py"):
        HELPERS[_path.stem].append(_name)


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse((MODULES | TESTS)[module].read_text())


def named(node: ast.AST) -> Iterator[str]:
    """Full names of the modules that one statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are absolute"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in MODULES or inner in TESTS else str(node.module)


@cache
def imported_anywhere(module: str) -> frozenset[str]:
    """All imports of a module: inside functions and for type checkers too."""
    return frozenset(name for node in ast.walk(parsed(module)) for name in named(node))


@cache
def imported_at_once(module: str) -> frozenset[str]:
    """Imports at the import of a module: not inside functions, not for type checkers alone."""
    found: set[str] = set()
    pending: list[ast.AST] = [parsed(module)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
            continue
        found.update(named(node))
        pending += ast.iter_child_nodes(node)
    return frozenset(found)


@cache
def reached(start: str) -> dict[str, str]:
    """Each of our modules that importing ``start`` imports, with the module that asked for it."""
    asked_by, pending = {start: ""}, [start]
    while pending:
        module = pending.pop()
        for name in imported_at_once(module):
            if name in MODULES and name not in asked_by:
                asked_by[name] = module
                pending.append(name)
    return asked_by


# -- imports of tests


@cache
def used_by_test(test: str) -> frozenset[str]:
    """A test file, each conftest.py with a fixture that it uses, and the helpers and examples that these import."""
    requested, found, folder = _requested(test) | {"autouse"}, {test}, TESTS[test].parent
    while folder != ROOT:
        conftest = name_of(folder / "conftest.py")
        if conftest in TESTS and _fixtures(conftest) & requested:
            found.add(conftest)
            requested |= _requested(conftest)
        folder = folder.parent
    pending = list(found)
    while pending:
        for name in imported_anywhere(pending.pop()):
            new = {one for one in (name, *HELPERS.get(name, ())) if one in TESTS} - found
            found |= new
            pending += new
    return frozenset(found)


@cache
def needed_by_test(test: str) -> frozenset[str]:
    """All modules of ours on which a test file depends, also by imports inside functions."""
    found = set(used_by_test(test))
    pending = list(found)
    while pending:
        for name in imported_anywhere(pending.pop()):
            parts = name.split(".")
            packages = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
            new = (packages & MODULES.keys()) - found
            found |= new
            pending += new
    return frozenset(found)


def importers_by_test(test: str) -> dict[str, frozenset[str]]:
    """Imports of each module that a test file needs when it is imported: of helpers, and of modules under test."""
    used = used_by_test(test)
    first = {name for one in used for name in imported_anywhere(one)} & MODULES.keys()
    under_test = {inner for one in first for inner in reached(one)}
    return {one: imported_anywhere(one) for one in used} | {one: imported_at_once(one) for one in under_test}


def _requested(module: str) -> set[str]:
    """Names that may be those of fixtures: of arguments, and in ``usefixtures`` and ``getfixturevalue``."""
    found: set[str] = set()
    for node in ast.walk(parsed(module)):
        match node:
            case ast.arg(arg=name):
                found.add(name)
            case ast.Call(func=ast.Attribute(attr="usefixtures" | "getfixturevalue"), args=values):
                found |= {value.value for value in values if isinstance(value, ast.Constant)}
    return found


def _fixtures(conftest: str) -> set[str]:
    """Names of a conftest.py's fixtures, its own and those it passes on; ``autouse`` if a test need not name one."""
    found: set[str] = set()
    for node in parsed(conftest).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            found |= {node.name} if "fixture" in decorators else set()
            found |= {"autouse"} if "autouse=True" in decorators else set()
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found
