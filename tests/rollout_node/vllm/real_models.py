"""Run as a script, in two ways; prints JSON. A case is ``FOLDER=DTYPE`` or ``FOLDER=DTYPE:QUANTIZATION``.

``real_models.py install WORK CASE…``: install three versions of each case into a real vLLM engine in this process.
Compare every parameter and buffer, bit for bit, with the result of vLLM's own loader. The versions are left in
``WORK/CASE/v0`` to ``v2``. Prints the observations by case.

``real_models.py say CASE…``: print the completions of engines started from these folders, in their order.

Cases with experts must come first: vLLM creates its process groups for a process's first engine.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
sys.path.append(str(Path(__file__).parents[1]))  # stored_run

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import get_model

PROMPTS = [[5, 6, 7], [100, 200, 300, 400], [9]]
BITS = {"BF16": 0x0180, "F32": 0x01800000}
"""The lowest bits of the exponents, so that a version's changes are visible in the model's answers."""
SIGN = 0x80
"""Of codes in fp8, which no change of it turns into NaN."""


def engine(case: str) -> LLM:
    folder, _, dtype = case.rpartition("=")
    dtype, _, quantization = dtype.partition(":")
    sizes: Any = {"max_model_len": 64, "max_num_seqs": 2, "enable_prefix_caching": False, "num_gpu_blocks_override": 16}
    how: Any = {
        "dtype": dtype,
        "quantization": quantization or None,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
    }
    return LLM(folder, **how, **sizes)


def says(llm: LLM) -> list[list[int]]:
    """Greedy completions, one prompt at a time, since batches change rounding."""
    how = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    asked = [llm.generate([{"prompt_token_ids": p}], how, use_tqdm=False) for p in PROMPTS]
    return [list(answer[0].outputs[0].token_ids) for answer in asked]


def model_of(llm: LLM) -> Any:
    found: list[Any] = []
    llm.apply_model(found.append)
    return found[0]


def bits(model: torch.nn.Module) -> dict[str, str]:
    rows = {n: t.detach().contiguous().reshape(-1) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    return {
        n: hashlib.sha256(row.view(torch.uint8).numpy().tobytes()).hexdigest() for n, row in rows.items() if row.numel()
    }


def truth_of(config: VllmConfig, folder: Path) -> dict[str, str]:
    """Parameters after vLLM's own loader has loaded ``folder``."""
    config, model, compilation = copy.copy(config), copy.copy(config.model_config), copy.copy(config.compilation_config)
    model.model = str(folder)
    compilation.static_forward_context, compilation.static_all_moe_layers = {}, []
    config.model_config, config.compilation_config = model, compilation
    with set_current_vllm_config(config):
        return bits(get_model(vllm_config=config))


def overwrite_all(model: torch.nn.Module) -> None:
    """Overwrite all values, so that no correct value is left over."""
    generator = torch.Generator().manual_seed(9)
    with torch.inference_mode():
        for p in model.parameters():
            if p.is_floating_point():
                p.copy_(torch.randn(p.shape, generator=generator))
            else:
                p.random_(-100, 100, generator=generator)


