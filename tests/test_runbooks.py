"""Runs the commands of docs/guides/runbooks.md that move a hub and replace its secrets, on a hub and two peers.

All commands run in one shell, in a network and with a file of host names of their own. Peer 1 knows the hub by its
name, peer 2 by its address. ``tests/daemons/rollouts/test_runbooks.py`` runs the commands of backups.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from safetensors.numpy import load_file

from tests.runbook_blocks import blocks

TRAINER = """
import sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file

rng, step, folder = np.random.default_rng(0), int(sys.argv[1]), sys.argv[2]
weights = rng.standard_normal(4_000_000).astype(np.float16)
for _ in range(step):
    weights.view(np.uint16)[rng.random(weights.size) < 0.01] += 1
part = Path(f"{folder}/.step_{step}.part")
part.mkdir(parents=True)
save_file({"model.weight": weights.reshape(2000, 2000)}, part / "model.safetensors")
part.rename(f"{folder}/step_{step}")
Path(f"{folder}/step_{step}/STABLE").touch()
"""
BEGIN = r"""
printf '127.0.0.1 localhost\n127.0.0.1 hub.example\n' > names
mount --bind names /etc/hosts
python trainer.py 0 checkpoints
p2pcast seed checkpoints --state hub --token-file token --listen 127.0.0.1:7077 & HUB=$!
until [ -f token ]; do sleep 0.2; done
p2pcast join hub.example:7077 --token-file token --install safetensors:rollout-1 --state peer-1 --name peer-1 & PEER1=$!
p2pcast join 127.0.0.1:7077 --token-file token --install safetensors:rollout-2 --state peer-2 --name peer-2 & PEER2=$!
installed() { for n in "${@:2}"; do until [ -f "rollout-$n/step_$1/STABLE" ]; do sleep 0.2; done; done; }
# Bytes of artifacts that a peer's process has received: state, peer.
received() { curl -s "$(url "$1")/metrics" \
    | awk '/^p2pcast_received_bytes_total/ {sum += $2} END {printf "%s %d\n", name, sum}' name="$2"; }
url() { sed 's/.*"\(http:[^"]*\)".*/\1/' "$1/daemon.json"; }
joined() { until curl -s "$(url "$1")/metrics" | grep -q '^p2pcast_hub_peers 2'; do sleep 0.2; done; }
installed 0 1 2
"""


def test_commands_of_the_page(tmp_path: Path, own_machine: list[str]) -> None:
    folder = tmp_path
    (folder / "trainer.py").write_text(TRAINER)
    page = blocks()
    script = [
        BEGIN,
        # The hub moves: peer 1 follows the name, and peer 2 is started again.
        page["move"], page["move-literal"],
        "joined hub-there; python trainer.py 1 checkpoints; installed 1 1 2",
        "received peer-1 moved-1; received peer-2 moved-2",
        # Tokens.
        "OLD=$(p2pcast token create --state hub-there --json | sed 's/.*\"id\": \"\\([0-9a-f]*\\)\".*/\\1/')",
        page["tokens"],
        "p2pcast token list --state hub-there --json > tokens",
        "cp hub-there/http.token bearer-before; cp peer-1/http.token peer-bearer-before",
        page["bearer"],
        "joined hub-there; python trainer.py 2 checkpoints; installed 2 1 2",
        "if cmp -s hub-there/http.token bearer-before || cmp -s peer-1/http.token peer-bearer-before; then exit 5; fi",
        # The authority. A peer that was not started again keeps running, with its versions.
        "cp peer-1/peer.json peer-1-before.json; cp token token-before",
        page["authority"], "until ! cmp -s token token-before; do sleep 0.2; done",
        "python trainer.py 3 checkpoints; kill -0 $PEER1 $PEER2",
        page["authority-peers"], "joined hub-there; installed 3 1 2",
        "received peer-1 authority-1; received peer-2 authority-2",
        "python trainer.py 4 checkpoints; installed 4 1 2",
        # The run key.
        page["run-key"], page["run-key-peers"],
        "joined hub-next; received peer-1-next key-1; received peer-2-next key-2",
        "python trainer.py 5 checkpoints-next; installed 5 1 2",
        "p2pcast verify rollout-1/latest --against http://127.0.0.1:7078",
        "p2pcast verify rollout-2/latest --against http://127.0.0.1:7078",
        "kill $HUB $PEER1 $PEER2; wait",
    ]  # fmt: skip
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*own_machine, "bash", "-eu", "-o", "pipefail", "-c", "\n".join(script)],
        cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "Traceback" not in done.stderr
    print(done.stdout[-4000:])
    state = 8_000_000
    received = {name: int(count) for name, count in re.findall(r"^([a-z]+-[12]) (\d+)$", done.stdout, re.MULTILINE)}
    assert set(received) == {f"{kind}-{n}" for kind in ("moved", "authority", "key") for n in (1, 2)}
    assert state <= received.pop("moved-1") < 1.2 * state, "the process that fetched the state once, and no more"
    assert all(count < 0.2 * state for count in received.values()), received
    for n in (1, 2):
        for step in (4, 5):
            sent = load_file(
                folder / ("checkpoints" if step < 5 else "checkpoints-next") / f"step_{step}/model.safetensors"
            )
            got = load_file(folder / f"rollout-{n}" / f"step_{step}" / "model.safetensors")
            assert {name: one.tobytes() for name, one in got.items()} == {
                name: one.tobytes() for name, one in sent.items()
            }


def test_each_block_of_the_page_is_run() -> None:
    tests = (Path(__file__), Path(__file__).parent / "daemons" / "rollouts" / "test_runbooks.py")
    named = {name for file in tests for name in re.findall(r'page\["([\w-]+)"\]', file.read_text())}
    assert set(blocks()) == named
