"""``p2pcast bench publish``: a real hub, a real publisher, the document's keys. No figure is judged."""

from __future__ import annotations

import json


def test_bench_publish_measures_both_kinds_of_masters(p2pcast, tmp_path):
    file = tmp_path / "publish.json"
    done = p2pcast("bench", "publish", "--mib", 1, "--steps", 1, "--json", "-o", file)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said == json.loads(file.read_text())
    assert said["state_bytes"] == 1 << 20
    assert [row["row"] for row in said["rows"]] == ["fp32 masters → bf16", "bf16 → bf16"]
    for row in said["rows"]:
        assert row["params"] == 1 << 19
        assert 0.001 < row["changed"] / row["params"] < 0.1
        assert 0 < row["bytes"] < 1 << 18
        assert row["publish_s"] <= row["snapshot_s"] <= row["total_s"]
        assert row["snapshot_to_memcpy"] > 0
        assert row["total_to_memcpy"] > 0