def noticed(model: torch.nn.Module, audit: Any) -> bool:
    """Whether the audit notices one flipped bit in each parameter."""
    rng = np.random.default_rng(4)
    parameters = [p for p in model.parameters() if p.numel() > 1]
    for p in [parameters[i] for i in rng.choice(len(parameters), 4, replace=False)]:
        words = p.data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[p.element_size()])
        at = tuple(
            int(rng.integers(0, max(1, n * 7 // 8))) for n in p.shape
        )  # a vocabulary's end is padding, which the audit does not cover
        words[at] ^= 1
        wrong, _ = audit()
        words[at] ^= 1
        if len(wrong) != 1:
            return False
    return True


def refused(model: torch.nn.Module, config: VllmConfig, layout: Any, state: Any, work: Path, left_out: str) -> bool:
    """Whether a whole load is refused if the layout lacks the tensors whose name contains ``left_out``."""
    from stored_run import Run

    from p2pcast.codec.layout import Layout
    from p2pcast.ground.errors import IntegrityError
    from rollout_node.in_engine.shadow_reader import ShadowReader
    from rollout_node.vllm_plugin.derived_weights import reload_all

    fewer = [t for t in layout.tensors if left_out not in t.name]
    if len(fewer) == len(layout.tensors):
        return True
    run = Run(work / left_out, Layout(fewer), state)
    try:
        with run.shadow.path.open("rb") as file, set_current_vllm_config(config):
            reload_all(ShadowReader(file.fileno(), Layout(fewer)), model, config.model_config)
    except IntegrityError:
        return True
    finally:
        run.shadow.close()
    return False


def with_head(layout: Any) -> Any:
    """The layout of a version that brings an output head of its own, or ``layout`` if it has one."""
    from p2pcast.codec.layout import Layout, Tensor

    embedding = next(
        t for t in layout.tensors if t.name.endswith(("embed_tokens.weight", "wte.weight", "embeddings.weight"))
    )
    heads = {"lm_head.weight": Tensor("lm_head.weight", embedding.dtype, embedding.shape)}
    return Layout([*layout.tensors, *(tensor for name, tensor in heads.items() if name not in layout.numbers)])


def install(llm: LLM, folder: Path, work: Path) -> dict[str, Any]:
    # Imported late: vLLM's CPU build can't start another engine in a process that has loaded numba.
    from stored_run import Run, state_of

    from rollout_node.in_engine.installation import DerivedParts, Installation
    from rollout_node.in_engine.shadow_reader import ShadowReader
    from rollout_node.in_engine.weight_audit import compare
    from rollout_node.vllm_plugin import cpu_weights, quantised_layers
    from rollout_node.vllm_plugin.derived_weights import derived_parts, reload_all

    if packed := cpu_weights.packed_layers(model_of(llm)):
        return {"packed": packed[:1]}
    layout, state = state_of(folder)
    run = Run(work / "run", layout, state)
    model, config = model_of(llm), llm.llm_engine.vllm_config
    overwrite_all(model)
    with set_current_vllm_config(config):
        reload_model = partial(reload_all, model=model, model_config=config.model_config)
        form = partial(quantised_layers.loading_form, model)
        parts = derived_parts(model)
        derived = DerivedParts(parts, reload_model) if parts else None
        wider = Installation(model, with_head(layout), derived, loading_form=form)
        installation = Installation(model, layout, derived, loading_form=form)

    def audit() -> tuple[list[str], list[str]]:
        return compare(layout, installation.audit(run.files, run.version, lambda: False), run.digests)

    dtypes = {t.dtype for t in layout.tensors}
    flipped = SIGN if "F8_E4M3" in dtypes else BITS[min(dtypes)] if len(dtypes) == 1 else 0
    seen: dict[str, Any] = {"packed": [], "derived": parts[:1]}
    seen |= {"reload": len(installation.mapping.reload), "tensors": len(layout.tensors)}
    seen |= {"accounts": sorted({account.name for account in wider.accounts(())})}
    seen["twins"] = sorted(wider.layout.tensors[n].name for pair in wider.mapping.twins.items() for n in pair)
    seen |= {"installs": [], "equal": [], "audits": [], "said": []}
    for seed in (None, 1, 2):
        if seed is not None:
            run.step(seed, share=0.05, bits=flipped)
        how: Any = installation.prepare(run.files, run.version, lambda: False)
        with set_current_vllm_config(config):
            installation.commit(run.version)
        saved = run.save(folder, work / f"v{seed or 0}")
        seen["installs"].append(how["install"])
        seen["equal"].append(bits(model) == truth_of(config, saved))
        seen["audits"].append([len(names) for names in audit()])
        seen["said"].append(says(llm))
    seen["in_place"] = not installation.storages.rebound(model)
    seen["noticed"] = bool(parts) or noticed(model, audit)
    there = bits(model)
    overwrite_all(model)
    with run.shadow.path.open("rb") as file, set_current_vllm_config(config):
        reload_all(ShadowReader(file.fileno(), layout), model, config.model_config)
    seen["reload_equal"] = bits(model) == there
    seen["refuses_less"] = [
        refused(model, config, layout, state, work, left_out) for left_out in ("norm.", "down_proj.")
    ]
    run.shadow.close()
    return seen


def experts_differ() -> float:
    """Largest difference between experts computed in place and vLLM's packed kernel, relative to the largest result."""
    from vllm import _custom_ops as ops

    from rollout_node.vllm_plugin.cpu_weights import experts

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    generator, worst = torch.Generator().manual_seed(5), 0.0
    tokens, hidden, width, count = 7, 64, 32, 4
    for activation in ("silu", "gelu", "gelu_tanh", "swigluoai"):
        for biased in (False, True):
            x, w13, w2 = draw(tokens, hidden), draw(count, 2 * width, hidden) / 8, draw(count, hidden, width) / 8
            biases = (draw(count, 2 * width), draw(count, hidden)) if biased else (None, None)
            ids = torch.stack([torch.randperm(count, generator=generator)[:2] for _ in range(tokens)]).int()
            rest = (*biases, torch.rand(tokens, 2, generator=generator), ids, activation)
            theirs, ours = torch.empty(2, tokens, hidden, dtype=torch.bfloat16)
            packed = [ops.cpu_prepack_moe_weight(w, "vec") for w in (w13, w2)]
            ops.cpu_fused_moe(theirs, x, *packed, *rest, "vec", False)
            experts(ours, x, w13, w2, *rest)
            worst = max(worst, float((theirs.float() - ours.float()).abs().max() / theirs.float().abs().max()))
    return worst


def main() -> None:
    if sys.argv[1] == "say":
        said = []
        for case in sys.argv[2:]:
            llm = engine(case)
            said.append(says(llm))
            llm.llm_engine.engine_core.shutdown()
            del llm
        print("\n" + json.dumps(said))
        return
    work, cases = Path(sys.argv[2]), sys.argv[3:]
    engines = [engine(case) for case in cases]
    folders = [Path(case.rpartition("=")[0]) for case in cases]
    names = [Path(case).name for case in cases]
    found = {name: install(llm, folder, work / name) for name, llm, folder in zip(names, engines, folders, strict=True)}
    print("\n" + json.dumps({**found, "experts": experts_differ()}))


if __name__ == "__main__":
    main()
