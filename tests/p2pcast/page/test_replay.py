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

from p2pcast.page.recorded_run import Recorded, read_events
from p2pcast.page.replay import RunReplay

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
    replay = RunReplay(recorded(), speed=1e6, name="run.events")
    await replay.play()
    found: dict[str, Any] = json.loads(gzip.decompress(replay.feed.whole()))
    assert (found["run"], found["source"]) == ("run.events", "a recorded run")
    assert found["time"] == 1300.0
    assert found["headline"]["text"] == "The engine serves 0.1, the newest version."
    events = sorted(found["events"], key=lambda event: event["id"])
    assert [event["kind"] for event in events] == [kind for kind, _ in EVENTS]


def simulated(*more: str) -> bytes:
    command = [sys.executable, "-m", "p2pcast.cli", "simulate", "--peers", "30", "--versions", "3", "--churn", "50"]
    return subprocess.run([*command, "--json", *more], check=True, capture_output=True, timeout=600).stdout


async def test_a_simulation_plays_as_a_run_does(tmp_path: Path) -> None:
    told = simulated("--events", str(tmp_path / "events"))
    assert told == simulated(), "telling of events changes the simulation"
    with (tmp_path / "events").open() as lines:
        events = list(read_events(lines))
    replay = RunReplay(events, speed=1e9, name="run.events")
    await replay.play()
    found: dict[str, Any] = json.loads(gzip.decompress(replay.feed.whole()))
    assert found["source"] == "a simulation"
    assert re.search(
        r"(?:peers have|Each peer has) 0\.3, the newest version; no engine serves it yet\.", found["headline"]["text"]
    )
    names = {"hub", *found["peers"]}
    assert {row["parent"] for row in found["peers"].values()} <= names | set(found["gone"])
    assert {row["region"] for row in found["peers"].values()} == {f"region-{n}" for n in range(5)}
    lost = [event for event in events if event.kind == "left"]
    assert lost
    assert len(found["peers"]) == sum(event.kind == "joined" for event in events) - len(lost)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "p2pcast.cli", "simulate", "--peers", "3", "--versions", "3"]
    done = subprocess.run(
        [*command, "--events", str(tmp_path / "no" / "events")], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 1
    assert "events cannot be written: No such file or directory" in done.stderr


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
