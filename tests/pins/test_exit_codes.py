"""Exit codes: a case for each way in which a command may end. More cases are in tests/test_cli_errors.py."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import environment, run

DONE, FAILED, USAGE, REFUSED, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130
DEADLINE_S = 600.0
AGAIN_S = 20.0
"""Time in seconds until Ctrl-C comes again: longer than an interpreter needs to end on a busy machine."""
POLL_S = 0.01


@pytest.fixture
def taken() -> Iterator[str]:
    """An address that another socket listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield f"127.0.0.1:{other.getsockname()[1]}"


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A file that begins as a delta does."""
    file = tmp_path / "damaged.p2pd"
    file.write_bytes(b"p2pd" + bytes(200))
    return file


def test_0_done() -> None:
    assert run("--version").returncode == DONE
    assert run("seed", "--help").returncode == DONE


def test_1_something_on_this_machine(tmp_path: Path, taken: str) -> None:
    (tmp_path / "checkpoints").mkdir()
    folders = ("--state", tmp_path / "state", "--shadow", tmp_path / "shadow")
    done = run("seed", tmp_path / "checkpoints", *folders, "--listen", taken, "--http", "127.0.0.1:0")
    assert done.returncode == FAILED, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("seed", "--nonsense"),
        ("seed", "--chains", "0"),
        ("join", "127.0.0.1:1", "--install", "safetensors:x"),
        ("seed", "none"),
    ],
    ids=["command", "option", "value", "no token", "no checkpoints"],
)
def test_2_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = run(*words)
    assert done.returncode == USAGE, done.stderr


def test_3_refused_or_damaged(damaged: Path) -> None:
    done = run("inspect", damaged)
    assert done.returncode == REFUSED, done.stderr


def test_4_unreachable() -> None:
    done = run("status", "--hub", "http://127.0.0.1:1")
    assert done.returncode == UNREACHABLE, done.stderr


def test_130_interrupted(tmp_path: Path) -> None:
    """By Ctrl-C, while it reads a token that does not come."""
    fifo = tmp_path / "token"
    os.mkfifo(fifo)
    words = ("join", "127.0.0.1:1", "--install", f"safetensors:{tmp_path}", "--token-file", fifo, "--plaintext")
    command = [sys.executable, "-m", "p2pcast.cli", *map(str, words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            writer = opened(fifo)
            code = interrupted(process)
            os.close(writer)
        finally:
            process.kill()
        assert process.stderr is not None
        assert code == INTERRUPTED, process.stderr.read()


def interrupted(process: subprocess.Popen[str]) -> int:
    """The exit code. Ctrl-C comes again, but late: one that comes just before a read blocks does not end the read, and
    one that comes while Python ends would be the exit code.
    """
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(AGAIN_S)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"not interrupted within {DEADLINE_S:.0f} s")


def opened(fifo: Path) -> int:
    """The writing end, once the reading end is open."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
        assert time.monotonic() < deadline, "no process reads the token file"
        time.sleep(POLL_S)
