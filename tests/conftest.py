"""What all tests share: how skips count, Hypothesis profiles, running the command, and networks of one's own.

A test marked ``root`` is skipped where this process is not root or may not make a network namespace. With ``P2PCAST_NO_SKIPS=1`` (CI sets it)
every other skip is a failure: a test that silently stopped running proves nothing. Tests that need root in their own way may skip with a reason that says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import hypothesis
import pytest

NO_SKIPS = os.environ.get("P2PCAST_NO_SKIPS") == "1"
NOT_ROOT = "only root, with the right to make network namespaces, can do this"

hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@cache
def is_root() -> bool:
    """Whether this process may do what tests marked ``root`` do."""
    return os.geteuid() == 0 and not subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if any("root" in item.keywords for item in items) and not is_root():
        for item in items:
            if "root" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=NOT_ROOT))


def _forbid(report: pytest.TestReport | pytest.CollectReport) -> None:
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if is_root() or "root" not in reason:
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid} was skipped where nothing may be (P2PCAST_NO_SKIPS=1): {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report = yield
    _forbid(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    report = yield
    _forbid(report)
    return report


@pytest.fixture(scope="session")
def own_network() -> list[str]:
    """Words before a command that give it a network of its own, with nothing but loopback: the usual ports are free there."""
    for flags in (["--net"], ["--net", "--user", "--map-root-user"]):
        words = [
            "unshare",
            *flags,
            "--kill-child",
            "--fork",
            "--pid",
            "--mount-proc",
            "sh",
            "-c",
            'ip link set lo up && exec "$@"',
            "sh",
        ]
        if not subprocess.run([*words, "true"], capture_output=True).returncode:
            return words
    pytest.skip("this machine gives no network namespaces, not even to users")


@pytest.fixture
def p2pcast() -> Run:
    """Run the command in a process of its own, to its end: ``p2pcast("inspect", path, env={…})``."""

    def run(*words: object, timeout_s: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "p2pcast.cli", *map(str, words)]
        env = {**os.environ, **options.pop("env", {})}
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, **options)

    return run
