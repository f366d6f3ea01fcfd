"""Router replay through a whole run of real processes. vLLM returns the experts of its tokens, and a worker hands them
in. The ledger compares them with the model's shape, and ``p2pcast learn`` trains with them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import interpreted_triton
import pytest
from parity_task import NAME as PARITY
from real_run import RealRun, failures_of

from trainer_node.learning.monitoring.run_log import read_run

MAKER = Path(__file__).parents[2] / "rollout_node" / "vllm" / "expert_models.py"
STEPS, VOCABULARY = 4, 16
CONFIG = """
[model]
path = "{model}"
threads = 1
[hub]
address = "{hub}"
token-file = "{folder}/token"
[ledger]
url = "http://{ledger}"
bearer-file = "{folder}/ledger/http.token"
[train]
router-replay = "on"
[optimizer]
lr = 1e-6
[checkpoint]
folder = "{folder}/learner"
[watch]
live-limit = 30
"""


@pytest.mark.vllm
@pytest.mark.prove  # tests/rollout_node/vllm/test_experts_of_vllm.py is the sample
@pytest.mark.timeout(3600)
def test_a_run_trains_with_the_experts_of_its_engine(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    model = tmp_path / "model"
    subprocess.run([sys.executable, str(MAKER), str(model), "moe", "0", str(VOCABULARY)], check=True, timeout=900)
    with RealRun(
        tmp_path,
        PARITY,
        STEPS,
        model,
        engines=1,
        workers=1,
        live_trainer=True,
        engine_flags=interpreted_triton.FLAGS,
        engine_options=interpreted_triton.options(tmp_path / "triton"),
        ledger_options=["--expert-shape", "6,4,16"],
    ) as run:
        file = tmp_path / "run.toml"
        file.write_text(CONFIG.format(model=model, hub=run.hub, ledger=run.http("ledger"), folder=tmp_path))
        run.command("learner", "learn", str(file))
        assert run.wait("learner") == 0, run.said("learner")
        assert set(run.workers_end().values()) == {0}
        rejections = run.status("ledger")["rejections"]
        assert failures_of(run) == []
    assert not {"malformed", "forged"} & set(rejections), rejections
    steps = read_run(tmp_path / "learner").steps
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        print(f"step {step.step}: {step.replayed_share:.1%} of tokens replayed,", end=" ")
        print(f"KL {step.kl_replayed:.2e} with replay, {step.kl_own_routing:.2e} without")
        assert step.replay_refused == 0
        assert step.replayed_share is not None
        assert step.replayed_share > 0.5  # all tokens but the last of each short rollout
    assert sum(step.kl_replayed or 0 for step in steps) < sum(step.kl_own_routing or 0 for step in steps)
