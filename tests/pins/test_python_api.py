"""The Python interface of docs/reference/python-api.md: importable, described, complete, and as pinned."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pinned import PACKAGES, ROOT, check

PAGE = ROOT / "docs" / "reference" / "python-api.md"
ROW = re.compile(r"^\| `([\w.]+)` \| ((?:`\w+`(?:, )?)+) \|", re.MULTILINE)
API = {module: re.findall(r"\w+", names) for module, names in ROW.findall(PAGE.read_text())}
"""Module → names."""
WITHOUT_VERL = [module for module in API if module != "trainer_node.frameworks.verl"]
OF_TRIALS = {"netem.fleet.small_model"}
"""Modules of guides that make a model for a first trial."""
HIDDEN = {"__enter__", "__exit__"}


def members(found: Any) -> Iterator[tuple[str, Any]]:
    """Public members that classes of this repository define."""
    seen: set[str] = set()
    for base in found.__mro__:
        if base.__module__.split(".")[0] in PACKAGES:
            for name, member in vars(base).items():
                if (not name.startswith("_") or name in HIDDEN) and name not in seen:
                    seen.add(name)
                    yield name, inspect.unwrap(getattr(member, "__func__", member))


def shape(found: Any) -> Any:
    if not inspect.isclass(found):
        return signature(found)
    if issubclass(found, Exception):
        return {"is a": [base.__name__ for base in found.__bases__]}
    out = {"()": signature(found)}
    for name, member in members(found):
        if inspect.isfunction(member):
            out[name] = signature(member)
        elif isinstance(member, property):
            out[name] = f"property{signature(member.fget)}"
    return out


def signature(function: Any) -> str:
    return str(inspect.signature(function)).replace("'", "")


@pytest.mark.parametrize("module", WITHOUT_VERL)
def test_each_name_can_be_imported_and_has_a_docstring(module: str) -> None:
    loaded = importlib.import_module(module)
    assert loaded.__doc__
    for name in API[module]:
        found = getattr(loaded, name)
        written = found.__doc__ or ""
        assert written.strip(), name
        assert not written.startswith(f"{name}("), f"{name}: Python's own text"


def test_names_for_verl_match_the_module() -> None:
    """verl is not installed here; its adapter refuses to be imported without."""
    tree = ast.parse((ROOT / "trainer_node" / "frameworks" / "verl.py").read_text())
    [names] = [node.value for node in tree.body if isinstance(node, ast.Assign) and "__all__" in ast.unparse(node)]
    assert sorted(ast.literal_eval(names)) == sorted(API["trainer_node.frameworks.verl"])


def test_signatures_match_the_pin() -> None:
    found = {
        module: {name: shape(getattr(importlib.import_module(module), name)) for name in API[module]}
        for module in WITHOUT_VERL
    }
    check("python_api", found)


def test_every_error_is_named() -> None:
    errors = importlib.import_module("p2pcast.errors")
    found = inspect.getmembers(errors, lambda one: inspect.isclass(one) and issubclass(one, Exception))
    assert {name for name, _ in found} == set(API["p2pcast.errors"])


def test_imports_of_guides_and_examples_are_named() -> None:
    for path in texts():
        for module, names in imports(path.read_text()):
            if module not in OF_TRIALS:
                inner = {f"{module}.{name}" for name in names}
                assert names <= set(API.get(module, ())) or inner <= set(API), f"{path}: from {module} import {names}"


def texts() -> list[Path]:
    guides = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")]
    return [*guides, *(ROOT / "docs" / "reference").glob("*.md"), *(ROOT / "examples").glob("*.py")]


def imports(text: str) -> Iterator[tuple[str, set[str]]]:
    packages = "|".join(PACKAGES)
    for module, names in re.findall(rf"^\s*from ((?:{packages})[\w.]*) import ([\w, ]+)$", text, re.MULTILINE):
        yield module, {name.strip().split(" as ")[0] for name in names.split(",")}
