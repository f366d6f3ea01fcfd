"""Plays prime-rl for one version: ``played_prime_rl.py FOLDER @ SETTINGS``. The broadcast is written as its trainer
writes it, and its orchestrator has each server load the folder.
"""

from __future__ import annotations

import json
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

from p2pcast.checkpoint.folder_form import MARKERS
from tests.daemons.conftest import first_state, write

run, at, settings = sys.argv[1:]
assert not Path(run).exists(), "prime-rl refuses the folder of another run"
Path(run).mkdir()
assert at == "@"
found = tomllib.loads(Path(settings).read_text())
assert found["weight_broadcast"] == {"type": "filesystem"}
servers = found["orchestrator"]["model"]["client"]["admin_base_url"]
folder, marker = Path(run) / "broadcasts" / "step_1", MARKERS["prime-rl"]
folder.mkdir(parents=True)
for name in marker.before:
    (folder / name).touch()
written = write(Path(run) / "saved", first_state())
(written / "model.safetensors").rename(folder / "model.safetensors")
(folder / marker.last).touch()
for server in servers:
    for path, body in (("pause", {}), ("update_weights", {"weight_dir": str(folder)}), ("resume", {})):
        while True:
            try:
                with urllib.request.urlopen(f"{server}/{path}", json.dumps(body).encode(), timeout=300) as answer:
                    assert answer.status == 200
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)  # as prime-rl tries again
