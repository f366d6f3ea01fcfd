"""Interfaces of other programs: `trainer_node`, vLLM's entry point, callbacks, frames on the install socket."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import tomllib
from typing import Any

import places
from pinned import ROOT, check, sources

import trainer_node


def signature(function: Any) -> list[str]:
    """Parameters with kind and default. Annotations are free."""
    return [
        f"{p.kind.description}: {p.name}" + ("" if p.default is p.empty else f" = {p.default!r}")
        for p in inspect.signature(function).parameters.values()
    ]


def public(cls: type) -> dict[str, Any]:
    """Methods, and attributes that an object has from the start."""
    out: dict[str, Any] = {"()": signature(cls)}
    for name, member in inspect.getmembers(cls):
        if name.startswith("_") and name not in ("__enter__", "__exit__"):
            continue
        out[name] = signature(member) if callable(member) else type(member).__name__
    return out


def test_trainer_node_has_the_names_and_signatures_that_were_pinned() -> None:
    found = {name: public(getattr(trainer_node, name)) for name in sorted(trainer_node.__all__)}
    handle = trainer_node.Handle(7)
    found["attributes of a Handle"] = sorted(name for name in vars(handle) if not name.startswith("_"))
    check("trainer_node", found)


def test_trainer_node_without_a_name_loads_no_torch() -> None:
    code = "import sys, trainer_node; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_entry_points_match_the_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    check(
        "entry_points",
        {
            "name": project["name"],
            "scripts": project["scripts"],
            "plugins": project["entry-points"],
            "extras": sorted(project["optional-dependencies"]),
        },
    )


def test_every_entry_point_is_there_and_can_be_called() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for table in (project["scripts"], *project["entry-points"].values()):
        for target in table.values():
            module, _, name = target.partition(":")
            assert callable(getattr(importlib.import_module(module), name))


def test_the_plugin_does_nothing_without_its_variable(monkeypatch: Any) -> None:
    """vLLM calls it in all of its processes, p2pcast in use or not; here vLLM may not even be installed."""
    monkeypatch.delenv("P2PCAST_SOCK", raising=False)
    before = set(sys.modules)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["p2pcast"].partition(":")
    getattr(importlib.import_module(module), name)()
    assert not {loaded for loaded in set(sys.modules) - before if loaded.split(".")[0] == "vllm"}


def test_the_backend_is_registered_under_the_name_that_was_pinned() -> None:
    """vLLM's ``--weight-transfer-config`` names it."""
    found = []
    for _, text in sources():
        tree = ast.parse(text)
        values = {
            target.id: node.value.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".register_engine"):
                name = node.args[0]
                found.append(values[name.id] if isinstance(name, ast.Name) else ast.literal_eval(name))
    check("vllm_backend", found)


def test_frames_on_the_install_socket_have_the_keys_that_were_pinned() -> None:
    """Every map with an ``op`` that source makes, by that word; and the words that the other side compares with."""
    made: dict[str, list[list[str]]] = {}
    answered: set[str] = set()
    for _, text in sources():
        if '"op"' not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Dict):
                keys = {k.value: v for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)}
                if isinstance(word := keys.get("op"), ast.Constant):
                    made.setdefault(str(word.value), []).append(sorted(map(str, keys)))
            if isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant):
                answered.add(str(node.value.value))
            if isinstance(node, ast.Compare):
                answered |= {str(c.value) for c in node.comparators if isinstance(c, ast.Constant)}
    check(
        "install_socket",
        {"made": {word: sorted(forms) for word, forms in made.items()}, "answered": sorted(answered & made.keys())},
    )


def test_callbacks_have_the_names_that_were_pinned() -> None:
    check("callbacks", list(places.CALLBACKS))
