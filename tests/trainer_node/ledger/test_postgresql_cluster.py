"""The tests' own PostgreSQL server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.process_ends import wait_for_end
from tests.trainer_node.ledger.postgresql_cluster import installed

STARTS = """
import signal
from tests.trainer_node.ledger.postgresql_cluster import postgresql
with postgresql() as cluster:
    print(cluster.folder, flush=True)
    signal.pause()
"""


def test_server_ends_when_its_tests_are_killed() -> None:
    installed()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    with subprocess.Popen([sys.executable, "-c", STARTS], env=environment, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        folder = Path(tests.stdout.readline().strip())
        server = int((folder / "data" / "postmaster.pid").read_text().split()[0])
        tests.kill()
    wait_for_end(server)
    shutil.rmtree(folder)
    folder.with_suffix(".log").unlink()
