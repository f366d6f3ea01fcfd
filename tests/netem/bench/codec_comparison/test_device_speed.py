"""``p2pcast bench device`` on torch's CPU: the document's keys. No figure is judged."""

from __future__ import annotations

import json


def test_bench_device_names_the_device_and_times_every_pass(p2pcast, tmp_path):
    file = tmp_path / "device.json"
    done = p2pcast("bench", "device", "--mib", 1, "--rounds", 1, "--device", "cpu", "--json", "-o", file)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == json.loads(file.read_text())
    assert said["device"].startswith("CPU")
    assert said["state_bytes"] == 1 << 20
    assert 0.01 < said["changed"] / said["params"] < 0.014
    assert [row["pass"] for row in said["rows"]] == ["copy", "compare", "digest", "ranks", "scatter"]
    assert all(row["state_bytes_per_s"] > 0 for row in said["rows"])
    assert said["rows"][0]["speed_to_copy"] == 1
