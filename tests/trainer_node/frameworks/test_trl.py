"""The adapter of TRL. The real AsyncGRPOTrainer runs in an environment of its own, as a user's program."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from statistics import median

import pytest

from netem.fleet.processes import Processes
from p2pcast.ground.errors import UsageError
from tests.environments import ROOT, python_of
from tests.examples.test_examples import EXAMPLES, Stage
from trainer_node.frameworks.trl import P2PCast

HERE = Path(__file__).parent
PROOF_STEPS = 20
FIGURES = (
    "model_bytes",
    "sent_bytes",
    "changed",
    "copy_s",
    "store_s",
    "live_s",
    "save_model_s",
    "grown_bytes",
    "kept_bytes",
)
"""Printed by the proof, for docs/notes/measurements.md."""


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(UsageError, match=r"pip install 'trl==1\.16\.\*'"):
        P2PCast("hub:7077")


@pytest.mark.parametrize("fraction", [0, -0.5, 1.01])
def test_a_share_of_no_engines_is_refused(fraction: float) -> None:
    with pytest.raises(UsageError, match="more than 0 and at most 1, or None"):
        P2PCast("hub:7077", live_fraction=fraction)


def test_importing_the_adapter_loads_no_framework() -> None:
    code = """if True:
        import sys
        import trainer_node.frameworks
        import trainer_node.frameworks.trl
        print([name for name in ("torch", "transformers", "trl", "trainer_node.sdk") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.prove  # test_hugging_face_examples.py has the sample
@pytest.mark.timeout(3000)
def test_every_sync_of_a_real_training_is_exact_at_two_peers(tmp_path: Path, shared: Path) -> None:
    with Processes(tmp_path) as processes:
        stage = Stage(tmp_path, shared, processes, hidden=1024, layers=8)
        found, peers = tmp_path / "found.jsonl", [tmp_path / "peer", tmp_path / "second"]
        installed = [stage.joined_with_folder(peer.name) for peer in peers]
        command = [str(python_of("trl")), str(HERE / "checked_syncs.py"), str(found), ",".join(map(str, peers))]
        stage.train(*command, str(EXAMPLES / "trl_async_grpo.py"), more=[peers[0]], steps=PROOF_STEPS)
        for folder in installed:
            stage.assert_trained(folder / f"step_{PROOF_STEPS + 1}")
    syncs = [json.loads(line) for line in found.read_text().splitlines()]
    assert [sync["version"] for sync in syncs] == [f"0.{step}" for step in range(1, PROOF_STEPS + 2)]
    assert all(sync["peers"] == 2 and sync["differing"] == 0 for sync in syncs)
    later = syncs[2:]
    # The first sync allocates two copies of the published model; a later one makes no second model.
    assert median(sync["grown_bytes"] for sync in later) < later[0]["model_bytes"] / 2
    for key in FIGURES:
        print(f"{key}: first sync {syncs[0][key]:.4g}, median of later ones {median(s[key] for s in later):.4g}")
