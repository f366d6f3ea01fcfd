"""Check a change in two minutes: ``python -m tests.check [--base COMMIT]``; ``make check BASE=COMMIT``.

Runs lint and format of everything, mypy on the changed files, the tests of the rules, and the pure tests that depend on
the change. A test file is pure if no module that it needs imports a package of STARTERS, so that its tests start no
process and open no socket or database. A page selects the tests of the rules alone. Every pure test runs after a change
of a file that no Python file imports: a conftest.py, settings, data, a file that is gone.

Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.imports import MODULES, OURS, ROOT, TESTS, importers_by_test, needed_by_test

STARTERS = {
    "aiohttp", "multiprocessing", "obstore", "playwright", "psycopg", "sglang", "signal", "socket", "sqlalchemy",
    "subprocess", "uvloop", "vllm",
}  # fmt: skip
OPEN_NONE = {"p2pcast.transport.socket_options", "p2pcast.transport.tcp_info", "rollout_node.in_engine.install_frames"}
"""Modules that import ``socket`` and work on sockets that they are given."""
ALWAYS = [
    *(f"tests/test_{name}.py" for name in ("words", "architecture", "names_in_texts", "house")),
    *(f"tests/pins/test_{name}.py" for name in ("event_kinds", "commands", "python_api")),
]
"""Tests of the rules, and pins that need no daemon."""
SLOW_S = {
    "tests/p2pcast/codec/test_any_values.py": 11,
    "tests/p2pcast/codec/test_fuzz.py": 20,
    "tests/p2pcast/ledger_api/test_api_records.py": 15,
    "tests/p2pcast/tasks/test_holdem.py": 5,
    "tests/p2pcast/wire/test_fuzz.py": 7,
    "tests/p2pcast/wire/test_golden.py": 4,
    "tests/p2pcast/wire/test_messages.py": 4,
    "tests/pins/test_wire.py": 12,
    "tests/topology/test_plan.py": 9,
    "tests/topology/test_plan_changes.py": 4,
    "tests/topology/test_score_demotion.py": 4,
    "tests/trainer_node/commit/test_barrier_histories.py": 4,
    "tests/trainer_node/ledger/test_batch_cut.py": 7,
}
"""CPU time of the pure test files that take at least 4 seconds."""
OTHER_S = 0.5
"""Mean CPU time of the others."""
MOST_S = 80.0
"""CPU time of the pure tests of one change. Beyond it the slowest files are left to ``make test``."""
MARKED = "prove or vllm or root"

MODULE_OF = {str(path.relative_to(ROOT)): name for name, path in (MODULES | TESTS).items()}
TEST_FILES = {path: name for path, name in MODULE_OF.items() if Path(path).name.startswith("test_")}


def main() -> int:
    parser = argparse.ArgumentParser(description="Check style, types and pure tests of a change.")
    parser.add_argument("--base", help="commit to compare with; by default the last one that is on main, too")
    base = parser.parse_args().base or branch_point()
    paths, began = changed(base), time.monotonic()
    ruff = [sys.executable, "-m", "ruff"]
    checks = {"style": [[*ruff, "check", "--quiet", "."], [*ruff, "format", "--quiet", "--check", "."]]}
    if not paths:
        print(f"No file differs from {base[:12]}: style alone.")
        return run("style", checks["style"])
    checks["types"] = types(paths)
    with ThreadPoolExecutor(1) as pool:
        passed = pool.submit(lambda: max(run(part, commands) for part, commands in checks.items()))
        tests, reason, left = chosen(paths)
    print(f"{len(paths)} files differ from {base[:12]}. {reason}", flush=True)
    suite = [sys.executable, "tests/suite.py", "--workers=2", "--", "-q", f"-m=not ({MARKED})", *tests]
    failed = max(passed.result(), run("tests", [suite]))
    print(f"{(time.monotonic() - began) / 60:.1f} minutes in all. {not_run(left)}")
    return failed


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def branch_point() -> str:
    """The last commit that is also on origin/main, or on main where there is no such remote."""
    known = git("for-each-ref", "--format=%(refname:short)", "refs/remotes/origin/main", "refs/heads/main").split()
    return git("merge-base", "HEAD", max(known, key=len, default="HEAD")).strip()


def changed(base: str) -> list[str]:
    """Files of the working tree that differ from a commit, also untracked ones and those that are gone."""
    differ = git("diff", "--name-only", "--no-renames", "-z", base)
    return sorted(filter(None, (differ + git("ls-files", "--others", "--exclude-standard", "-z")).split("\0")))


def types(paths: list[str]) -> list[list[str]]:
    """Commands of mypy, as in ``make types``, for the changed files alone."""
    there = [path for path in paths if path in MODULE_OF]
    product = [path for path in there if path.startswith((*(f"{package}/" for package in OURS), "examples/research/"))]
    tests = [path for path in there if path.startswith("tests/")]
    mypy = [sys.executable, "-m", "mypy"]
    commands = [[*mypy, *product]] if product else []
    return commands + ([[*mypy, "--config-file=tests/mypy.ini", *tests]] if tests else [])


def is_pure(test: str) -> bool:
    return not any(
        name.split(".")[0] in STARTERS
        for module, names in importers_by_test(test).items()
        if module not in OPEN_NONE
        for name in names
    )


def chosen(paths: list[str]) -> tuple[list[str], str, list[str]]:
    """Test files to run, the reason, and those that depend on the change and do not run."""
    pages = [path for path in paths if path.endswith(".md") or path.startswith("docs/")]
    unknown = [path for path in paths if path not in pages and (path not in MODULE_OF or path.endswith("conftest.py"))]
    modules = {MODULE_OF[path] for path in paths if path in MODULE_OF}
    depend = {path for path, name in TEST_FILES.items() if unknown or (modules and modules & needed_by_test(name))}
    depend |= {path for path in TEST_FILES for page in pages if Path(page).name in (ROOT / path).read_text()}
    pure = sorted(path for path in depend.difference(ALWAYS) if is_pure(TEST_FILES[path]))
    pure.sort(key=lambda path: -SLOW_S.get(path, OTHER_S))
    while sum(SLOW_S.get(path, OTHER_S) for path in pure) > MOST_S:
        pure.pop(0)
    which = f"every pure test, since {unknown[0]} changed" if unknown else "the pure tests that import what changed"
    reason = f"Chosen: {len(ALWAYS)} files of rules and pins, which read everything; {len(pure)} files: {which}."
    return [*ALWAYS, *pure], reason, sorted(depend.difference(ALWAYS, pure))


def not_run(left: list[str]) -> str:
    """The line on tests that did not run."""
    folders = Counter("/".join(Path(path).parts[:2]) for path in left)
    names = left if len(left) <= 8 else [f"{folder} ({count})" for folder, count in folders.most_common()]
    depend = f"{len(left)} test files that depend on the change: {', '.join(names)}; " if left else ""
    return f"Not run: {depend}tests marked {MARKED}; tests that run p2pcast as a command. `make test` runs them."


def run(part: str, commands: list[list[str]]) -> int:
    """Run commands to the end. 1 if one of them failed."""
    began = time.monotonic()
    failed = max((subprocess.run(command, cwd=ROOT).returncode != 0 for command in commands), default=False)
    print(f"{part}: {'FAILED' if failed else 'passed'}, {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
