"""The code keeps the rules of docs/design/rules.md, whose tables this module reads."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from functools import cache

import pytest

from p2pcast import adapters, cli
from tests.imports import MODULES, OURS, ROOT, imported_anywhere, imported_at_once, parsed, reached
from tests.rules_of_code import table

IMPURE = {
    "aiohttp", "asyncio", "concurrent", "fcntl", "mmap", "multiprocessing", "os", "pathlib", "random", "secrets",
    "shutil", "signal", "socket", "sqlalchemy", "ssl", "subprocess", "tempfile", "threading", "time", "torch", "uvloop",
}  # fmt: skip
MOST_MODULES = 20
TASK_MAKERS = frozenset({"create_task", "ensure_future", "run_coroutine_threadsafe"})
THREAD_MAKERS = frozenset({"Thread", "Timer"})
OWNER_OF_TASKS = "p2pcast.process.background_tasks"
FRAMEWORKS = "trainer_node.frameworks"
NAMES_IN_STRINGS = {"p2pcast.cli", "p2pcast.adapters"}
"""Modules of ours that import others of ours by strings: commands, and modules that have moved."""
IMPORTERS_OF_OTHERS_CODE = {"p2pcast.daemon.user_code", "p2pcast.tasks.task_hash"}


# -- imports


@pytest.mark.parametrize("package", OURS)
def test_packages_import_one_way(package: str) -> None:
    allowed = {row[0][0]: {row[0][0], *row[2]} for row in table("package")}[package]
    for module in MODULES:
        if module.split(".")[0] == package:
            found = {name.split(".")[0] for name in imported_anywhere(module)} & set(OURS)
            assert found <= allowed, module


def room_of(module: str) -> str:
    """The folder below the package, or the module itself where it lies in the package's own folder."""
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("package", [row[0][0] for row in table("package of rooms")])
def test_rooms_import_earlier_rooms(package: str) -> None:
    (rooms,) = [row[1] for row in table("package of rooms") if row[0][0] == package]
    order = {f"{package}.{room}": number for number, room in enumerate(rooms)}
    mine = {module for module in MODULES if module.startswith(f"{package}.")}
    assert {room_of(module) for module in mine} == set(order)
    for module in mine:
        for name in imported_anywhere(module) & mine:
            here, there = room_of(module), room_of(name)
            assert here == there or order[there] < order[here], f"{module} imports {name}"


def test_names_in_strings_are_there() -> None:
    """These names alone lead upwards."""
    for target, _ in cli.COMMANDS.values():
        module, _, command = target.partition(":")
        assert module in MODULES
        assert callable(getattr(importlib.import_module(module), command))
    assert set(adapters.MOVED.values()) == {FRAMEWORKS}
    found = {
        module
        for module in MODULES
        for node in ast.walk(parsed(module))
        if not module.startswith("netem.") and isinstance(node, ast.Attribute) and node.attr == "import_module"
    }
    assert found == NAMES_IN_STRINGS | IMPORTERS_OF_OTHERS_CODE


def test_importing_a_command_imports_no_program() -> None:
    for module in MODULES:
        package = module.split(".")[0]
        if module.startswith(("p2pcast.cli", f"{package}.commands.")):
            others = {name for name in reached(module) if not name.startswith(("p2pcast.", f"{package}.commands."))}
            assert all(name.endswith("_config") for name in others), module


def test_frameworks_modules_alone_import_frameworks() -> None:
    for module in MODULES:
        if not module.startswith(FRAMEWORKS):
            assert not any(name.startswith(FRAMEWORKS) for name in imported_anywhere(module)), module


def test_importing_the_package_of_frameworks_imports_nothing() -> None:
    assert imported_at_once(FRAMEWORKS) == frozenset()


def test_importing_a_frameworks_module_imports_no_torch() -> None:
    """The framework decides when torch is imported."""
    for module in MODULES:
        if module.startswith(FRAMEWORKS):
            inner = reached(module)
            assert not any(name.startswith("trainer_node.") and not name.startswith(FRAMEWORKS) for name in inner)
            assert "torch" not in {name.split(".")[0] for one in inner for name in imported_at_once(one)}, module


def test_code_inside_engines_does_not_depend_on_the_engine() -> None:
    for module in MODULES:
        if module.startswith("rollout_node.in_engine"):
            for name in imported_anywhere(module):
                assert name.split(".")[0] not in ("vllm", "sglang"), module
                assert not name.startswith(("rollout_node.vllm_plugin", "rollout_node.sglang_plugin")), module


