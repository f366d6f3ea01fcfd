"""Versions of a model with an adapter beside it in a real vLLM engine.

Requests of the base get the model alone, bit for bit. Requests of the adapter get the tokens that transformers computes
from both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from real_server import ENVIRONMENT, make_model
from safetensors.torch import load_file

pytestmark = [pytest.mark.vllm, pytest.mark.prove]  # tests/rollout_node/in_engine/test_adapter_weights.py is the sample

PROMPTS = [[5, 6, 7], [100, 200, 300, 400], [9]]
TOLERANCE = 1e-4
"""Largest difference of a log-probability between vLLM and transformers, in float32: the two round sums in different
orders."""


def script(*arguments: Path) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("beside_engine.py")), *map(str, arguments)]
    environment = {**os.environ, **ENVIRONMENT, "P2PCAST_SOCK": "/nonexistent"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beside")


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[str, Any]:
    pytest.importorskip("vllm", reason="needs vLLM", exc_type=ImportError)
    (folder / "work").mkdir()
    return script(make_model(folder / "model", dtype="float32"), folder / "work")


def test_installs_are_whole_then_deltas_and_audits_find_every_tensor(seen: dict[str, Any]) -> None:
    """No tensor goes through the model's loader, though vLLM has wrapped every linear layer."""
    assert seen["installs"] == ["dense", "sparse", "sparse"]
    assert seen["audits"] == [[0, 0]] * 3
    assert seen["reload"] == 0


def test_a_failed_commit_leaves_model_and_adapter_unchanged(seen: dict[str, Any]) -> None:
    assert seen["rollback"] == [True] * 6


def test_audit_notices_a_flipped_bit_of_either(seen: dict[str, Any]) -> None:
    assert seen["noticed"] == [True] * 3


def test_the_base_answers_as_a_fresh_engine_with_the_model_alone(seen: dict[str, Any], folder: Path) -> None:
    """Tokens and log-probabilities, bit for bit."""
    assert script(folder / "work" / "v2" / "theta")["base"] == seen["base"][2]
    assert seen["base"][0] != seen["base"][1] != seen["base"][2] != seen["phi"][2]


def test_the_base_answers_alike_in_one_batch_with_the_adapter(seen: dict[str, Any]) -> None:
    """The server's only slot has the adapter. Batches of two sizes round differently."""
    for beside, alone in zip(seen["together"], seen["base"], strict=True):
        for row, other in zip(beside, alone, strict=True):
            assert [token for token, _ in row] == [token for token, _ in other]
            assert max(abs(one[1] - two[1]) for one, two in zip(row, other, strict=True)) < TOLERANCE


def test_the_adapter_answers_as_transformers_with_the_same_matrices(seen: dict[str, Any], folder: Path) -> None:
    for number, rows in enumerate(seen["phi"]):
        there = folder / "work" / f"v{number}"
        for prompt, row in zip(PROMPTS, rows, strict=True):
            expected = reference(there / "theta", there / "phi", prompt, len(row))
            assert [token for token, _ in row] == [token for token, _ in expected]
            assert max(abs(one[1] - other[1]) for one, other in zip(row, expected, strict=True)) < TOLERANCE


def reference(model: Path, adapter: Path, prompt: list[int], tokens: int) -> list[tuple[int, float]]:
    """Greedy tokens with their log-probabilities. The adapter's product is added to each layer's output, as PEFT does
    it.
    """
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    matrices = load_file(adapter / "adapter_model.safetensors")
    for name, a in matrices.items():
        if name.endswith(".lora_A.weight"):
            b = matrices[name.replace("lora_A", "lora_B")] * (settings["lora_alpha"] / settings["r"])

            def add(_: Any, inputs: Any, output: torch.Tensor, a: Any = a, b: Any = b) -> torch.Tensor:
                return output + inputs[0] @ a.t() @ b.t()

            place = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            network.get_submodule(place).register_forward_hook(add)
    found: list[tuple[int, float]] = []
    with torch.inference_mode():
        for _ in range(tokens):
            ids = torch.tensor([prompt + [token for token, _ in found]])
            row = network(ids).logits[0, -1].log_softmax(-1)
            found.append((int(row.argmax()), float(row.max())))
    return found
