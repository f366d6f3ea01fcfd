"""Purity of the cores, followed through our own modules: what a core imports must itself be pure (the direct rules are in test_imports.py).

Exceptions are named here, each with its reason; one that is no longer needed fails the test.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("p2pcast", "topology", "trainer_node", "rollout_node", "netem")
IMPURE = {
    "aiohttp", "asyncio", "concurrent", "fcntl", "mmap", "multiprocessing", "os", "pathlib", "random", "secrets", "shutil", "signal", "socket", "ssl",
    "subprocess", "tempfile", "threading", "time", "torch", "uvloop",
}  # fmt: skip
CORES = [
    "topology",
    "p2pcast/codec",
    "p2pcast/wire",
    "p2pcast/artifact/assembly.py",
    "p2pcast/artifact/canonical.py",
    "p2pcast/artifact/packer.py",
    "p2pcast/artifact/records.py",
    "p2pcast/relay/artifact.py",
    "p2pcast/relay/catchup.py",
    "p2pcast/relay/feed.py",
    "p2pcast/relay/liveness.py",
    "p2pcast/relay/pieces.py",
    "p2pcast/mirror/doubts.py",
    "p2pcast/mirror/names.py",
    "p2pcast/mirror/plan.py",
    "p2pcast/store/ladder.py",
    "p2pcast/store/retention.py",
    "p2pcast/errors.py",
    "p2pcast/limits.py",
    "p2pcast/version.py",
    "trainer_node/barrier.py",
    "trainer_node/engines.py",
]
EXCEPTIONS = {
    # Thread-local scratch and zstd contexts: cells are coded on all cores at once, and what comes out does not depend on them.
    ("p2pcast.codec.dense", "threading"),
    ("p2pcast.codec.room", "threading"),
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    return next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)


@cache
def imports(path: Path) -> frozenset[str]:
    """Full names of what a module imports when it is imported: not inside functions, not for type checkers alone."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if path_of(inner) else node.module)
        pending += ast.iter_child_nodes(node)
    return frozenset(found)


def reached(start: str) -> dict[str, str]:
    """Our modules that a module brings in, with the one that asked for each. A package's own ``__init__`` is its surface and belongs to nobody."""
    came_by, pending = {start: ""}, [start]
    while pending:
        module = pending.pop()
        path = path_of(module)
        assert path is not None, module
        for name in imports(path):
            if name.split(".")[0] in OURS and path_of(name) and name not in came_by:
                came_by[name] = module
                pending.append(name)
    return came_by


def cores() -> list[str]:
    paths = [p for c in CORES for p in ([ROOT / c] if c.endswith(".py") else sorted((ROOT / c).rglob("*.py")))]
    assert all(p.is_file() for p in paths)
    return [name_of(p) for p in paths]


def impurities() -> set[tuple[str, str]]:
    return {
        (module, name.split(".")[0])
        for core in cores()
        for module in reached(core)
        for name in imports(path_of(module))
        if name.split(".")[0] in IMPURE
    }


@pytest.mark.parametrize("core", cores())
def test_a_core_brings_in_nothing_that_is_not_pure(core):
    for module, via in reached(core).items():
        for name in imports(path_of(module)):
            top = name.split(".")[0]
            assert top not in IMPURE or (module, top) in EXCEPTIONS, (
                f"{core} reaches {module} (by {via or 'itself'}), which imports {name}"
            )


def test_every_exception_is_needed():
    assert impurities() == EXCEPTIONS


def test_cores_open_no_files():
    """By a bare ``open`` either."""
    for core in cores():
        for node in ast.walk(ast.parse(path_of(core).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"open", "print", "input"}, f"{core}: line {node.lineno}"


def test_topology_imports_nothing_of_ours():
    for path in (ROOT / "topology").rglob("*.py"):
        assert all(name.split(".")[0] not in OURS or name.startswith("topology") for name in imports(path)), path


def test_importing_a_command_brings_in_no_node_package():
    """Not even by way of another module."""
    for path in (ROOT / "p2pcast" / "cli").glob("*.py"):
        brought = {module.split(".")[0] for module in reached(name_of(path))}
        assert not brought & {"trainer_node", "rollout_node", "netem"}, path


# -- tasks

TASK_MAKERS = {"create_task", "ensure_future", "run_coroutine_threadsafe"}
AWAITED = {
    # A task whose maker awaits it, or asks for its result: nothing that it raises is lost.
    "p2pcast/bench/relay.py",
    "p2pcast/daemon.py",
    "p2pcast/transport/dial.py",
    "p2pcast/transport/race.py",
    "rollout_node/attachment.py",
    "rollout_node/control.py",
    "rollout_node/mirrored.py",
    "trainer_node/mirroring.py",
    "trainer_node/packing.py",
    "trainer_node/publishing.py",
    "trainer_node/rank_session.py",
}
THREADS = {
    # A thread whose failure reaches somebody: by a future, by a handle, or by a report.
    "p2pcast/bench/anonymous.py",
    "rollout_node/callbacks.py",
    "rollout_node/vllm_plugin/engine.py",
    "trainer_node/publisher.py",
    "trainer_node/uplink.py",
}


def calls(names: set[str]) -> dict[str, list[int]]:
    """File → lines with a call of one of ``names`` on anything but a TaskGroup, which is named ``group`` or ``tasks``."""
    found: dict[str, list[int]] = {}
    for package in ("p2pcast", "trainer_node", "rollout_node"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                function = node.func
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                owner = function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
                if name in names and owner not in ("group", "tasks"):
                    found.setdefault(str(path.relative_to(ROOT)), []).append(node.lineno)
    return found


def test_a_task_that_nobody_awaits_is_owned():
    """By ``p2pcast.tasks``: an exception in any other would be lost."""
    found = calls(TASK_MAKERS)
    assert found.pop("p2pcast/tasks.py")
    assert found.keys() == AWAITED, found


def test_a_threads_failure_reaches_somebody():
    assert calls({"Thread", "Timer"}).keys() | {"p2pcast/bench/anonymous.py"} == THREADS
