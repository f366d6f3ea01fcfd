"""Run as a script: ``real_models.py BF16_FOLDER F32_FOLDER WORK``. Installs into real vLLM models in this process and compares
every parameter, bit for bit, with engines started from the same versions. Prints what it saw as JSON."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
import torch
from vllm import LLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model


def engine(folder: Path, dtype: str) -> LLM:
    return LLM(str(folder), dtype=dtype, max_model_len=64, max_num_seqs=2, enforce_eager=True, skip_tokenizer_init=True)


def model_of(llm: LLM) -> Any:
    found: list[Any] = []
    llm.apply_model(found.append)
    return found[0]


def bits(model: torch.nn.Module) -> dict[str, str]:
    rows = {n: p.detach().contiguous().view(torch.uint8).numpy().tobytes() for n, p in model.named_parameters()}
    return {n: hashlib.sha256(row).hexdigest() for n, row in rows.items()}


def truth_of(config: VllmConfig, folder: Path) -> dict[str, str]:
    """What vLLM itself makes of ``folder``."""
    config = copy.deepcopy(config)
    config.model_config.model = str(folder)
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config):
        return bits(get_model(vllm_config=config))


def case(llm: LLM, folder: Path, work: Path) -> dict[str, Any]:
    # Imported late: vLLM's CPU build can't start another engine in a process that has loaded numba.
    from conftest import Run, state_of

    from rollout_node.vllm_plugin import cpu
    from rollout_node.vllm_plugin.audit import compare, digests
    from rollout_node.vllm_plugin.dense import reload_all
    from rollout_node.vllm_plugin.derived import derived_parts
    from rollout_node.vllm_plugin.installation import Installation
    from rollout_node.vllm_plugin.shadow_reader import ShadowReader

    layout, state = state_of(folder)
    rng = np.random.default_rng(9)
    run = Run(work / "run", layout, state)
    model: Any = model_of(llm)
    with torch.inference_mode():
        for p in model.parameters():
            p.copy_(torch.from_numpy(rng.standard_normal(tuple(p.shape), np.float32)))
    config = llm.llm_engine.vllm_config
    with set_current_vllm_config(config):
        installation = Installation(model, config.model_config, layout, derived_parts(model))
    seen: dict[str, Any] = {"packed": cpu.check(model), "derived": installation.derived}
    seen["reload"] = len(installation.mapping.reload)
    seen["installs"] = []
    for seed in (None, 1, 2):
        if seed is not None:
            run.step(seed, share=0.05)
        how: Any = installation.prepare(run.files, run.version, lambda: False)
        with set_current_vllm_config(config):
            installation.commit(run.version)
        seen["installs"].append(how["install"])
    wrong, unknown = compare(layout, digests(layout, installation.mapping, installation.storages), run.digests)
    seen["audit"] = [len(wrong), len(unknown)]
    there = bits(model)
    with torch.inference_mode():
        for p in model.parameters():
            p.zero_()
    with run.shadow.path.open("rb") as file, set_current_vllm_config(config):
        reload_all(ShadowReader(file.fileno(), layout), model, config.model_config)
    reloaded = bits(model)
    pointers_kept = not installation.storages.gone(model)
    truth = truth_of(config, run.save(folder, work / "truth"))
    seen |= {"sparse_equal": there == truth, "reload_equal": reloaded == truth, "in_place": pointers_kept}
    run.shadow.close()
    return seen


def main() -> None:
    bf16, f32, work = map(Path, sys.argv[1:])
    cases = {"tied": (bf16, "bfloat16"), "f32": (f32, "float32"), "cast": (f32, "bfloat16")}
    engines = {name: engine(*how) for name, how in cases.items()}
    found = {name: case(engines[name], how[0], work / name) for name, how in cases.items()}
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
