"""Parts of a real run, with a real vLLM, are killed by SIGKILL: the run ends as if none had been."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from kill_checks import check_ledger, check_lineage
from killable_learner import Checkpoint
from parity_task import NAME, Parity
from real_run import STALENESS, RealRun
from real_server import make_model

from p2pcast.files.atomic_files import atomic_write
from p2pcast.ground.version import Version

pytestmark = [pytest.mark.vllm, pytest.mark.prove, pytest.mark.timeout(3600)]

PARTS = ["ledger", "w0", "learner", "p0", "e0"]
"""Killed in a random order: ledger, worker, learner, the engine's peer, the engine with all its processes."""
SCRIPT = Path(__file__).with_name("killable_learner.py")


class Learning:
    """The learner's process, and how far it is."""

    def __init__(self, run: RealRun, steps: int) -> None:
        self._run = run
        self.folder = run.folder / "learner"
        self.folder.mkdir()
        self.allow(1)
        config = {
            "folder": str(self.folder),
            "steps": steps,
            "staleness": STALENESS,
            "url": f"http://{run.http('ledger')}",
            "bearer": str(run.folder / "ledger" / "http.token"),
            "model": str(run.model),
            "hub": run.hub,
            "token": str(run.folder / "token"),
        }
        file = run.folder / "learner.json"
        file.write_text(json.dumps(config))
        run.script("learner", str(SCRIPT), str(file))

    def allow(self, more: int) -> None:
        newest = max((Version.parse(line).step for line in self.applied()[-1:]), default=0)
        atomic_write(self.folder / "allowed", str(newest + more).encode())

    def applied(self) -> list[str]:
        file = self.folder / "applied"
        return file.read_text().split() if file.exists() else []

    def until_another_step(self) -> None:
        before = len(self.applied())
        self.allow(2)
        self._run.until(lambda: len(self.applied()) > before, "the run goes on")


def test_run_with_real_engines_survives_the_kill_of_each_part(tmp_path: Path, database: str | None) -> None:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    steps = 3 * len(PARTS) + 3
    model = make_model(tmp_path / "model", vocabulary=Parity.vocabulary)
    with RealRun(tmp_path, NAME, steps, model, engines=1, workers=2, database=database, lease_guess_s=10.0) as run:
        learning = Learning(run, steps)
        for victim in random.Random(3).sample(PARTS, len(PARTS)):
            learning.until_another_step()
            run.kill(victim)
        learning.until_another_step()
        learning.allow(steps)  # to the end
        assert run.wait("learner") == 0
        assert set(run.workers_end().values()) == {0}
        rejections = run.status("ledger")["rejections"]
        assert run.terminate("ledger") == 0
    assert not {"malformed", "forged", "unknown version"} & set(rejections), rejections
    found: Checkpoint = check_lineage(learning.folder, steps, STALENESS)
    check_ledger(tmp_path / "ledger", database, found, STALENESS)
    print(f"{len(learning.applied())} steps applied for {steps}; rejected: {rejections}")
