"""Recorded events, played for the page."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from p2pcast.page.recorded_run import Recorded
from p2pcast.page.replay import Replay

EVENTS = [
    ("joined", {"peer": "a", "region": "eu", "staged": None}),
    ("plan", {"moved": [["a", "hub"]]}),
    ("opened", {"version": "0.1"}),
    ("sealed", {"version": "0.1", "bytes": 5}),
    ("staged", {"peer": "a", "version": "0.1", "after_s": 1.0}),
    ("committed", {"peer": "a", "engine": "e", "version": "0.1", "pause_s": 0.1, "after_s": 2.0}),
]


def recorded() -> list[Recorded]:
    return [Recorded(kind, 1000.0 + 60 * number, facts) for number, (kind, facts) in enumerate(EVENTS)]


async def test_a_replay_ends_in_the_last_state() -> None:
    replay = Replay(recorded(), speed=1e6)
    await replay.play()
    found: dict[str, Any] = json.loads(gzip.decompress(replay.feed.whole()))
    assert found["source"] == "a recorded run"
    assert found["time"] == 1300.0
    assert found["headline"]["text"] == "The engine serves 0.1, the newest version."
    events = sorted(found["events"], key=lambda event: event["id"])
    assert [event["kind"] for event in events] == [kind for kind, _ in EVENTS]


def test_the_command_serves_the_page(tmp_path: Path) -> None:
    lines = [json.dumps({"kind": e.kind, "time": e.time_s, "facts": e.facts}) for e in recorded()]
    (tmp_path / "events").write_text("\n".join(lines))
    command = [sys.executable, "-m", "p2pcast.cli", "replay", str(tmp_path / "events"), "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = re.fullmatch(r"6 events at (http://\S+)/\n", process.stdout.readline())
            assert said is not None
            with urllib.request.urlopen(said[1] + "/page/picture", timeout=60) as answer:
                assert json.load(answer)["source"] == "a recorded run"
        finally:
            process.terminate()


@pytest.mark.parametrize(
    ("text", "error"), [("", "holds no event"), ("x", "line 1 is not JSON"), ("\xff", "cannot be read")]
)
def test_other_files_are_refused(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "events").write_bytes(text.encode("latin-1"))
    command = [sys.executable, "-m", "p2pcast.cli", "replay", str(tmp_path / "events")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert error in done.stderr
