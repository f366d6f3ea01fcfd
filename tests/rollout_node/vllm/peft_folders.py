"""LoRA adapters of the small Qwen3 in the form that PEFT saves: the folders of servers, and states of runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def sizes_of(model: Path) -> dict[str, tuple[int, int]]:
    """Rows and columns of each linear layer."""
    with (model / "config.json").open() as file:
        config = json.load(file)
    hidden, wide, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    rows = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    return dict(zip(ATTENTION + MLP, [*rows, (wide, hidden), (wide, hidden), (hidden, wide)], strict=True))


def matrices(
    model: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    targets: Sequence[str] = ATTENTION + MLP,
    ranks: Mapping[str, int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    spread: float = 0.1,
) -> dict[str, torch.Tensor]:
    """Random matrices under PEFT's names. ``ranks``: of single layers."""
    draw = torch.Generator().manual_seed(seed)
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    found = {}
    for layer in range(layers):
        for name in targets:
            rows, columns = sizes_of(model)[name]
            r = (ranks or {}).get(name, rank)
            place = f"base_model.model.model.layers.{layer}.{'mlp' if name in MLP else 'self_attn'}.{name}"
            found[f"{place}.lora_A.weight"] = (torch.randn(r, columns, generator=draw) * spread).to(dtype)
            found[f"{place}.lora_B.weight"] = (torch.randn(rows, r, generator=draw) * spread).to(dtype)
    return found


def config(*, rank: int = 4, alpha: float = 8, targets: Sequence[str] = ATTENTION + MLP, **more: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        **more,
    }


def save(folder: Path, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> Path:
    """A folder as PEFT saves one adapter."""
    folder.mkdir(parents=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def state(folder: Path, adapters: Mapping[str, Path]) -> tuple[Path, dict[str, bytes]]:
    """A run's state of these adapters' folders, in a file ``model.safetensors``, and its small files."""
    folder.mkdir(parents=True)
    tensors = {
        f"{name}/{n}" if name else n: t
        for name, source in adapters.items()
        for n, t in load_file(source / "adapter_model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    files = {
        f"{name}/adapter_config.json" if name else "adapter_config.json": (source / "adapter_config.json").read_bytes()
        for name, source in adapters.items()
    }
    return folder, files


def saved_state(shadow: Path, files: Mapping[str, bytes], folder: Path) -> dict[str, Path]:
    """Each adapter of a run's present state, as a folder of PEFT's form."""
    tensors = load_file(shadow)
    names = {name.partition("/")[0] for name in tensors}
    return {
        name: save(
            folder / name,
            {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith(f"{name}/")},
            json.loads(files[f"{name}/adapter_config.json"]),
        )
        for name in sorted(names)
    }


def merged(model: Path, adapter: Path, folder: Path) -> Path:
    """The base model with the adapter's product added to its weights, computed in float32."""
    shutil.copytree(model, folder)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    weights, matrices_ = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, a in matrices_.items():
        if name.endswith("lora_A.weight"):
            place = name.removeprefix("base_model.model.").removesuffix("lora_A.weight")
            b = matrices_[name.replace("lora_A", "lora_B")]
            delta = (b.float() @ a.float()) * (settings["lora_alpha"] / settings["r"])
            weight = weights[f"{place}weight"]
            weights[f"{place}weight"] = (weight.float() + delta).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