def circles() -> list[list[str]]:
    """Tarjan's strongly connected components of more than one module."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for name in imported_anywhere(module):
            inside = module == name or (MODULES[module].name == "__init__.py" and name.startswith(f"{module}."))
            if name not in MODULES or inside:
                continue
            if name not in order:
                visit(name)
                low[module] = min(low[module], low[name])
            elif name in stack:
                low[module] = min(low[module], order[name])
        if low[module] == order[module]:
            at = stack.index(module)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for module in MODULES:
        if module not in order:
            visit(module)
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles() == []


# -- rooms and names


def test_a_package_has_few_direct_modules() -> None:
    count: dict[str, int] = defaultdict(int)
    for path in MODULES.values():
        count[str(path.parent.relative_to(ROOT))] += path.name != "__init__.py"
    assert not {package: n for package, n in count.items() if n > MOST_MODULES}


def test_no_two_modules_or_packages_have_one_name() -> None:
    excepted = {name for row in table("name") for name in row[0]}
    places: dict[str, list[str]] = defaultdict(list)
    packages: dict[str, list[str]] = defaultdict(list)
    for path in MODULES.values():
        places[path.stem].append(str(path.relative_to(ROOT)))
        if path.name == "__init__.py":
            packages[path.parent.name].append(str(path.parent.relative_to(ROOT)))
    for found in (places, packages):
        assert not {name: at for name, at in found.items() if len(at) > 1 and name not in excepted}


# -- purity


def stated_pure() -> set[str]:
    return {f"{row[0][0].replace('/', '.')}.{name}" for row in table("room") for name in row[1]}


def exceptions() -> set[tuple[str, str]]:
    return {(row[0][0], row[1][0]) for row in table("exception")}


def impurities(module: str) -> set[tuple[str, str]]:
    """(module, impure import) of all that importing ``module`` imports."""
    return {
        (inner, name.split(".")[0])
        for inner in reached(module)
        for name in imported_at_once(inner)
        if name.split(".")[0] in IMPURE
    }


@pytest.mark.parametrize("module", sorted(stated_pure()))
def test_a_pure_module_brings_in_only_pure_modules(module: str) -> None:
    assert module in MODULES, "docs/design/rules.md names a module that is not there"
    assert impurities(module) <= exceptions()


@pytest.mark.parametrize("module", sorted(stated_pure()))
def test_a_pure_module_opens_no_files(module: str) -> None:
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "print", "input"}, f"line {node.lineno}"


def test_the_table_of_pure_modules_is_complete() -> None:
    pure = {
        name
        for name, path in MODULES.items()
        if path.name != "__init__.py" and not name.startswith("netem.") and impurities(name) <= exceptions()
    }
    assert pure == stated_pure()


def test_every_exception_is_needed() -> None:
    assert {found for module in stated_pure() for found in impurities(module)} == exceptions()


# -- tasks and threads


@cache
def calls(names: frozenset[str]) -> set[str]:
    """Modules that call one of ``names`` on anything but a TaskGroup, which is named ``group`` or ``tasks``."""
    found: set[str] = set()
    for module in MODULES:
        for node in ast.walk(parsed(module)):
            if not isinstance(node, ast.Call) or module.startswith("netem."):
                continue
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            on = function.value if isinstance(function, ast.Attribute) else None
            if name in names and not (isinstance(on, ast.Name) and on.id in ("group", "tasks")):
                found.add(module)
    return found


def test_every_task_has_an_owner_or_an_awaiter() -> None:
    stated = {row[0][0] for row in table("module")} - calls(THREAD_MAKERS)
    assert calls(TASK_MAKERS) - {OWNER_OF_TASKS} == stated


def test_every_thread_reports_its_failure() -> None:
    assert calls(THREAD_MAKERS) == {row[0][0] for row in table("module")} - calls(TASK_MAKERS)


def test_random_state_of_the_surrounding_program_is_left_alone() -> None:
    """Trainers seed ``random`` to repeat a run, engines seed it alike on every machine."""
    found = {module for module in MODULES if not module.startswith("netem.") and "random" in imported_anywhere(module)}
    assert found == {"p2pcast.ground.private_random"}
