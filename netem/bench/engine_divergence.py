"""KL divergence between sampler and learner for each kind of engine that runs on this machine.

One small model of random weights. Each engine is a real vLLM, started from the folder of its kind, and samples tokens
with their log-probabilities. The learner scores the same tokens in fp32 with the weights as trained.

Run as a script, ``engine_divergence.py FOLDER``: print the samples of one engine as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

TOKENS, PROMPTS, VOCABULARY = 64, 32, 500
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "P2PCAST_SOCK": "/nonexistent",
}
DEADLINE_S: Final = 900.0
_LAST_LINES: Final = 3

Samples = list[tuple[list[int], list[int], list[float]]]
"""Prompt, sampled tokens, and the sampler's log-probability of each."""


def measured() -> list[dict[str, Any]]:
    """A row for each kind of engine; ``error`` where vLLM has no kernel for the kind on this machine."""
    from netem.fleet.small_model import SmallModel, write_small_model
    from p2pcast.checkpoint.folder import write_folder
    from p2pcast.quantised.folder_opening import opening
    from p2pcast.quantised.quantisation_kinds import KINDS

    rows = []
    with tempfile.TemporaryDirectory(prefix="p2pcast-divergence-") as name:
        plain = Path(name) / "bf16"
        write_small_model(plain, SmallModel(VOCABULARY, hidden=256, mlp=2), seed=1, dtype="bfloat16")
        rows.append(_row(plain, plain))
        for kind in KINDS:
            source = opening(kind)(plain)
            write_folder(plain.with_name(kind), source.layout(), source.words, source.small_files())
            rows.append(_row(plain.with_name(kind), plain))
    return rows


def _row(folder: Path, plain: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=DEADLINE_S
    )
    if done.returncode:
        last = [line for line in done.stderr.strip().splitlines() if line.strip()][-_LAST_LINES:]
        return {"engine": folder.name, "error": " ".join(line.split("]: ")[-1].strip() for line in last)[:300]}
    samples: Samples = json.loads(done.stdout.strip().splitlines()[-1])
    return {"engine": folder.name, "error": None, **_divergence(plain, samples)}


def _divergence(plain: Path, samples: Samples) -> dict[str, Any]:
    """Means over the sampled tokens: of log sampler - log learner, and of the k3 estimate, which is never negative."""
    import torch
    from transformers import AutoModelForCausalLM

    learner = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    ratios = []
    with torch.inference_mode():
        for prompt, sampled, logprobs in samples:
            logits = learner(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
            learnt = logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]
            ratios.append(torch.tensor(logprobs) - learnt)
    ratio = torch.cat(ratios).double()
    k3 = torch.expm1(-ratio) + ratio
    return {"tokens": len(ratio), "kl": float(ratio.mean()), "k3": float(k3.mean())}


def _sample(folder: str) -> Samples:
    import torch
    from vllm import LLM, SamplingParams

    torch.manual_seed(0)
    engine = LLM(folder, enforce_eager=True, max_model_len=256, max_num_seqs=8, skip_tokenizer_init=True, seed=0)
    how = SamplingParams(temperature=1, max_tokens=TOKENS, ignore_eos=True, logprobs=0, seed=0, detokenize=False)
    prompts = [[7 * n + 5, 11 * n + 3, n + 9] for n in range(PROMPTS)]
    found: Samples = []
    for answer in engine.generate([{"prompt_token_ids": p} for p in prompts], how, use_tqdm=False):
        one = answer.outputs[0]
        tokens = list(one.token_ids)
        logprobs = [entry[token].logprob for entry, token in zip(one.logprobs, tokens, strict=True)]
        found.append((list(answer.prompt_token_ids), tokens, logprobs))
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(_sample(sys.argv[1])))
