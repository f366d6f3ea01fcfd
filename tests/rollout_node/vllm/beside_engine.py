"""Run as a script, which prints observations as JSON.

``beside_engine.py MODEL WORK`` installs versions of a model with an adapter beside it into a real vLLM engine in this
process, and saves their folders. ``beside_engine.py FOLDER`` asks a fresh engine with that model alone.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]  # stored_run, peft_folders

import torch
from adapter_engine import PROMPTS, engine, manager_of, says, slot_bits
from peft_folders import config, matrices, save
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

VERSIONS = 3


def state(model: Path, adapter: Path, folder: Path) -> dict[str, bytes]:
    """A run's first state, of both; its small files."""
    folder.mkdir()
    tensors = load_file(model / "model.safetensors")
    tensors |= {f"phi/{n}": t for n, t in load_file(adapter / "adapter_model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    return {"phi/adapter_config.json": (adapter / "adapter_config.json").read_bytes()}


class Installed:
    """A run of both, and its installation into an engine, put together as in vLLM's ranks."""

    def __init__(self, llm: LLM, model: Path, adapter: Path, work: Path) -> None:
        from stored_run import Run, state_of

        from rollout_node.in_engine.rank_installer import RankInstaller
        from rollout_node.vllm_plugin.transfer_engine import VllmRankModel

        self.model, self.work = model, work
        files = state(model, adapter, work / "state")
        self.run = Run(work / "run", *state_of(work / "state"))
        self.run.small = files
        served: list[Any] = []
        llm.apply_model(served.append)
        settings = llm.llm_engine.vllm_config
        self.rank_model = VllmRankModel(settings, settings.model_config, torch.device("cpu"), served[0])
        self.installer = RankInstaller(self.rank_model, work / "no.sock", logging.getLogger("test"))
        self.installation = self.installer._installation_of(self.run.layout)

    def install(self) -> Any:
        how: Any = self.installation.prepare(self.run.files, self.run.version, lambda: False)
        with self.rank_model.loading():
            self.installation.commit(self.run.version)
        return how["install"]

    def audit(self) -> list[int]:
        from rollout_node.in_engine.weight_audit import compare

        differing = self.installation.differing_copies()
        with self.rank_model.loading():
            entries = self.installation.audit(self.run.files, self.run.version, lambda: False, differing)
        return [len(names) for names in compare(self.run.layout, entries, self.run.digests)]

    def save(self, name: str) -> None:
        """The present state as folders: the model, and its adapter in PEFT's form."""
        tensors = load_file(self.run.shadow.path)
        shutil.copytree(self.model, self.work / name / "theta")
        theta = {n: t for n, t in tensors.items() if not n.startswith("phi/")}
        save_file(theta, self.work / name / "theta" / "model.safetensors", {"format": "pt"})
        phi = {n.removeprefix("phi/"): t for n, t in tensors.items() if n.startswith("phi/")}
        save(self.work / name / "phi", phi, json.loads(self.run.small["phi/adapter_config.json"]))


def rolled_back(llm: LLM, there: Installed, request: LoRARequest) -> list[bool]:
    """After a commit that failed for the adapter, or for the model, both have their old bits."""
    from p2pcast.ground.errors import IntegrityError

    found: list[bool] = []
    manager, slots = manager_of(llm), there.installation._followers
    held = there.installation.held

    def observed() -> list[Any]:
        weights = [p.detach().clone().view(torch.uint8).numpy().tobytes() for p in there.rank_model.model.parameters()]
        return [weights, slot_bits(manager, 1), says(llm, None), says(llm, request)]

    before = observed()
    there.run.step(50, share=0.3, bits=0x0100)
    for fault in ("adapter", "model"):
        there.installation.prepare(there.run.files, there.run.version, lambda: False)
        follow = slots.follow
        calls: list[Any] = []

        def fail(settings: Any, follow: Any = follow, calls: list[Any] = calls) -> None:
            follow(settings)
            calls.append(settings)
            if len(calls) == 1:
                raise RuntimeError("a slot failed")

        if fault == "adapter":
            slots.follow = fail
        else:
            there.installation._prepared.mark ^= 1
        try:
            there.installation.commit(there.run.version)
            found.append(False)
        except (IntegrityError, RuntimeError):
            found.append(there.installation.held == held)
        slots.follow = follow
        found.append(observed() == before)
    there.install()
    return [*found, observed() != before, there.audit() == [0, 0]]


def together(llm: LLM, request: LoRARequest) -> list[Any]:
    """As ``says`` of the base, while each prompt is asked of the adapter in the same batch."""
    how = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=0)
    found = []
    for prompt in PROMPTS:
        texts: Any = [{"prompt_token_ids": prompt}] * 2
        asked = llm.generate(texts, how, lora_request=[None, request], use_tqdm=False)
        output = asked[0].outputs[0]
        found.append([(t, row[t].logprob) for t, row in zip(output.token_ids, output.logprobs or [], strict=True)])
    return found


def noticed(llm: LLM, there: Installed) -> list[bool]:
    """One flipped bit: in the model, in the slot."""
    manager, found = manager_of(llm), []
    qkv = manager.modules["model.layers.0.self_attn.qkv_proj"]
    for tensor in (qkv.base_layer.weight.data, qkv.lora_b_stacked[1][manager.lora_index_to_id.index(1), 0]):
        words = tensor.view(torch.int32)
        words[0, 0] ^= 0x0100
        found.append(there.audit() == [1, 0])
        words[0, 0] ^= 0x0100
    return [*found, there.audit() == [0, 0]]


def versions(model: Path, work: Path) -> dict[str, Any]:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from rollout_node.vllm_plugin import cpu_repairs, cpu_weights
    from rollout_node.vllm_plugin.loaded_adapters import keep_installed_adapters

    keep_installed_adapters()
    cpu_repairs.repair_lora(PunicaWrapperCPU)
    cpu_weights.keep_weights_in_place()
    first = save(work / "first", matrices(model, seed=1, targets=["q_proj"], dtype=torch.float32), config(alpha=3))
    adapter = save(
        work / "adapter", matrices(model, seed=2, rank=6, dtype=torch.float32, spread=0.05), config(rank=6, alpha=7)
    )
    llm = engine(model, dtype="float32", enable_lora=True, max_lora_rank=8, max_loras=1)
    request = LoRARequest("phi", 1, str(first))
    says(llm, request)
    there = Installed(llm, model, adapter, work)
    mapping = there.installation.mapping
    seen: dict[str, Any] = {
        "installs": [],
        "audits": [],
        "base": [],
        "phi": [],
        "together": [],
        "reload": len(mapping.reload),
    }
    for number in range(VERSIONS):
        if number:
            there.run.step(number, share=0.3, bits=0x00400000)
        seen["installs"].append(there.install())
        seen["audits"].append(there.audit())
        seen["base"].append(says(llm, None))
        seen["phi"].append(says(llm, request))
        seen["together"].append(together(llm, request))
        there.save(f"v{number}")
    seen["rollback"] = rolled_back(llm, there, request)
    seen["noticed"] = noticed(llm, there)
    there.run.shadow.close()
    return seen


def alone(folder: Path) -> dict[str, Any]:
    from rollout_node.vllm_plugin import cpu_weights

    cpu_weights.keep_weights_in_place()
    return {"base": says(engine(folder, dtype="float32"), None)}


def main() -> None:
    model, *work = map(Path, sys.argv[1:])
    print("\n" + json.dumps(versions(model, work[0]) if work else alone(model)))


if __name__ == "__main__":
    main()
