"""The short fault scenario: a peer is killed during a version, the peers below it continue, and it returns in the next
version. Real daemons, on links with rates.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCENARIO = """
what = "a peer is killed in the middle of a version, and comes back in the next"
minutes = 0.7
experiment = "broadcast"
[network]
[[hosts]]
name = "hub"
rate = "20mbit"
[[hosts]]
name = "p"
count = 3
rate = "20mbit"
[[events]]
version = 1
at_s = 0.6
do = "kill"
host = "p1"
[[events]]
version = 2
at_s = 0.2
do = "join"
host = "p1"
[parameters]
payload_mib = 4
rounds = 2
warm_up = 1
chains = 1
[columns]
version = "version"
silence_s = "silence, s"
[[holds]]
what = "nothing is sent twice"
key = "twice_bytes"
below = 0
"""

TRIES = 3
"""A busy machine may be too slow for links of 20 Mbit/s; the lab then reports that, and nothing else is tested."""


@pytest.mark.root
def test_survivors_continue_and_killed_peer_returns(tmp_path: Path) -> None:
    """The experiment itself checks all peers' versions bit for bit, and fails on a difference."""
    (tmp_path / "fault.toml").write_text(SCENARIO)
    command = [
        sys.executable,
        "-m",
        "p2pcast.cli",
        "lab",
        str(tmp_path / "fault.toml"),
        "--json",
        "-o",
        str(tmp_path / "out"),
    ]
    for _ in range(TRIES):
        said = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert said.stdout, said.stderr
        document = json.loads(said.stdout)
        assert document["failed"] == []
        if not [each for calibration in document["calibrations"] for each in calibration["off"]]:
            break
        assert (said.returncode, document["rows"]) == (1, []), "no figure if the network deviates from the request"
    else:
        return
    assert said.returncode == 0
    assert [(row["version"], row["peers"]) for row in document["rows"]] == [(1, 2), (2, 3)]
    assert [row["events"] for row in document["rows"]] == ["kill p1 at 0.6 s", "join p1 at 0.2 s"]
    for row in document["rows"]:
        assert row["silence_s"] is not None
        assert row["all_s"] > row["ideal_s"]
    assert [hold["held"] for hold in document["holds"]] == [True]
