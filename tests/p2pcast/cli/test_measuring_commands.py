"""Commands that measure: a table for people, a JSON document for programs."""

from __future__ import annotations

import json

import numpy as np


def test_bench_codec_shows_a_table_and_writes_a_document(p2pcast, make_checkpoint, tmp_path):
    old = np.arange(4096, dtype=np.uint16)
    new = old.copy()
    new[::100] += 1
    folders = [
        make_checkpoint(tmp_path / name, {"w": ("BF16", [4096], words.tobytes())})
        for name, words in (("old", old), ("new", new))
    ]
    file = tmp_path / "codec.json"
    done = p2pcast("bench", "codec", "--old", folders[0], "--new", folders[1], "--working-set", 1, "-o", file)
    assert done.returncode == 0, done.stderr
    assert "÷ PULSE" in done.stdout
    said = json.loads(file.read_text())
    assert said["changed"] == 41
    wanted = {
        "bytes",
        "pulse_bytes",
        "entropy_bytes",
        "ratio_to_pulse",
        "ratio_to_entropy",
        "encode_vs_scan",
        "decode_vs_scan",
    }
    assert wanted <= said.keys()


def test_the_file_of_a_document_that_cannot_be_written(p2pcast, make_checkpoint, tmp_path):
    folder = make_checkpoint(tmp_path / "same", {"w": ("BF16", [2], bytes(4))})
    done = p2pcast(
        "bench", "codec", "--old", folder, "--new", folder, "--working-set", 1, "-o", tmp_path / "none" / "codec.json"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("p2pcast: cannot write")
    assert "Traceback" not in done.stderr
