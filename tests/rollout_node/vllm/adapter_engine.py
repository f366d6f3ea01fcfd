"""Run as a script: ``adapter_engine.py MODEL WORK`` installs adapters into a real vLLM engine in this process, and
compares its slots and answers with those of vLLM's own loader. Prints the observations as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]  # stored_run, peft_folders

import torch
from peft_folders import config, matrices, merged, save, saved_state, state
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

PROMPTS = [[5, 6, 7], [100, 200, 300, 400], [9]]


def engine(model: Path, **more: Any) -> LLM:
    sizes: Any = {"max_model_len": 64, "max_num_seqs": 4, "enable_prefix_caching": False, "num_gpu_blocks_override": 32}
    return LLM(str(model), enforce_eager=True, skip_tokenizer_init=True, **sizes, **more)


def says(llm: LLM, request: LoRARequest | None) -> list[Any]:
    """Greedy tokens with their log-probabilities, one prompt at a time."""
    how = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=0)
    found = []
    for prompt in PROMPTS:
        asked = llm.generate([{"prompt_token_ids": prompt}], how, lora_request=request, use_tqdm=False)
        output = asked[0].outputs[0]
        rows = output.logprobs or []
        found.append([(t, row[t].logprob) for t, row in zip(output.token_ids, rows, strict=True)])
    return found


def manager_of(llm: LLM) -> Any:
    found: list[Any] = []
    llm.apply_model(found.append)
    return found[0].lora_manager


def slot_bits(manager: Any, number: int) -> list[bytes]:
    """Every byte of the slots of one id."""
    slot = manager.lora_index_to_id.index(number)
    out = []
    for layer in manager.modules.values():
        for stacked in (layer.lora_a_stacked, layer.lora_b_stacked):
            parts = stacked if isinstance(stacked, tuple) else (stacked,)
            out += [part[slot].contiguous().view(torch.uint8).numpy().tobytes() for part in parts]
    return out


class Installed:
    """A run of adapters and its installation into the engine."""

    def __init__(self, llm: LLM, work: Path, adapters: dict[str, Path]) -> None:
        from stored_run import Run, state_of

        from rollout_node.in_engine.adapter_weights import AdapterWeights
        from rollout_node.in_engine.installation import Installation
        from rollout_node.vllm_plugin.adapter_slots import AdapterSlots

        folder, files = state(work / "state", adapters)
        self.run = Run(work / "run", *state_of(folder))
        self.run.small = files
        self.manager = manager_of(llm)
        weights = AdapterWeights(self.run.layout, sorted(adapters))
        self.slots = AdapterSlots(self.manager.model, weights)
        self.installation = Installation(weights, self.run.layout, followers=self.slots)

    def install(self) -> Any:
        how: Any = self.installation.prepare(self.run.files, self.run.version, lambda: False)
        self.installation.commit(self.run.version)
        return how["install"]

    def audit(self) -> list[int]:
        from rollout_node.in_engine.weight_audit import compare

        differing = self.installation.differing_copies()
        entries = self.installation.audit(self.run.files, self.run.version, lambda: False, differing)
        return [len(names) for names in compare(self.run.layout, entries, self.run.digests)]


def refusal(work: Callable[[], Any]) -> str:
    from p2pcast.ground.errors import P2PCastError

    try:
        work()
    except P2PCastError as error:
        return str(error)
    return "nothing was refused"


def versions(llm: LLM, model: Path, work: Path) -> dict[str, Any]:
    """Two adapters in one run: of other ranks and targets than the folders that the server loaded first."""
    first = save(work / "first", matrices(model, seed=1, targets=["q_proj", "down_proj"]), config(alpha=3))
    one = save(
        work / "one",
        matrices(model, seed=2, rank=6, ranks={"k_proj": 3, "up_proj": 8}),
        config(rank=6, alpha=7, use_rslora=True, rank_pattern={"k_proj": 3, "up_proj": 8}, alpha_pattern={"v_proj": 5}),
    )
    two = save(work / "two", matrices(model, seed=3, targets=["v_proj", "gate_proj", "o_proj"]), config(alpha=8))
    requests = {"one": LoRARequest("one", 1, str(first)), "two": LoRARequest("two", 2, str(first))}
    old = [says(llm, request) for request in requests.values()]
    there = Installed(llm, work, {"one": one, "two": two})
    addresses = [part.data_ptr() for layer in there.manager.modules.values() for part in layer.lora_b_stacked]
    seen: dict[str, Any] = {"installs": [], "slots": [], "says": [], "audits": [], "changed": [], "stay": []}
    for number in range(3):
        if number:
            there.run.step(number, share=0.3, bits=0x0180)
        held = list(there.manager.lora_index_to_id)
        seen["installs"].append(there.install())
        seen["stay"].append({1, 2} <= set(held) and held == list(there.manager.lora_index_to_id))
        seen["audits"].append(there.audit())
        folders = saved_state(there.run.shadow.path, there.run.small, work / f"v{number}")
        for k, (name, request) in enumerate(requests.items()):
            found = says(llm, request)
            bits = slot_bits(there.manager, request.lora_int_id)
            loaded = LoRARequest(f"truth {name} {number}", 10 + 2 * number + k, str(folders[name]))
            truth = says(llm, loaded)
            seen["slots"].append(bits == slot_bits(there.manager, loaded.lora_int_id))
            seen["says"].append(found == truth)
            seen["changed"].append(found != old[k])
            old[k] = found
    seen["in_place"] = addresses == [
        part.data_ptr() for layer in there.manager.modules.values() for part in layer.lora_b_stacked
    ]
    seen["from_the_cache"] = forgotten(llm, there, requests, work)
    seen["rollback"] = rolled_back(llm, there, requests)
    seen["noticed"] = noticed(there)
    seen["configuration"] = configuration(llm, there, requests, work)
    seen["refused"] = refusals(llm, model, work)
    there.run.shadow.close()
    return seen


def forgotten(llm: LLM, there: Installed, requests: dict[str, LoRARequest], work: Path) -> list[bool]:
    """An adapter that vLLM dropped from slot and cache comes back with the installed matrices, whatever its id."""
    request, before = requests["one"], says(llm, requests["one"])
    bits, folder = slot_bits(there.manager, 1), str(work / "v0" / "two")
    for number in range(30, 36):
        says(llm, LoRARequest(f"other {number}", number, folder))
    dropped = 1 not in there.manager.list_adapters() and 1 not in there.manager.lora_index_to_id
    there.run.step(40, share=0.3, bits=0x0180)
    there.install()  # while no slot holds it
    found = [dropped, says(llm, request) != before, slot_bits(there.manager, 1) != bits, there.audit() == [0, 0]]
    again = LoRARequest("one", 7, request.lora_path)  # unloaded, and loaded again
    found += [says(llm, again) == says(llm, request), slot_bits(there.manager, 7) == slot_bits(there.manager, 1)]
    there.run.step(41, share=0.3, bits=0x0180)
    there.install()
    reread = LoRARequest("one", 1, request.lora_path, load_inplace=True)
    return [*found, says(llm, again) == says(llm, request) == says(llm, reread), there.audit() == [0, 0]]


def rotated(narrow: LLM, wide: LLM, model: Path, work: Path) -> dict[str, list[bool]]:
    """Three adapters share the one slot of ``narrow``. Its host cache has room for the three, so that a request of a
    fourth drops one of them. ``wide`` loads each version's folders by itself.
    """
    first = save(work / "first", matrices(model, seed=6), config(alpha=5))
    adapters = {
        name: save(work / name, matrices(model, seed=10 + alpha), config(alpha=alpha))
        for name, alpha in (("red", 3), ("green", 8), ("blue", 12))
    }
    requests = {name: LoRARequest(name, number, str(first)) for number, name in enumerate(adapters, 1)}
    found: dict[str, list[bool]] = {"says": [], "dropped": [], "audits": []}
    for request in requests.values():
        says(narrow, request)
    there = Installed(narrow, work, adapters)
    for number in range(2):
        if number:
            there.run.step(number, share=0.3, bits=0x0180)
        there.install()
        folders = saved_state(there.run.shadow.path, there.run.small, work / f"v{number}")
        truth = {
            name: says(wide, LoRARequest(f"{name} {number}", 70 + 3 * number + k, str(folders[name])))
            for k, name in enumerate(adapters)
        }
        for _ in range(2):
            found["says"] += [says(narrow, request) == truth[name] for name, request in requests.items()]
            says(narrow, LoRARequest("other", 9, str(first)))
            found["dropped"].append(not {1, 2, 3} <= set(there.manager.list_adapters()))
        found["audits"].append(there.audit() == [0, 0])
    there.run.shadow.close()
    return found


def rolled_back(llm: LLM, there: Installed, requests: dict[str, LoRARequest]) -> list[bool]:
    """After an abort, and after a write that failed half-way, every copy has its old bits."""
    before = [says(llm, request) for request in requests.values()]
    old, bits = there.installation.held, [slot_bits(there.manager, n) for n in (1, 2)]
    there.run.step(50, share=0.3, bits=0x0180)
    there.install()
    undone = there.installation.abort() and there.installation.held == old
    found = [undone, [says(llm, request) for request in requests.values()] == before]
    follow, calls = there.slots.follow, []

    def fail(settings: Any) -> None:
        follow(settings)
        calls.append(settings)
        if len(calls) == 1:
            raise RuntimeError("a copy failed")

    there.slots.follow = fail  # type: ignore[method-assign]
    try:
        there.install()
    except RuntimeError:
        found.append(there.installation.held == old and len(calls) == 2)
    there.slots.follow = follow  # type: ignore[method-assign]
    found.append(bits == [slot_bits(there.manager, n) for n in (1, 2)])
    there.install()
    return [*found, there.audit() == [0, 0]]


def noticed(there: Installed) -> list[bool]:
    """One flipped bit: in a slot, beside the matrix in a slot, at a layer without matrices, in the cache."""
    manager, found = there.manager, []
    slot, other = manager.lora_index_to_id.index(1), manager.lora_index_to_id.index(2)
    qkv, mlp = manager.modules["model.layers.0.self_attn.qkv_proj"], manager.modules["model.layers.1.mlp.down_proj"]
    cached = manager.list_adapters()[1].loras["model.layers.1.mlp.down_proj"].lora_b
    for tensor in (
        qkv.lora_b_stacked[1][slot, 0, :, :3],
        qkv.lora_a_stacked[1][slot, 0, 3:],
        mlp.lora_b_stacked[0][other, 0],
        cached,
    ):
        words = tensor.view(torch.int16)
        words[0, 0] ^= 0x0100
        found.append(there.audit()[0] >= 1)
        words[0, 0] ^= 0x0100
    return [*found, there.audit() == [0, 0]]


def configuration(llm: LLM, there: Installed, requests: dict[str, LoRARequest], work: Path) -> bool:
    """The factor is that of the version's configuration, which may change between two versions."""
    settings = json.loads(there.run.small["two/adapter_config.json"])
    there.run.small["two/adapter_config.json"] = json.dumps(settings | {"lora_alpha": 11}).encode()
    there.run.step(60, share=0.01, bits=0x0180)
    there.install()
    folders = saved_state(there.run.shadow.path, there.run.small, work / "configured")
    return says(llm, requests["two"]) == says(llm, LoRARequest("configured", 61, str(folders["two"])))


