"""The unchanged examples of the Hugging Face adapters. TRL is installed in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from netem.demo.train import EOS
from tests.environments import ROOT, python_of
from tests.examples.test_examples import EXAMPLES, STEPS, Stage, stage

__all__ = ["stage"]  # a fixture
CHAT = {
    "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    "response_template": {
        "defaults": {"role": "assistant"},
        "start_anchor": "=",
        "fields": {"content": {"close": EOS, "content": "text"}},
    },
}
"""Of the tokenizer of a chat model: TRL's rollout worker needs both."""
ON_CPU = ROOT / "tests" / "trainer_node" / "frameworks" / "trl_on_cpu.py"


def test_async_grpo_trains_with_the_weights_of_a_peer(stage: Stage) -> None:
    out = stage.joined_with_folder()
    stage.train(str(python_of("trl")), str(ON_CPU), str(EXAMPLES / "trl_async_grpo.py"), more=[stage.folder / "peer"])
    # One sync before the first step, one after each.
    stage.assert_trained(out / f"step_{STEPS + 1}")


def test_trainer_publishes_every_third_step_and_the_last(stage: Stage) -> None:
    out = stage.joined_with_folder()
    stage.train(sys.executable, str(EXAMPLES / "trainer_callback.py"))
    stage.assert_trained(out / f"step_{STEPS}")


def test_trainer_with_fsdp2_publishes_from_two_ranks(stage: Stage) -> None:
    out = stage.joined_with_folder()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    stage.train(*torchrun, str(EXAMPLES / "trainer_callback.py"))
    stage.assert_trained(out / f"step_{STEPS}")


@pytest.mark.prove  # test_async_grpo_trains_with_the_weights_of_a_peer is the sample
def test_async_grpo_with_fsdp2_on_two_ranks(stage: Stage) -> None:
    out = stage.joined_with_folder()
    torchrun = [str(python_of("trl")), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    stage.train(*torchrun, str(ON_CPU), str(EXAMPLES / "trl_async_grpo.py"), more=[stage.folder / "peer"])
    stage.assert_trained(out / f"step_{STEPS + 1}")


@pytest.mark.prove  # test_async_grpo_trains_with_the_weights_of_a_peer is the sample
@pytest.mark.vllm
def test_async_grpo_with_a_vllm_server(stage: Stage) -> None:
    """TRL's own rollout worker, and a real vLLM that a peer keeps at the newest version."""
    file = stage.base / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | CHAT))
    port, state = stage.vllm_server()
    url = f"http://127.0.0.1:{port}"
    stage.train(str(python_of("trl")), str(ON_CPU), str(EXAMPLES / "trl_with_vllm.py"), more=[url])
    verify = [sys.executable, "-m", "p2pcast.cli", "verify", "--live", "--state", str(state), "--json"]
    verified = subprocess.run(verify, capture_output=True, text=True, timeout=900)
    assert verified.returncode == 0, verified.stderr
    assert f"0.{STEPS + 1}" in verified.stdout
