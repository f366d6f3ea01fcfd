"""The units under a real systemd: as process 1 of a container over this machine's own root, without network.

A version reaches a peer bit-exactly, also after a restart of both daemons; ledger and worker enrol. The container needs
Debian's systemd-container.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.deploy_files import ROOT

pytestmark = [pytest.mark.root, pytest.mark.prove]  # test_systemd.py is the sample
SYSTEMD = ROOT / "deploy" / "systemd"
DEADLINE_S = 900.0

PROGRAM = """#!/bin/sh
LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/source:/opt/site exec /opt/python/bin/python3 -B "$@"
"""
COMMAND = """#!/bin/sh
exec /opt/p2pcast/bin/python -m p2pcast.cli "$@"
"""
TARGET = """[Unit]
Requires=basic.target
After=basic.target
Wants=proof.service
"""
PROOF = """[Unit]
After=basic.target
SuccessAction=exit-force
FailureAction=exit-force

[Service]
Type=oneshot
StandardOutput=append:/proof/output
StandardError=append:/proof/output
ExecStart=/bin/bash /proof/proof.sh
ExecStopPost=/bin/sh -c 'echo "$EXIT_STATUS" >/proof/status'
"""
SERVED = """[Service]
ReadWritePaths=/srv/rollout
"""
CHECKPOINT = """
import sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
step = int(sys.argv[1])
weights = np.random.default_rng(0).standard_normal(100_000).astype(np.float16)
weights.view(np.uint16)[np.random.default_rng(step).random(weights.size) < 0.01] += step
folder = Path(f"/srv/checkpoints/step_{step}")
folder.mkdir(parents=True)
save_file({"model.weight": weights.reshape(100, 1000)}, folder / "model.safetensors")
(folder / "model.safetensors").chmod(0o644)
(folder / "STABLE").touch()
"""
SAME = """
import sys
from safetensors.numpy import load_file
folders = ("checkpoints", "rollout")
made, found = (load_file(f"/srv/{name}/step_{sys.argv[1]}/model.safetensors") for name in folders)
assert {n: t.tobytes() for n, t in made.items()} == {n: t.tobytes() for n, t in found.items()}
"""
SCRIPT = """
set -eux
export PATH=/opt/p2pcast/bin:$PATH
until_true() { until "$@"; do sleep 0.2; systemctl is-failed --quiet 'p2pcast-*' && exit 9; true; done; }
ready() { [ "$(curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:$1/$2)" = 200 ]; }
same() { until_true test -f "/srv/rollout/step_$1/STABLE"; python /proof/same.py "$1"; }
install -d -o p2pcast -m 0755 /srv/rollout
sed -i -e 's,^# checkpoints = .*,checkpoints = "/srv/checkpoints",' -e 's,hub.example,127.0.0.1,' \
    -e 's,^install = .*,install = ["safetensors:/srv/rollout"],' /etc/p2pcast/p2pcast.toml
python /proof/checkpoint.py 0
systemctl start p2pcast-hub
until_true ready 7078 healthz
for role in peer ledger worker; do
    p2pcast token create --state /var/lib/p2pcast-hub --role $role -o /etc/p2pcast/$role.token
done
systemctl start p2pcast-peer p2pcast-ledger p2pcast-worker@8000
same 0
python /proof/checkpoint.py 1
same 1
until_true ready 7081 readyz
until_true ready 7079 readyz
test "$(stat -c %U:%a /var/lib/p2pcast/peer/install.sock)" = p2pcast:600
before=$(ls -d /dev/shm/p2pcast-*); test "$(echo "$before" | wc -l)" = 2
systemctl restart p2pcast-hub p2pcast-peer
test "$(ls -d /dev/shm/p2pcast-*)" = "$before"
python /proof/checkpoint.py 2
same 2
until_true sh -c 'journalctl -u p2pcast-worker@8000 | grep -q "this worker has a certificate"'
units="p2pcast-hub p2pcast-peer p2pcast-ledger p2pcast-worker@8000"
test "$(systemctl show -p NRestarts --value $units | tr -d '\\n')" = 0000
systemctl stop 'p2pcast-*.service'
test -z "$(systemctl list-units --state=failed --no-legend 'p2pcast-*')"
"""


def test_version_reaches_a_peer_under_systemd(tmp_path: Path) -> None:
    for tool in ("systemd-nspawn", "curl"):
        assert shutil.which(tool), f"{tool} is missing: apt-get install systemd-container curl"
    proof = tmp_path / "proof"
    proof.mkdir()
    given = {"proof.sh": SCRIPT, "checkpoint.py": CHECKPOINT, "same.py": SAME, "output": "", "status": ""}
    for name, text in given.items():
        (proof / name).write_text(text)
    root = tmp_path / "root"
    root.mkdir()
    binds = {
        f"--bind={proof}": "/proof",
        f"--bind-ro={Path(sys.base_prefix)}": "/opt/python",
        f"--bind-ro={site.getsitepackages()[0]}": "/opt/site",
        f"--bind-ro={ROOT}": "/opt/source",
    }
    files = {
        "usr/lib/sysusers.d/p2pcast.conf": (SYSTEMD / "p2pcast.sysusers").read_text(),
        "etc/p2pcast/p2pcast.toml": (SYSTEMD / "p2pcast.toml").read_text(),
        "etc/systemd/system/proof.target": TARGET,
        "etc/systemd/system/proof.service": PROOF,
        "etc/systemd/system/p2pcast-peer.service.d/rollout.conf": SERVED,
        "opt/p2pcast/bin/python": PROGRAM,
        "opt/p2pcast/bin/p2pcast": COMMAND,
        **{f"etc/systemd/system/{unit.name}": unit.read_text() for unit in SYSTEMD.glob("*.service")},
    }
    laid = tmp_path / "laid"
    for name, text in files.items():
        (laid / name).parent.mkdir(parents=True, exist_ok=True)
        (laid / name).write_text(text)
    for name in ("python", "p2pcast"):
        (laid / "opt/p2pcast/bin" / name).chmod(0o755)
    # A mount namespace of its own: nothing is left mounted. The machine's root is below, and is not changed.
    script = f"""
        set -e
        mount -t tmpfs tmpfs {root} && cd {root} && mkdir upper work merged
        mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work merged
        cp -rT {laid} merged
        exec systemd-nspawn --quiet --register=no --keep-unit --directory=merged --machine=p2pcast-proof \
            --private-network --boot {" ".join(f"{option}:{path}" for option, path in binds.items())} \
            -- systemd.unit=proof.target --show-status=no
    """
    with (tmp_path / "boot.log").open("w") as log:
        subprocess.run(
            ["unshare", "--mount", "bash", "-c", script], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            timeout=DEADLINE_S, check=False,
        )  # fmt: skip
    output = (proof / "output").read_text() + (tmp_path / "boot.log").read_text()
    assert (proof / "status").read_text() == "0\n", output[-8000:]
