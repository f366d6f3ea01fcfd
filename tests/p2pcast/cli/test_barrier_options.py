"""The barrier's options reach the hub, and `p2pcast status` shows the barrier."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from p2pcast.cli.status import table
from tests.support.until import check_runs, wait_until

DEADLINE_S = 600.0


@contextlib.contextmanager
def hub(folder: Path, *options: str) -> Iterator[Path]:
    """A hub in a process of its own that answers; its state folder."""
    state = folder / "hub"
    with tempfile.TemporaryDirectory(prefix="p2pcast-test-", dir="/dev/shm") as shadow:
        words = [
            "--listen",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
            "--plaintext",
            "--state",
            str(state),
            "--shadow",
            f"{shadow}/s",
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "p2pcast.cli", "seed", *words, *options], stderr=subprocess.PIPE, text=True
        )
        try:
            wait_until((state / "daemon.json").exists, check=lambda: check_runs(process))
            yield state
        finally:
            process.terminate()
            process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("options", "timeout_s", "quorum"),
    [((), 30.0, 0.9), (("--barrier-timeout", "2.5", "--barrier-quorum", "0"), 2.5, 0.0)],
)
def test_barrier_options_reach_the_hub(p2pcast, tmp_path, options, timeout_s, quorum):
    with hub(tmp_path, "--commit", "barrier", *options) as state:
        done = p2pcast("status", "--state", state, "--json")
        assert done.returncode == 0, done.stderr
        shown = json.loads(done.stdout)
        assert shown["commit"] == "barrier"
        assert shown["barrier"] == {
            "phase": "idle",
            "version": None,
            "staged": 0,
            "ready": 0,
            "needed": 0,
            "waiting_for": [],
            "deadline_s": None,
            "timeout_s": timeout_s,
            "quorum": quorum,
            "last": None,
        }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--barrier-timeout", "3"), "need --commit barrier"),
        (("--commit", "manual", "--barrier-quorum", "0.5"), "need --commit barrier"),
        (("--commit", "barrier", "--barrier-quorum", "1.5"), "0<=x<=1"),
        (("--commit", "barrier", "--barrier-timeout", "0"), "x>0"),
        (("--commit", "fence"), "auto"),
    ],
)
def test_nonsense_is_refused(p2pcast, tmp_path, options, said):
    done = p2pcast("seed", tmp_path, "--plaintext", "--state", tmp_path / "hub", *options)
    assert done.returncode == 2
    assert said in done.stderr


def shown(barrier: dict[str, Any] | None) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        engine = {
            "name": "vllm:x",
            "ready": True,
            "staged": "0.3",
            "committed": "0.2",
            "pause_s": 0.0125,
            "recomputed_tokens": 48,
            "error": None,
        }
        peer = {"name": "a", "parent": "hub", "engines": [engine]}
        console.print(table({"role": "hub", "run": "ab" * 16, "version": "0.3", "peers": [peer], "barrier": barrier}))
        return console.export_text()


def test_status_shows_late_peers_and_the_last_outcome():
    text = shown(
        {
            "phase": "gathering",
            "version": "0.3",
            "staged": 2,
            "ready": 9,
            "needed": 9,
            "waiting_for": list("bcdefgh"),
            "deadline_s": 12.4,
            "timeout_s": 30.0,
            "quorum": 0.9,
            "last": {"version": "0.2", "outcome": "quorum", "time": 1.0, "staged": 9, "ready": 10, "late": ["b"]},
        }
    )
    assert (
        "barrier 0.3 gathering: 2 of 9 peers have staged the version, 9 are needed, 12 s left; waiting for b, c, d, "
        "e, f and "
        "others" in text
    )
    assert "barrier 0.2: quorum, 9 of 10 peers had staged the version" in text
    assert all(word in text for word in ("0.3", "0.2", "12.5 ms", "48 tokens"))


def test_status_without_a_barrier_shows_none():
    assert "barrier" not in shown(None)
