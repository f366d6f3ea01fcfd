"""Shared by all tests: counting of skips, Hypothesis profiles, running the command, and a machine of one's own.

A test marked ``root`` is skipped where this process is not root or may not make a network namespace. With
``P2PCAST_NO_SKIPS=1`` (CI sets it) every other skip is a failure: a test that silently stopped running proves nothing.
Tests that need root in their own way may skip with a reason that says so.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# With more, torch's threads in two test processes wait for each other's cores: some tests took 60 times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

NO_SKIPS = os.environ.get("P2PCAST_NO_SKIPS") == "1"
NOT_ROOT = "only root, with the right to make network namespaces, can do this"
LONG = ("test_ranks.py", "test_kill.py", "test_cli_errors.py")
"""Files without a vLLM server that take longest among those collected late."""
SHARED_ENGINE = "tests/rollout_node/vllm/two_ranks"
"""Files of this folder share one vLLM server, and so run in one process."""

hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@cache
def is_root() -> bool:
    """Whether this process may do what tests marked ``root`` do."""
    return (
        os.geteuid() == 0
        and not subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode
    )


def pytest_configure() -> None:
    # A shell that starts this in the background has it ignore Ctrl-C, and so would all that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest files come first, so that the processes end at about the same time.
    items.sort(key=lambda item: ("vllm" not in item.keywords, item.path.name not in LONG))
    if any("root" in item.keywords for item in items) and not is_root():
        for item in items:
            if "root" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=NOT_ROOT))


def pytest_collection_finish() -> None:
    # Tests of daemons look for lost tasks by `gc.collect()`, which would look through all that was collected each time.
    gc.collect()
    gc.freeze()


def _forbid(report: pytest.TestReport | pytest.CollectReport) -> None:
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if is_root() or "root" not in reason:
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid} was skipped where nothing may be (P2PCAST_NO_SKIPS=1): {reason}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Minutes of work by folder, summed over all workers: where a run that takes too long has to be cut."""
    minutes: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folders = Path(report.nodeid.partition("::")[0]).parent.parts[1:3]
                minutes["/".join(folders) or "tests"] += report.duration / 60
    if minutes.total() > 1:
        terminalreporter.write_line(
            "minutes by part: "
            + ", ".join(f"{part} {spent:.1f}" for part, spent in minutes.most_common() if spent > 0.05)
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist=loadfile``, with the files that share an engine as one."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadEngine(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return SHARED_ENGINE if nodeid.startswith(SHARED_ENGINE) else str(super()._split_scope(nodeid))

    return LoadEngine(config, log)


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
def own_machine() -> list[str]:
    """Words before a command that give it loopback, processes and a /dev/shm of its own: the usual ports are free
    there, and nothing of it stays.
    """
    inside = 'ip link set lo up && mount -t tmpfs p2pcast-test /dev/shm && exec "$@"'
    for flags in (["--net"], ["--net", "--user", "--map-root-user"]):
        words = ["unshare", *flags, "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", inside, "sh"]
        if not subprocess.run([*words, "true"], capture_output=True).returncode:
            return words
    pytest.skip("only root can make a network of its own on this machine")


@pytest.fixture
def p2pcast() -> Run:
    """Run the command in a process of its own, to its end: ``p2pcast("inspect", path, env={…})``."""

    def run(*words: object, timeout_s: float = 600.0, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "p2pcast.cli", *map(str, words)]
        env = {**os.environ, **options.pop("env", {})}
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, **options)

    return run


_AS_NOBODY = """
import encodings.idna, json, os, socket, sys, urllib.error, urllib.request
os.setgroups([]); os.setgid(65534); os.setuid(65534); os.umask(0)
"""


@pytest.fixture
def stranger() -> Run:
    """Run Python code as another user of this machine, to its end, for tests marked ``root``:
    ``stranger("os.mkdir(sys.argv[1])", path)``.
    """

    def run(code: str, *words: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _AS_NOBODY + code, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd="/")
        assert not (check and done.returncode), done.stderr
        return done

    return run


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /dev/shm, in tmpfs: every user of the machine may write to it, and no user may move another's
    files.
    """
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)