def refusals(llm: LLM, model: Path, work: Path) -> dict[str, str]:
    """Messages of adapters that cannot be installed."""

    def attempt(name: str, tensors: dict[str, torch.Tensor], settings: dict[str, Any], adapter: str = "one") -> str:
        folder = save(work / "refused" / name, tensors, settings)

        def work_() -> None:
            there = Installed(llm, work / "refused" / f"{name} run", {adapter: folder})
            try:
                there.install()
            finally:
                there.run.shadow.close()

        return refusal(work_)

    plain = matrices(model, targets=["q_proj"])
    embedding = {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 500).bfloat16()}
    lone = {n: t for n, t in plain.items() if "lora_A" in n}
    wide = {n.replace("q_proj", "o_proj"): torch.cat([t, t], 1) for n, t in plain.items()}
    return {
        "rank": attempt("rank", matrices(model, rank=9, targets=["q_proj"]), config(rank=9)),
        "stated rank": attempt("stated", plain, config(rank=2)),
        "dora": attempt("dora", plain, config(use_dora=True)),
        "embedding": attempt("embedding", embedding, config()),
        "lone": attempt("lone", lone, config()),
        "shape": attempt("shape", wide, config()),
        "name": attempt("name", plain, config(), "unknown"),
        "unnamed": attempt("unnamed", plain, config(), ""),
        "configuration": attempt("configuration", plain, {"r": "four"}),
    }


def merged_answers(model: Path, work: Path) -> list[Any]:
    """Of the base with an adapter, and of the merged model, each in an engine of its own."""
    adapter = save(work / "merging", matrices(model, seed=5, dtype=torch.float32, spread=0.05), config(alpha=8))
    found: list[Any] = []
    for folder, more in ((model, {"enable_lora": True, "max_lora_rank": 8}), (merged(model, adapter, work / "m"), {})):
        llm = engine(folder, dtype="float32", **more)
        found.append(says(llm, LoRARequest("merging", 1, str(adapter)) if more else None))
        llm.llm_engine.engine_core.shutdown()
        del llm
    return found


def main() -> None:
    model, other, work = map(Path, sys.argv[1:])
    from rollout_node.vllm_plugin.loaded_adapters import keep_installed_adapters

    keep_installed_adapters()
    answers = merged_answers(other, work)  # first: no engine can start after p2pcast's kernels are loaded
    llm = engine(model, enable_lora=True, max_lora_rank=8, max_loras=4, max_cpu_loras=5)
    narrow = engine(model, enable_lora=True, max_lora_rank=8, max_loras=1, max_cpu_loras=3)
    seen = versions(llm, model, work) | {"rotated": rotated(narrow, llm, model, work / "rotated"), "merged": answers}
    print("\n" + json.dumps(seen))


if __name__ == "__main__":
    main()
